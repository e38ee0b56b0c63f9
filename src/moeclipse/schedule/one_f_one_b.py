"""GPipe and the 1F1B family: one stage per rank.

P ranks, M microbatches, rank r; w is the number of warm-up forwards.

    gpipe        1  M x F               2  M x B
    1f1b         1  w = P-1-r  x F      2  (M-w) x [F B]        3  w x B
    1f1b-pairs   1  w = 2(P-1-r)+1 x F  2  (M-w) x PAIR(F, B)   3  w x B

Hazard: the F and B that stand side by side in 1f1b belong to one microbatch on the last rank, so
fusing them deadlocks. A fused pair also makes a hop cost F + B instead of F, so pairs need two
warm-up forwards per hop: with one per hop plus one they run, but the bubble explodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeclipse.schedule import kinds
from moeclipse.schedule.legal import require_legal
from moeclipse.schedule.op import (
    ACTIONS,
    ActionColumns,
    Op,
    Program,
    backward,
    forward,
    pair,
    pipeline_program,
)
from moeclipse.schedule.shape import StagePlacement

MANY = 100_000
"""Microbatches of all stages together from which lists stay columns: objects would take gigabytes."""


def gpipe(num_ranks: int, num_microbatches: int) -> Program:
    require_legal("gpipe", num_ranks, num_microbatches, 1)
    return _alternating("gpipe", num_ranks, num_microbatches, [num_microbatches] * num_ranks)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Program:
    require_legal("1f1b", num_ranks, num_microbatches, 1)
    P, M = num_ranks, num_microbatches
    return _alternating("1f1b", P, M, [min(P - 1 - r, M) for r in range(P)])


def _alternating(name: str, P: int, M: int, warm_up: Sequence[int]) -> Program:
    """w x F, (M-w) x [F B], w x B: ranks differ in w alone, so their lists are made as columns."""
    kind = np.empty((P, 2 * M), dtype=np.int8)
    microbatch = np.empty((P, 2 * M), dtype=np.int32)
    F, B = ACTIONS.index(kinds.F), ACTIONS.index(kinds.B)
    number = np.arange(M, dtype=np.int32)
    for r, w in enumerate(warm_up):
        forwards = np.concatenate([number[:w], w + 2 * number[: M - w]])
        backwards = np.concatenate([w + 1 + 2 * number[: M - w], 2 * M - w + number[:w]])
        kind[r, forwards], kind[r, backwards] = F, B
        microbatch[r, forwards] = microbatch[r, backwards] = number
    columns = ActionColumns(
        begin=np.arange(P + 1, dtype=np.int64) * 2 * M,
        kind=kind.ravel(),
        stage=np.repeat(np.arange(P, dtype=np.int32), 2 * M),
        microbatch=microbatch.ravel(),
    )
    ranks = columns if P * M >= MANY else tuple(columns)
    return pipeline_program(name, ranks, StagePlacement.loop(P), M)


def paired_rank(rank: int, w: int, num_microbatches: int) -> list[Op]:
    ops = [forward(rank, m) for m in range(w)]  # 1
    ops += [pair(forward(rank, w + i), backward(rank, i)) for i in range(num_microbatches - w)]  # 2
    ops += [backward(rank, m) for m in range(num_microbatches - w, num_microbatches)]  # 3
    return ops


def one_f_one_b_pairs(num_ranks: int, num_microbatches: int) -> Program:
    """Twice the warm-up of 1F1B and one more: every steady F and B can be fused, at twice the memory."""
    require_legal("1f1b-pairs", num_ranks, num_microbatches, 1)
    P, M = num_ranks, num_microbatches
    ranks = [paired_rank(r, min(2 * (P - 1 - r) + 1, M), M) for r in range(P)]
    return pipeline_program("1f1b-pairs", ranks, StagePlacement.loop(P), M)


def microbatch_pairs(num_ranks: int, num_microbatches: int) -> Program:
    """No pipeline: the forward of one microbatch beside the backward of the one before."""
    require_legal("pp1", num_ranks, num_microbatches, 1)
    return pipeline_program(
        "pp1", [paired_rank(0, 1, num_microbatches)], StagePlacement.loop(1), num_microbatches
    )
