"""DualPipe (two directions, two copies of the model) and DualPipeV (one copy, folded).

Both are one table. A rank holds two stages, "0" near the start of its chain and "1" near the end:
in DualPipeV s0 = r and s1 = 2P-1-r of one chain; in DualPipe the two directions meet on every rank, and
half the ranks play the part of P. n ranks in the fold, place r in it, m microbatches per stage:

    1  2(n-r-1) x F0                          5  (n-r-1) x [B1 PAIR(F1, B0)]
    2  (r+1)    x [F0 F1]                     6  (r+1)   x [B1 B0], from the middle on as I
    3  (n-r-1)  x [I1 W F1]                   7  (n-r-1) x [W I0]
    4  (m-2n+r+1) x [PAIR(F0, B1) PAIR(F1, B0)]   8  (r+1) x W

W takes the oldest open I of either stage. At the fold (r = n-1) the very first pair of phase 4 would hold
F and B of one microbatch's neighbourhood before either can be ready, so it runs as F0, B1.
"""

from __future__ import annotations

from collections import deque

from moeclipse.schedule.legal import require_legal
from moeclipse.schedule.op import (
    Op,
    Program,
    backward,
    forward,
    input_grad,
    pair,
    pipeline_program,
    weight_grad,
)
from moeclipse.schedule.shape import StagePlacement


class _RankPhases:
    """Counts what has been placed, so that the phases below read like the table."""

    def __init__(self, stages: tuple[int, int], first: tuple[int, int]) -> None:
        self.stages = stages
        self.next_forward = list(first)
        self.next_backward = list(first)
        self.open_weights: deque[tuple[int, int]] = deque()
        self.ops: list[Op] = []

    def take_forward(self, v: int) -> Op:
        self.next_forward[v] += 1
        return forward(self.stages[v], self.next_forward[v] - 1)

    def take_backward(self, v: int) -> Op:
        self.next_backward[v] += 1
        return backward(self.stages[v], self.next_backward[v] - 1)

    def f(self, v: int) -> None:
        self.ops.append(self.take_forward(v))

    def b(self, v: int) -> None:
        self.ops.append(self.take_backward(v))

    def i(self, v: int) -> None:
        stage, microbatch = self.stages[v], self.next_backward[v]
        self.next_backward[v] += 1
        self.open_weights.append((stage, microbatch))
        self.ops.append(input_grad(stage, microbatch))

    def w(self) -> None:
        self.ops.append(weight_grad(*self.open_weights.popleft()))

    def pair(self, f: int, b: int) -> None:
        self.ops.append(pair(self.take_forward(f), self.take_backward(b)))


def _phases(rank: _RankPhases, r: int, n: int, m: int) -> list[Op]:
    for _ in range(2 * (n - r - 1)):  # 1
        rank.f(0)
    for _ in range(r + 1):  # 2
        rank.f(0)
        rank.f(1)
    for _ in range(n - r - 1):  # 3
        rank.i(1)
        rank.w()
        rank.f(1)
    for i in range(m - 2 * n + r + 1):  # 4
        if i == 0 and r == n - 1:
            rank.f(0)
            rank.b(1)
        else:
            rank.pair(0, 1)
        rank.pair(1, 0)
    for _ in range(n - r - 1):  # 5
        rank.b(1)
        rank.pair(1, 0)
    for i in range(2 * (r + 1)):  # 6
        (rank.b if i < r + 1 else rank.i)(1 - i % 2)
    for _ in range(n - r - 1):  # 7
        rank.w()
        rank.i(0)
    for _ in range(r + 1):  # 8
        rank.w()
    return rank.ops


def dualpipev(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Program:
    require_legal("dualpipev", num_ranks, num_microbatches, stages_per_rank)
    P, M = num_ranks, num_microbatches
    ranks = [_phases(_RankPhases((r, 2 * P - 1 - r), (0, 0)), r, P, M) for r in range(P)]
    return pipeline_program("dualpipev", ranks, StagePlacement.vee(P), M)


def dualpipe(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Program:
    """Direction 0 takes the first half of the microbatches, direction 1 (stages P..2P-1) the second."""
    require_legal("dualpipe", num_ranks, num_microbatches, stages_per_rank)
    P, K = num_ranks, num_microbatches // 2
    ranks = []
    for r in range(P):
        down, up = (r, 0), (2 * P - 1 - r, K)  # (stage, first microbatch) of the two directions
        near, far = (down, up) if r < P // 2 else (up, down)
        rank = _RankPhases((near[0], far[0]), (near[1], far[1]))
        ranks.append(_phases(rank, min(r, P - 1 - r), P // 2, K))
    return pipeline_program("dualpipe", ranks, StagePlacement.dual(P), num_microbatches)
