"""What the exchange of one MoE layer costs: rows on two kinds of links, rows through experts, parameters.

Ranks of one group are near, all others far, unless `hosts` says who is near whom: then a group may span
several. Every op has a fixed part, so finer cuts are not free.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeclipse.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ExchangeCosts:
    row_bytes: float
    near_bandwidth: float
    """Bytes per second and direction inside a group."""
    far_bandwidth: float
    """Bytes per second and direction between groups."""
    row_seconds: float
    """One row through one expert, forward."""
    expert_bytes: float = 0.0
    """Parameters of one expert: what a shadow costs to send, and its gradient to return."""
    latency: float = 0.0
    """Per exchange op."""
    far_latency: float | None = None
    """The same between groups; None: alike."""
    kernel: float = 0.0
    """Per compute op, however few its rows."""
    launch: float = 0.0
    """Host time per op."""
    inline_compute: bool = False
    hosts: tuple[int, ...] = ()
    """Of each rank; empty: each group is one."""

    def __post_init__(self) -> None:
        problems = [
            f"{name} ({getattr(self, name)}) must be positive"
            for name in ("row_bytes", "near_bandwidth", "far_bandwidth")
            if getattr(self, name) <= 0
        ]
        problems += [
            f"{name} ({getattr(self, name)}) must not be negative"
            for name in ("row_seconds", "expert_bytes", "latency", "kernel", "launch")
            if getattr(self, name) < 0
        ]
        if self.far_latency is not None and self.far_latency < 0:
            problems.append(f"far_latency ({self.far_latency}) must not be negative")
        if problems:
            raise ConfigError(problems)

    def transfer(self, rows: float, near: bool) -> float:
        bandwidth = self.near_bandwidth if near else self.far_bandwidth
        return self._latency(near) + rows * self.row_bytes / bandwidth

    def transfer_both(self, near_rows: float, far_rows: float, crosses: bool) -> float:
        """One op over both kinds of links, one after the other, as planners price them."""
        rows_s = near_rows / self.near_bandwidth + far_rows / self.far_bandwidth
        return self._latency(near=not crosses) + rows_s * self.row_bytes

    def _latency(self, near: bool) -> float:
        return self.latency if near or self.far_latency is None else self.far_latency

    def compute(self, rows: float) -> float:
        return self.kernel + rows * self.row_seconds

    def parameters(self, copies: int) -> float:
        return self._latency(near=False) + copies * self.expert_bytes / self.far_bandwidth
