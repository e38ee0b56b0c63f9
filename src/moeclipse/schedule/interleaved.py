"""Interleaved 1F1B (VPP) and VPP+1: V stages per rank, placed in a loop.

P ranks, M microbatches, rank r. The microbatches form groups, one after the other. The k-th forward of every
rank is T[k]: group by group, inside a group stage by stage, inside a stage microbatch by microbatch. The k-th
backward is T[k] with the local stages counted from the last. G is the largest group.

    vpp     1  w = 2(P-1-r) + (V-1)G      x F   2  (MV-w) x [F B]        3  w x B
    vpp+1   1  w = 2(P-1-r) + (V-1)G + 1  x F   2  (MV-w) x PAIR(F, B)   3  w x B

A group has at least P microbatches, or all there are. Of a given size N (Megatron's microbatch group size)
the last group may be shorter, and takes in a rest that would be shorter than P; without one there are M // P
groups, as even as can be. So any M runs. Larger groups hold more, and send each stage's weights to fewer
turns of microbatches.

Hazard: warm-up follows the largest group, not the first: with less of it, the backward of a group that is
larger than the first waits for forwards that stand behind it. Without the extra warm-up forward of vpp+1, the
last rank would pair F and B of one microbatch, which deadlocks. VPP has two warm-up forwards per hop already,
so one more is enough and costs no bubble.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from moeclipse.core.errors import ScheduleError
from moeclipse.core.shares import even_bounds
from moeclipse.schedule.legal import require_legal
from moeclipse.schedule.op import Program, backward, forward, pair, pipeline_program
from moeclipse.schedule.shape import StagePlacement


def group_sizes(num_ranks: int, num_microbatches: int, size: int = 0) -> list[int]:
    """Microbatches that pass a stage before the next local stage starts, group by group.

    `size` of 0: as even as can be.
    """
    P, M = num_ranks, num_microbatches
    if not size:
        bounds = even_bounds(M, max(1, M // P))
        return [last - first for first, last in pairwise(bounds)]
    if size < P:
        raise ScheduleError(
            f"a group of vpp needs at least as many microbatches as ranks ({P}), but has {size}: a "
            "microbatch would be wanted at its next stage before it has left the last"
        )
    whole, rest = divmod(M, size)
    if not whole or not rest:
        return [size] * whole or [M]
    return [size] * whole + [rest] if rest >= P else [size] * (whole - 1) + [size + rest]


def local_order(stages_per_rank: int, groups: Sequence[int]) -> list[tuple[int, int]]:
    """T: (local stage, microbatch) of the k-th forward."""
    found, first = [], 0
    for size in groups:
        found += [(v, first + i) for v in range(stages_per_rank) for i in range(size)]
        first += size
    return found


def _interleaved(name: str, P: int, M: int, V: int, extra: int, group_size: int) -> Program:
    require_legal(name, P, M, V)
    groups = group_sizes(P, M, group_size)
    G, T = max(groups), local_order(V, groups)
    ranks = []
    for r in range(P):
        forwards = [forward(v * P + r, m) for v, m in T]
        backwards = [backward((V - 1 - v) * P + r, m) for v, m in T]
        w = min(2 * (P - 1 - r) + (V - 1) * G + extra, len(T))
        ops = forwards[:w]  # 1
        for f, b in zip(forwards[w:], backwards, strict=False):  # 2
            ops += [pair(f, b)] if extra else [f, b]
        ops += backwards[len(T) - w :]  # 3
        ranks.append(ops)
    return pipeline_program(name, ranks, StagePlacement.loop(P, V), M)


def interleaved(
    num_ranks: int, num_microbatches: int, stages_per_rank: int = 2, group_size: int = 0
) -> Program:
    return _interleaved("vpp", num_ranks, num_microbatches, stages_per_rank, 0, group_size)


def interleaved_pairs(
    num_ranks: int, num_microbatches: int, stages_per_rank: int = 2, group_size: int = 0
) -> Program:
    """VPP+1: one more stage's activations buy a partner for every steady forward."""
    return _interleaved("vpp+1", num_ranks, num_microbatches, stages_per_rank, 1, group_size)
