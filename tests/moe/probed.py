"""Costs as if they had been measured."""

from __future__ import annotations

from moeclipse.moe.probe import Probe

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
