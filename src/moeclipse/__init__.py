"""MoEclipse trains Mixture-of-Experts models so that communication disappears behind computation.

Importing this package touches no device, opens no port and reads no environment variable; the names
below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "MoE": "moeclipse.moe.layer",
    "GateConfig": "moeclipse.moe.config",
    "Mesh": "moeclipse.comm.mesh",
    "aux_loss": "moeclipse.moe.standalone",
    "exclude_experts": "moeclipse.moe.standalone",
    "sync_gradients": "moeclipse.moe.standalone",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'moeclipse' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
