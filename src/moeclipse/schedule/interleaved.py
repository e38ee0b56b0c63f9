"""Interleaved 1F1B (VPP) and VPP+1: V stages per rank, placed in a loop.

P ranks, M microbatches, rank r. The microbatches form max(1, M // P) rounds of G. The k-th forward of
every rank is T[k]: rounds one after the other, inside a round stage by stage, inside a stage microbatch
by microbatch. The k-th backward is T[k] with the local stages counted from the last.

    vpp     1  w = 2(P-1-r) + (V-1)G      x F   2  (MV-w) x [F B]        3  w x B
    vpp+1   1  w = 2(P-1-r) + (V-1)G + 1  x F   2  (MV-w) x PAIR(F, B)   3  w x B

Hazard: without the extra warm-up forward, the last rank would pair F and B of one microbatch, which
deadlocks. VPP has two warm-up forwards per hop already, so one more is enough and costs no bubble.
"""

from __future__ import annotations

from moeclipse.schedule.legal import require_legal
from moeclipse.schedule.op import Program, backward, forward, pair, pipeline_program
from moeclipse.schedule.shape import StagePlacement


def round_size(num_ranks: int, num_microbatches: int) -> int:
    """G: microbatches that pass a stage before the next local stage starts."""
    return num_microbatches // max(1, num_microbatches // num_ranks)


def local_order(num_microbatches: int, stages_per_rank: int, size: int) -> list[tuple[int, int]]:
    """T: (local stage, microbatch) of the k-th forward."""
    return [
        (v, first + i)
        for first in range(0, num_microbatches, size)
        for v in range(stages_per_rank)
        for i in range(size)
    ]


def _interleaved(name: str, P: int, M: int, V: int, extra: int) -> Program:
    require_legal(name, P, M, V)
    G = round_size(P, M)
    T = local_order(M, V, G)
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


def interleaved(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Program:
    return _interleaved("vpp", num_ranks, num_microbatches, stages_per_rank, extra=0)


def interleaved_pairs(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Program:
    """VPP+1: one more stage's activations buy a partner for every steady forward."""
    return _interleaved("vpp+1", num_ranks, num_microbatches, stages_per_rank, extra=1)
