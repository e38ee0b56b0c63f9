"""Hugging Face: folders of models in and out, and our experts inside the models of transformers.

moeclipse.hf.register()                     experts_implementation="moeclipse" becomes a choice
moeclipse.hf.share_experts(model, mesh)     each rank keeps its experts, rows travel to them
moeclipse.hf.save_pretrained(model, path)   the whole model again; collective
moeclipse.hf.ExpertCallback()               what a Trainer has to know of it
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moeclipse.hf.implementation import num_experts_layers, register
    from moeclipse.hf.share import save_pretrained, share_experts
    from moeclipse.hf.trainer_callback import ExpertCallback

_EXPORTS = {
    "register": "moeclipse.hf.implementation",
    "num_experts_layers": "moeclipse.hf.implementation",
    "share_experts": "moeclipse.hf.share",
    "save_pretrained": "moeclipse.hf.share",
    "ExpertCallback": "moeclipse.hf.trainer_callback",
}

__all__ = ["ExpertCallback", "num_experts_layers", "register", "save_pretrained", "share_experts"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'moeclipse.hf' has no attribute {name!r}")
