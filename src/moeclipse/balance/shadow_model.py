"""What a layer costs with and without shadows, in seconds.

Idea: add up for each rank the rows it computes, receives and sends, and the copies of experts it sends and
takes in; the fullest rank sets the pace. Rows, copies and results follow each other on the wire, and the rank
that is fullest with rows need not be the one that sends copies: each of the three has its own fullest rank.
A row or copy that crosses hosts counts as so many near ones as it takes the time of (`ShadowCosts.far`).

    forward    compute: rows x row_forward      wire: 2 x rows sent (there and back) + parameters
    backward   compute: rows x row_backward     wire: 2 x rows sent (there and back) + gradients
    each       max(compute, wire) + (1 - overlap) x min(compute, wire)

Contract: pure; a `Latency` is meant to be held against a measurement, part by part.

Hazard: rows and copies are whole multiples of 1 / FAR_GRAIN, exact in floats, so sums do not depend on their
order. Keep it so: ranks that round differently choose different shadows.

Shapes: P ranks, E experts; leading axes (`...`) hold alternatives that are priced in one call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from moeclipse.core.errors import ConfigError

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
FAR_GRAIN = 16
MIN_GAIN = 0.02
"""Less than that of a layer's time is not worth a copy."""
POWER = 8
"""`merit` is this power mean over ranks: it feels the fullest rank, and the next ones behind it."""


@dataclass(frozen=True, kw_only=True)
class ShadowCosts:
    """Seconds, measured."""

    row_forward: float
    """One row through one expert."""
    row_backward: float
    row_send: float
    """One row across the wire, one way."""
    parameter_bytes: float
    """Parameters of one expert in the type they travel in."""
    gradient_bytes: float
    parameter_byte: float
    """Seconds per byte of parameters sent to one rank."""
    gradient_byte: float
    """Seconds per byte of gradients sent back and added."""
    copy: float = 0.0
    """Added for each copy, however small: latency, launches."""
    overlap: float = 1.0
    """The part of the shorter of compute and wire that hides: 1 for smart, 0 for blocking."""
    shared_wire: bool = False
    """All ranks share one wire (one network card, loopback): bytes add up over ranks."""
    far: float = 1.0
    """Near rows, or copies, that take as long as one across hosts; in whole parts of FAR_GRAIN."""
    min_rows: int = 1
    """A rank with fewer rows of an expert gets no copy of it, whatever they cost."""
    min_gain: float = MIN_GAIN
    """Shadows must make the layer faster by this part of its time, or none is used; ..."""
    row_doubt: float = 0.0
    """... nor where they win less than prices may be off by: those of computing rows by this part, ..."""
    wire_doubt: float = 0.0
    """... those of all that travels by this."""

    def __post_init__(self) -> None:
        names = (
            *("row_forward", "row_backward", "row_send", "parameter_bytes", "gradient_bytes"),
            *("parameter_byte", "gradient_byte", "copy", "min_gain", "row_doubt", "wire_doubt"),
        )
        problems = [
            f"{name} ({getattr(self, name)}) must not be negative"
            for name in names
            if getattr(self, name) < 0
        ]
        if not 0 <= self.overlap <= 1:
            problems.append(f"overlap ({self.overlap}) must lie between 0 (blocking) and 1 (all hidden)")
        if self.far < 1 or not (FAR_GRAIN * self.far).is_integer():
            problems.append(f"far ({self.far}) must be at least 1, and a multiple of 1/{FAR_GRAIN}")
        if self.min_rows < 1:
            problems.append(f"min_rows ({self.min_rows}) must be at least 1")
        if problems:
            raise ConfigError(problems)

    @property
    def parameter_seconds(self) -> float:
        """One copy of an expert to one rank."""
        return self.parameter_bytes * self.parameter_byte + self.copy

    @property
    def gradient_seconds(self) -> float:
        return self.gradient_bytes * self.gradient_byte + self.copy

    @property
    def enough_rows(self) -> float:
        """Rows of one rank whose travel and computation elsewhere cost as much as a copy of the expert."""
        row = 4 * self.row_send + self.row_forward + self.row_backward
        copy = self.parameter_seconds + self.gradient_seconds
        return max(self.min_rows, copy / row) if row > 0 else np.inf

    def worthwhile(self, before: Latency) -> float:
        """Seconds of a layer that shadows have to win."""
        compute = before.forward_compute + before.backward_compute
        unsure = self.row_doubt * compute + self.wire_doubt * (before.forward_wire + before.backward_wire)
        # Where one hides behind the other only the longer one counts.
        most = max(self.row_doubt, self.wire_doubt) * before.total
        return max(self.min_gain * before.total, min(unsure, most))

    @classmethod
    def from_shapes(
        cls,
        *,
        num_parameters: int,
        row_width: int,
        bandwidth: float,
        row_forward: float,
        row_backward: float | None = None,
        dtype: str = "bf16",
        gradient_dtype: str = "fp32",
        **more: float,
    ) -> ShadowCosts:
        """From the shape of an expert, the types that travel, and a wire of `bandwidth` bytes/s."""
        unknown = [name for name in (dtype, gradient_dtype) if name not in DTYPE_BYTES]
        if unknown:
            raise ConfigError(f"unknown dtype {unknown[0]!r}; choose one of {', '.join(DTYPE_BYTES)}")
        if bandwidth <= 0:
            raise ConfigError(f"bandwidth ({bandwidth}) must be positive: bytes per second")
        costs = cls(
            row_forward=row_forward,
            row_backward=2 * row_forward if row_backward is None else row_backward,
            row_send=row_width * DTYPE_BYTES[dtype] / bandwidth,
            parameter_bytes=num_parameters * DTYPE_BYTES[dtype],
            gradient_bytes=num_parameters * DTYPE_BYTES[gradient_dtype],
            parameter_byte=1 / bandwidth,
            gradient_byte=1 / bandwidth,
        )
        return replace(costs, **more)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Predicted seconds of one layer, compute and wire on their fullest ranks."""

    forward_compute: float
    forward_wire: float
    backward_compute: float
    backward_wire: float
    overlap: float

    @property
    def forward(self) -> float:
        return _joined(self.forward_compute, self.forward_wire, self.overlap)

    @property
    def backward(self) -> float:
        return _joined(self.backward_compute, self.backward_wire, self.overlap)

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True)
class Work:
    """What each rank does, [..., P]: rows computed, received, sent; copies taken in, sent out.

    All but the rows computed are in near ones: those across hosts count as several.
    """

    rows: np.ndarray
    rows_in: np.ndarray
    rows_out: np.ndarray
    copies_in: np.ndarray
    copies_out: np.ndarray

    def at(self, *place: int) -> Work:
        """One of the alternatives."""
        return Work(
            rows=self.rows[place],
            rows_in=self.rows_in[place],
            rows_out=self.rows_out[place],
            copies_in=self.copies_in[place],
            copies_out=self.copies_out[place],
        )

    def with_copies(
        self, given: np.ndarray, sent: np.ndarray, owner: np.ndarray, near_PP: np.ndarray | float = 1.0
    ) -> Work:
        """The work in K alternatives [..., K, P] of which ranks get copies of an expert.

        given [..., K, P] 0/1: who gets one. sent [..., P, P]: rows of the expert, from a source to the rank
        that computed them so far; rows that never left are not among them. owner [..., P] 0/1: who sends
        copies. near_PP: what one from a rank to another is in near ones.
        """
        travel = sent * near_PP
        copies = given * (owner @ np.broadcast_to(near_PP, sent.shape[-2:]))[..., None, :]
        return Work(
            rows=self.rows + given * sent.sum(-1)[..., None, :] - given @ sent,
            rows_in=self.rows_in - given @ travel,
            rows_out=self.rows_out - given * travel.sum(-1)[..., None, :],
            copies_in=self.copies_in + copies,
            copies_out=self.copies_out + owner[..., None, :] * copies.sum(-1, keepdims=True),
        )


def latency(work: Work, costs: ShadowCosts) -> Latency:
    rows = float(work.rows.max())
    travel, copies = (float(phase.max()) for phase in _phases(work, costs))
    return Latency(
        forward_compute=rows * costs.row_forward,
        forward_wire=travel + copies * costs.parameter_seconds,
        backward_compute=rows * costs.row_backward,
        backward_wire=travel + copies * costs.gradient_seconds,
        overlap=costs.overlap,
    )


def merit(work: Work, costs: ShadowCosts) -> np.ndarray:
    """A smooth stand-in for the latency of each alternative [...]; ranks behind the fullest count too."""
    rows = _power_mean(work.rows)
    travel, copies = (_power_mean(phase) for phase in _phases(work, costs))
    total: np.ndarray | float = 0.0
    for row_seconds, copy_seconds in (
        (costs.row_forward, costs.parameter_seconds),
        (costs.row_backward, costs.gradient_seconds),
    ):
        compute, wire = rows * row_seconds, travel + copies * copy_seconds
        total = total + np.maximum(compute, wire) + (1 - costs.overlap) * np.minimum(compute, wire)
    return np.asarray(total)


def _joined(compute: float, wire: float, overlap: float) -> float:
    return max(compute, wire) + (1 - overlap) * min(compute, wire)


def _phases(work: Work, costs: ShadowCosts) -> tuple[np.ndarray, np.ndarray]:
    """Of each rank: seconds of rows on the wire, there and back, and the number of copies.

    Both directions of a link work at once. What a rank sends in dispatch it receives in combine, so the
    busier direction carries the larger of the two numbers both times.
    """
    if costs.shared_wire:
        rows = work.rows_out.sum(-1, keepdims=True)
        copies = work.copies_out.sum(-1, keepdims=True)
    else:
        rows = np.maximum(work.rows_out, work.rows_in)
        copies = np.maximum(work.copies_out, work.copies_in)
    return 2 * costs.row_send * rows, copies


def _power_mean(values: np.ndarray) -> np.ndarray:
    top = values.max(-1, keepdims=True)
    scaled = values / np.where(top > 0, top, 1)
    for _ in range(POWER.bit_length() - 1):
        scaled = scaled * scaled
    # A running sum adds in a fixed order on every processor; a plain sum of floats may not.
    return top[..., 0] * np.sqrt(np.sqrt(np.sqrt(scaled.cumsum(-1)[..., -1] / values.shape[-1])))
