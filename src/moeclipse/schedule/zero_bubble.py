"""Zero-bubble schedules: backward is cut into I (dX, on the critical path) and W (dW, a filler).

P ranks, M microbatches, rank r.

    zb-h1   1  w = P-1-r x F   2  (M-w) x [F I]   3  w x I   with a W after any I that leaves more than
            r of them open, and the rest of W at the end: memory P on every rank

    zb-h2   the same with 2(P-1-r) x F first and up to 2r open: memory 2P-1. Between its first and its last
            action no rank waits where F, I and W take equally long, nor where I takes twice as long as W,
            which costs zb-h1 the difference for each rank

    zb-v    stages s0 = r and s1 = 2P-1-r
            1  2(P-r)-1 x F0           4  while F is left: [F0 I0 W0 F1 I1 W1]
            2  r x [F1 F0]             5  r x [I0 I1]
            3  (P-r) x [F1 I1 W1]      6  (P-r) x [I0 W0]       7  rest of W1, then of W0

Hazard: zb-v is drawn for at least 2P-1 microbatches; with fewer the drawn ones beyond M are left out,
which stays correct but is no longer free of bubbles.
"""

from __future__ import annotations

from collections.abc import Callable

from moeclipse.schedule.legal import require_legal
from moeclipse.schedule.op import Op, Program, forward, input_grad, pipeline_program, weight_grad
from moeclipse.schedule.shape import StagePlacement


def zb_h1(num_ranks: int, num_microbatches: int) -> Program:
    return _one_way("zb-h1", num_ranks, num_microbatches, 1)


def zb_h2(num_ranks: int, num_microbatches: int) -> Program:
    return _one_way("zb-h2", num_ranks, num_microbatches, 2)


def _one_way(name: str, P: int, M: int, factor: int) -> Program:
    """`factor` is what warm-up and open W are multiplied by."""
    require_legal(name, P, M, 1)
    ranks = []
    for r in range(P):
        w, done = min(factor * (P - 1 - r), M), 0
        ops = [forward(r, m) for m in range(w)]  # 1
        for i in range(M):  # 2, 3
            if w + i < M:
                ops.append(forward(r, w + i))
            ops.append(input_grad(r, i))
            if i + 1 - done > factor * r:
                ops.append(weight_grad(r, done))
                done += 1
        ops += [weight_grad(r, m) for m in range(done, M)]
        ranks.append(ops)
    return pipeline_program(name, ranks, StagePlacement.loop(P), M)


def zb_v(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Program:
    require_legal("zb-v", num_ranks, num_microbatches, stages_per_rank)
    P, M = num_ranks, num_microbatches
    ranks = [_zb_v_rank(r, P, M) for r in range(P)]
    return pipeline_program("zb-v", ranks, StagePlacement.vee(P), M)


def _zb_v_rank(r: int, P: int, M: int) -> list[Op]:
    drawn = max(2 * P - 1, M)
    stages = (r, 2 * P - 1 - r)
    ops: list[Op] = []
    count: dict[tuple[Callable[[int, int], Op], int], int] = {
        (make, v): 0 for make in (forward, input_grad, weight_grad) for v in (0, 1)
    }

    def place(make: Callable[[int, int], Op], v: int) -> None:
        microbatch = count[make, v]
        count[make, v] += 1
        if microbatch < M:
            ops.append(make(stages[v], microbatch))

    for _ in range(2 * (P - r) - 1):  # 1
        place(forward, 0)
    for _ in range(r):  # 2
        place(forward, 1)
        place(forward, 0)
    for _ in range(P - r):  # 3
        place(forward, 1)
        place(input_grad, 1)
        place(weight_grad, 1)
    while min(count[forward, 0], count[forward, 1]) < drawn:  # 4
        for v in (0, 1):
            if count[forward, v] < drawn:
                place(forward, v)
            place(input_grad, v)
            place(weight_grad, v)
    for _ in range(r):  # 5
        place(input_grad, 0)
        place(input_grad, 1)
    for _ in range(P - r):  # 6
        place(input_grad, 0)
        place(weight_grad, 0)
    for v in (1, 0):  # 7
        while count[weight_grad, v] < drawn:
            place(weight_grad, v)
    return ops
