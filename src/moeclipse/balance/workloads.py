"""Eight ways in which gates are uneven, each a function of (workload, seed, step) alone.

    even              every expert as likely as any other: what sampling alone does
    hot experts       an eighth of the experts, anywhere, gets half of all choices
    hot rank          the experts that the first rank holds in order get four times their share
    spread heat       as many experts with the same heat, as far apart as they can be
    ragged sources    every expert as likely; ranks have from a quarter to seven quarters of the mean tokens
    nothing           a quarter of the experts, in a row, gets nothing: whole ranks stand still
    rotating          the hot experts of `hot experts`, another eighth every 20 steps
    burst             even, but for 5 of 40 steps a single expert has three tenths of the choices

Idea. Published throughput is that of gates that are forced to be even. Whoever wants to know what uneven ones
cost, and what helps, needs the same unevenness in every layout: tokens are counted over all ranks, and which
experts a token takes follows from its number. The kinds are those of the benchmark that was proposed for
Megatron-Core in September 2026; how strong they are is chosen here.

Contract. A token takes k different experts, by the order of log(weight) + Gumbel noise: then the first of
them is drawn with the weights as probabilities. Equal arguments give equal choices on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

HOT, HOT_SHARE = 8, 0.5
"""One expert of so many is hot, and all of these get this part of the choices."""
HEAT = 4.0
"""Times the share of another expert that one of a hot rank gets."""
TURN = 20
"""Steps that a rotating set stays."""
CYCLE, BURST, BURST_SHARE = 40, 5, 0.3
EVEN_TOKENS, RAGGED = (1.0, 1.0), (0.25, 1.75)
NOTHING = 1e-9
"""The weight of an expert that nobody takes while others can be had."""


@dataclass(frozen=True, kw_only=True)
class SharedLayer:
    """Of a layer and the ranks that share it."""

    num_experts: int
    top_k: int
    num_ranks: int
    tokens: int
    """Of a rank, on average."""

    @property
    def share(self) -> int:
        """Experts of a rank, where they lie in order."""
        return max(self.num_experts // self.num_ranks, 1)


Weights = Callable[[SharedLayer, int, int], np.ndarray]


def even(shape: SharedLayer, _seed: int, _step: int) -> np.ndarray:
    return np.ones(shape.num_experts)


def hot_experts(shape: SharedLayer, seed: int, _step: int) -> np.ndarray:
    order = np.random.Generator(np.random.Philox(key=[seed, 0])).permutation(shape.num_experts)
    return heated(shape, order[: max(shape.num_experts // HOT, 1)])


def hot_rank(shape: SharedLayer, _seed: int, _step: int) -> np.ndarray:
    weights_E = np.ones(shape.num_experts)
    weights_E[: shape.share] = HEAT
    return weights_E


def spread_heat(shape: SharedLayer, _seed: int, _step: int) -> np.ndarray:
    weights_E = np.ones(shape.num_experts)
    weights_E[np.arange(shape.share) * shape.num_experts // shape.share] = HEAT
    return weights_E


def nothing(shape: SharedLayer, _seed: int, _step: int) -> np.ndarray:
    weights_E = np.ones(shape.num_experts)
    # As many as leave k to be taken.
    weights_E[: min(shape.num_experts // 4, shape.num_experts - shape.top_k)] = NOTHING
    return weights_E


def rotating(shape: SharedLayer, seed: int, step: int) -> np.ndarray:
    return hot_experts(shape, seed + step // TURN, step)


def burst(shape: SharedLayer, seed: int, step: int) -> np.ndarray:
    weights_E = np.ones(shape.num_experts)
    if step % CYCLE >= CYCLE - BURST:
        # Of k choices one is this expert's as often as it can be: three tenths of them, or every token's.
        part = min(BURST_SHARE, 1 / shape.top_k)
        weights_E[(seed + step // CYCLE) % shape.num_experts] = part / (1 - part) * (shape.num_experts - 1)
    return weights_E


def heated(shape: SharedLayer, experts: np.ndarray) -> np.ndarray:
    """Half of the choices for these."""
    weights_E = np.ones(shape.num_experts)
    weights_E[experts] = HOT_SHARE / (1 - HOT_SHARE) * (shape.num_experts - len(experts)) / len(experts)
    return weights_E


WORKLOADS: dict[str, tuple[Weights, tuple[float, float]]] = {
    "even": (even, EVEN_TOKENS),
    "hot experts": (hot_experts, EVEN_TOKENS),
    "hot rank": (hot_rank, EVEN_TOKENS),
    "spread heat": (spread_heat, EVEN_TOKENS),
    "ragged sources": (even, RAGGED),
    "nothing": (nothing, EVEN_TOKENS),
    "rotating": (rotating, EVEN_TOKENS),
    "burst": (burst, EVEN_TOKENS),
}
"""Weights of experts, and tokens of the first and the last rank, as parts of the mean."""
STEADY = ("even", "hot experts", "hot rank", "spread heat", "ragged sources", "nothing")


def tokens_of(workload: str, shape: SharedLayer) -> list[int]:
    """Of each rank; all together as many as any other workload has."""
    first, last = WORKLOADS[workload][1]
    bounds_P = np.linspace(0, 1, shape.num_ranks + 1)
    # The area under a line from `first` to `last`.
    area_P = bounds_P * first + bounds_P**2 * (last - first) / 2
    return np.diff(np.rint(area_P * shape.tokens * shape.num_ranks).astype(int)).tolist()


def choices(workload: str, seed: int, step: int, shape: SharedLayer) -> list[np.ndarray]:
    """The experts [T, k] of each rank's tokens."""
    weights_E = WORKLOADS[workload][0](shape, seed, step)
    tokens_P = tokens_of(workload, shape)
    draw = np.random.Generator(np.random.Philox(key=[seed, 1], counter=[0, 0, 0, step]))
    uniform_TE = draw.random((sum(tokens_P), shape.num_experts), dtype=np.float32)
    noise_TE = -np.log(-np.log(np.maximum(uniform_TE, np.finfo(np.float32).tiny)))
    keys_TE = np.log(weights_E).astype(np.float32) + noise_TE
    taken_TK = np.argpartition(-keys_TE, shape.top_k - 1, axis=1)[:, : shape.top_k]
    return np.split(np.sort(taken_TK, axis=1), np.cumsum(tokens_P)[:-1])


def counts(workload: str, seed: int, step: int, shape: SharedLayer) -> np.ndarray:
    """[P, E]: choices of each rank's tokens."""
    taken = choices(workload, seed, step, shape)
    return np.stack([np.bincount(ids_TK.ravel(), minlength=shape.num_experts) for ids_TK in taken])


def forced_even(workload: str, shape: SharedLayer) -> np.ndarray:
    """[P, E]: the same tokens under a gate that is forced to be even: all choices are dealt in turn."""
    bounds = np.cumsum([0, *tokens_of(workload, shape)]) * shape.top_k
    dealt = (np.arange(first, stop) % shape.num_experts for first, stop in pairwise(bounds))
    return np.stack([np.bincount(each, minlength=shape.num_experts) for each in dealt])
