"""zb-m with several stages a rank: the model is folded over the ranks, and ordered for a budget by a search.

Stages go down the ranks, back up, down again, so that the first rank to take a microbatch is not the last to
let go of it: with P/3 of activations a fold keeps all ranks at work, one stage a rank needs P.

    drawing   when a microbatch passes each stage, if it were alone: so many ticks from a rank to the next,
              forward and backward, on the way down and on the way up
    order     all microbatches drawn so, one every `period`: each rank takes F and dX in that order
    clock     dW where a rank would wait or its budget is used up; then how long it takes is known

A tick is one F, dX or dW of a stage, and 3V of them are what a rank has to do for a microbatch. Times of a
drawing grow along the model, so no order can stand still, but one may have no room left: it is given up. With
a period of a whole microbatch over the budget there is always room.

Contract: a pure function of its arguments, so all ranks find the same order.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from moeclipse.schedule.op import Op, forward, input_grad, weight_grad
from moeclipse.schedule.shape import StagePlacement


class Drawing(NamedTuple):
    """Ticks from a rank to the next."""

    forward_down: int
    forward_up: int
    backward_down: int
    backward_up: int
    """On the way back through the stages that forward passed on its way up."""


TICKS = (
    *((1, 2, 2, 1), (3, 3, 3, 3), (1, 1, 1, 1), (2, 3, 2, 2), (2, 2, 2, 1)),
    *((3, 3, 3, 1), (1, 1, 1, 2), (1, 3, 3, 1), (2, 3, 3, 2), (3, 3, 1, 3)),
)
DRAWINGS = tuple(Drawing(*ticks) for ticks in TICKS)
"""In 234 settings (2 to 8 ranks, 2 to 4 stages) the best of all 81 with up to three ticks is 0.2 % faster in
the mean than the best of these, and 7 % at most."""


class Folded(NamedTuple):
    makespan: int
    held: int
    """Stages of microbatches on the rank that holds most of them."""
    ranks: tuple[tuple[Op, ...], ...]


def drawn(drawing: Drawing, placement: StagePlacement) -> tuple[list[int], list[int]]:
    """(when forward passes each stage, when backward does)."""
    rank_of, P = placement.rank_of, placement.num_ranks
    ups = [stage // P % 2 for stage in range(len(rank_of))]
    steps = [(up, here != there) for (here, there), up in zip(pairwise(rank_of), ups[1:], strict=True)]
    there = [0]
    for up, moves in steps:
        there.append(there[-1] + (drawing[up] if moves else 1))
    back = [there[-1] + 1]
    for up, moves in reversed(steps):
        back.append(back[-1] + (drawing[2 + up] if moves else 1))
    return there, back[::-1]


def timed(
    times: tuple[list[int], list[int]], period: int, placement: StagePlacement, M: int, limit: int
) -> Folded | None:
    """An order with its dW; None: it finds no room. `limit`: stages of microbatches that a rank may hold."""
    stages, P = range(placement.num_stages), placement.num_ranks
    actions = sorted(
        (at + m * period, back, stage, m)
        for back, row in enumerate(times)
        for stage, at in enumerate(row)
        for m in range(M)
    )
    ranks: list[list[Op]] = [[] for _ in range(P)]
    left: list[deque[tuple[int, int]]] = [deque() for _ in range(P)]
    now, held, most = [0] * P, [0] * P, 0
    ended: dict[tuple[int, int, int], int] = {}
    for _, back, stage, m in actions:
        rank = placement.rank_of[stage]
        before = (1, stage + 1, m) if back and stage < stages[-1] else (0, stage if back else stage - 1, m)
        ready = ended.get(before, 0)
        while left[rank] and (ready > now[rank] or (not back and held[rank] >= limit)):
            ranks[rank].append(weight_grad(*left[rank].popleft()))
            now[rank], held[rank] = now[rank] + 1, held[rank] - 1
        if not back and held[rank] >= limit:
            return None
        now[rank] = ended[back, stage, m] = max(now[rank], ready) + 1
        if back:
            ranks[rank].append(input_grad(stage, m))
            left[rank].append((stage, m))
        else:
            ranks[rank].append(forward(stage, m))
            held[rank] += 1
            most = max(most, held[rank])
    for rank, open_weights in enumerate(left):
        ranks[rank] += [weight_grad(*each) for each in open_weights]
        now[rank] += len(open_weights)
    return Folded(max(now), most, tuple(map(tuple, ranks)))


@lru_cache(maxsize=8)
def folded_order(P: int, M: int, V: int, budget: int) -> tuple[tuple[Op, ...], ...]:
    """The shortest that holds no more than `budget` microbatches, each the V stages of a rank. Kept: whoever
    lays a run out asks more than once.

    Drawings are held against each other on a few microbatches: from then on a schedule repeats itself.
    """
    placement = StagePlacement.folded(P, V)
    few, limit = min(M, 3 * P), budget * V
    best: tuple[tuple[int, int], list[int], list[int], int] | None = None
    for drawing in DRAWINGS:
        there, back = drawn(drawing, placement)
        alone = -(-(back[0] + 1) // budget)
        for period in sorted({3 * V, max(alone, 3 * V)}):
            order = timed((there, back), period, placement, few, limit)
            if order is not None and (best is None or order[:2] < best[0]):
                best = order[:2], there, back, period
    assert best is not None, "with a period of a microbatch over the budget there is room"
    _, there, back, period = best
    order = timed((there, back), period, placement, M, limit)
    assert order is not None
    return order.ranks
