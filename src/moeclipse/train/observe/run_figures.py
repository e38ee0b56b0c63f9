"""The figures of a run and of its steps: what whoever watches a run is told, and what its files hold.

A step's come in two parts: `Learner.step` gives the first, the same on all ranks but for the time; times of
all ranks (`train/observe/step_times`), and what was evaluated behind the step, come later.
"""

from __future__ import annotations

from typing import NotRequired, TypedDict


class StepRecord(TypedDict):
    """A line of metrics.jsonl, which may hold more."""

    step: int
    loss: float
    aux_loss: float
    lr: float
    grad_norm: float
    loss_scale: NotRequired[float]
    num_tokens: int
    dropped: int
    skipped: bool
    signals: NotRequired[list[int]]
    """What each rank says beside its results; no part of a line."""
    notes: NotRequired[list[str]]
    load: list[list[int]]
    """Tokens of each expert, as each rank saw them."""
    balance: NotRequired[float]
    mean_experts: NotRequired[float]
    eval_loss: NotRequired[float]
    tokens_per_s: float
    step_ms: float
    comm_ms: float
    hidden_ms: float
    ranks: NotRequired[dict[str, list[float]]]
    """Times of each rank, by name."""


class RunInfo(TypedDict):
    """What is known when a run starts."""

    name: str
    directory: str
    num_ranks: int
    dp: int
    ep: int
    tp: int
    pp: int
    device: str
    dtype: str
    num_parameters: int
    num_active_parameters: int
    experts_vary: bool
    corpus: str
    unigram_entropy: float
    steps: int
    start_step: int
    tokens_per_step: int


class RunSummary(TypedDict):
    """`summary.json`, which may hold more: means are those of `window`, the rest of the whole run."""

    directory: str
    checkpoint: str | None
    window: str
    loss_first: float | None
    loss_last: float | None
    eval_loss: NotRequired[float]
    unigram_entropy: float
    dropped: int
    skipped: int
    load: list[int]
    balance: NotRequired[float]
    mean_experts: NotRequired[float]
    tokens_per_s: NotRequired[float]
    step_ms: NotRequired[float]
    comm_ms: NotRequired[float]
    hidden_ms: NotRequired[float]
    hidden_fraction: NotRequired[float]
    slowdown: NotRequired[float | None]
    mfu: NotRequired[float]
