"""Costs as if they had been measured, and layers that lend by them."""

from __future__ import annotations

from typing import Any

from moeclipse.moe.tune.probe import Probe

PROBE = Probe(
    row_forward=3e-5,
    row_backward=7e-5,
    kernel=1e-5,
    latency=2e-4,
    bandwidth=1e8,
    link=5e8,
    shared_wire=False,
    row_bytes=1024,
    parameter_bytes=4e6,
    gradient_bytes=8e6,
    num_ranks=2,
)

SLOW_EXPERTS = Probe(
    link=1e9,
    row_forward=1e-4,
    row_backward=2e-4,
    kernel=1e-5,
    latency=1e-4,
    bandwidth=1e9,
    shared_wire=False,
    row_bytes=96,
    parameter_bytes=1e4,
    gradient_bytes=1e4,
    num_ranks=4,
)
"""Shadows are cheap beside them."""


def lend(shadow: Any, **more: Any) -> dict[str, Any]:
    return {"exchange": {"schedule": "smart", "chunks": 2, "shadow": shadow, **more}}
