"""zb-m: backward in two halves, ordered for a budget of activations by a search.

A rank may hold `budget` microbatches: forward takes one, dW gives it back. Orders are made by a clock: each
rank takes dX as soon as it can, a forward where the budget has room, and fills waits with dW. How long a wait
must be to be worth a dW, and whether forwards or dX go first, is tried; the shortest order wins, and with
room for it zb-h1 and zb-h2 are tried, too. Small budgets get what they allow: 1 is one microbatch at a time.
With several stages a rank the model is folded over the ranks (`schedule/folded`).

Contract: a pure function of its arguments, so all ranks find the same order. The clock is the simulator's
where transfers take no time (`sim/engine`): `tests/schedule/test_budget.py` holds them together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.folded import folded_order
from moeclipse.schedule.legal import require_legal
from moeclipse.schedule.op import Op, Program, forward, input_grad, pipeline_program, weight_grad
from moeclipse.schedule.shape import StagePlacement
from moeclipse.schedule.zero_bubble import zb_h1, zb_h2


class ActionSeconds(NamedTuple):
    """Of a stage: forward, dX, dW."""

    F: float = 1.0
    I: float = 1.0
    W: float = 1.0


class Policy(NamedTuple):
    """How a rank chooses."""

    patience: float
    """In a dW: it waits so long for a forward or a dX before it fills the time with one."""
    forward_first: bool
    """Where both are ready."""
    lean: int
    """Held below the budget in warm-up, so that room is left for dW that wait."""


class Order(NamedTuple):
    makespan: float
    held: int
    """Microbatches on the rank that holds most of them."""
    ranks: list[list[Op]]


POLICIES = (Policy(0.5, False, 0), Policy(0.5, True, 0), Policy(0.5, False, 1), Policy(1.0, False, 0))
"""One of these was best, of twelve, in all but 4 of 800 settings of 2 to 8 ranks."""


@dataclass
class _Rank:
    budget: int
    ops: list[Op] = field(default_factory=list)
    now: float = 0.0
    held: int = 0
    most: int = 0
    forwards: int = 0
    backwards: int = 0
    open_weights: deque[int] = field(default_factory=deque)


class _Clock:
    """One order, made as time goes on."""

    def __init__(self, P: int, M: int, budget: int, seconds: ActionSeconds, policy: Policy) -> None:
        self.P, self.M, self.seconds, self.policy = P, M, seconds, policy
        self.ranks = [_Rank(budget) for _ in range(P)]
        self.ended: dict[tuple[str, int, int], float] = {}

    def order(self) -> Order:
        """What it takes, and ops of each rank."""
        choices = [self._next(r) for r in range(self.P)]
        while True:
            ready = [(choice[0], r) for r, choice in enumerate(choices) if choice is not None]
            if not ready:
                break
            start, r = min(ready)
            self._do(r, choices[r][2], start)  # type: ignore[index]
            for near in range(max(r - 1, 0), min(r + 2, self.P)):  # an action changes what neighbours can do
                choices[near] = self._next(near)
        return Order(
            max(rank.now for rank in self.ranks),
            max(rank.most for rank in self.ranks),
            [rank.ops for rank in self.ranks],
        )

    def _ready(self, r: int, kind: str) -> float | None:
        """When the next action of a kind can start; None: nobody knows yet, or there is none."""
        rank = self.ranks[r]
        if kind == "F":
            if rank.forwards == self.M or rank.held >= rank.budget:
                return None
            return 0.0 if r == 0 else self.ended.get(("F", r - 1, rank.forwards))
        if rank.backwards == rank.forwards:
            return None
        before = ("F", r, rank.backwards) if r == self.P - 1 else ("I", r + 1, rank.backwards)
        return self.ended.get(before)

    def _next(self, r: int) -> tuple[float, int, str] | None:
        """(start, order among equals, kind) of what a rank does next."""
        rank, policy = self.ranks[r], self.policy
        ready = {kind: at for kind in "FI" if (at := self._ready(r, kind)) is not None}
        if "F" in ready and policy.lean and not rank.backwards and rank.held >= max(rank.budget - 1, 1):
            del ready["F"]
        first = {"F": 0, "I": 1} if policy.forward_first else {"I": 0, "F": 1}
        starts = [(max(at, rank.now), first[kind], kind) for kind, at in ready.items()]
        soonest = min(starts, default=None)
        if rank.open_weights:
            wait = (soonest[0] if soonest else float("inf")) - rank.now
            if wait > policy.patience * self.seconds.W:
                return rank.now, 2, "W"
        return soonest

    def _do(self, r: int, kind: str, start: float) -> None:
        rank = self.ranks[r]
        rank.now = start + getattr(self.seconds, kind)
        if kind == "F":
            self.ended["F", r, rank.forwards] = rank.now
            rank.ops.append(forward(r, rank.forwards))
            rank.forwards, rank.held = rank.forwards + 1, rank.held + 1
            rank.most = max(rank.most, rank.held)
        elif kind == "I":
            self.ended["I", r, rank.backwards] = rank.now
            rank.ops.append(input_grad(r, rank.backwards))
            rank.open_weights.append(rank.backwards)
            rank.backwards += 1
        else:
            rank.ops.append(weight_grad(r, rank.open_weights.popleft()))
            rank.held -= 1


def zb_m(
    num_ranks: int,
    num_microbatches: int,
    budget: int = 0,
    seconds: ActionSeconds | None = None,
    stages_per_rank: int = 1,
) -> Program:
    """`budget` in microbatches of a rank; 0: as many as there are ranks. `seconds`: of one stage a rank."""
    require_legal("zb-m", num_ranks, num_microbatches, stages_per_rank)
    P, M, V, limit = num_ranks, num_microbatches, stages_per_rank, budget or num_ranks
    if limit < 1:
        raise ScheduleError(f"zb-m needs a budget of at least one microbatch, but got {budget}")
    if V > 1:
        return pipeline_program("zb-m", folded_order(P, M, V, limit), StagePlacement.folded(P, V), M)
    return pipeline_program("zb-m", _best(P, M, limit, seconds or ActionSeconds()), StagePlacement.loop(P), M)


@lru_cache(maxsize=8)
def _best(P: int, M: int, limit: int, priced: ActionSeconds) -> tuple[tuple[Op, ...], ...]:
    """Kept: whoever lays a run out asks more than once."""
    found = [_Clock(P, M, limit, priced, policy).order() for policy in POLICIES]
    found += drawn(P, M, limit, priced)
    best = min(found, key=lambda order: (round(order.makespan, 9), order.held))
    return tuple(map(tuple, best.ranks))


def drawn(P: int, M: int, budget: int, seconds: ActionSeconds) -> Iterator[Order]:
    """Known orders that the budget has room for, by the same clock."""
    for needed, make in ((P, zb_h1), (2 * P - 1, zb_h2)):
        if min(needed, M) <= budget:
            ranks = [list(ops) for ops in make(P, M).ranks]
            yield Order(makespan(ranks, seconds), min(needed, M), ranks)


def makespan(ranks: list[list[Op]], seconds: ActionSeconds) -> float:
    """Of an order of F, I and W on one stage a rank, where transfers take no time."""
    ended: dict[tuple[object, int, int], float] = {}
    at, now = [0] * len(ranks), [0.0] * len(ranks)
    moved = True
    while moved:
        moved = False
        for r, ops in enumerate(ranks):
            while at[r] < len(ops):
                op = ops[at[r]]
                assert op.microbatch is not None
                before = _before(op, r, len(ranks))
                if before is not None and before not in ended:
                    break
                start = max(now[r], 0.0 if before is None else ended[before])
                now[r] = start + getattr(seconds, op.kind.name)
                ended[op.kind, r, op.microbatch] = now[r]
                at[r], moved = at[r] + 1, True
    return max(now)


def _before(op: Op, r: int, P: int) -> tuple[object, int, int] | None:
    """What an action waits for on another rank, or at the last stage in itself."""
    assert op.microbatch is not None
    if op.kind is kinds.F:
        return None if r == 0 else (kinds.F, r - 1, op.microbatch)
    if op.kind is kinds.I:
        return (kinds.F, r, op.microbatch) if r == P - 1 else (kinds.I, r + 1, op.microbatch)
    return None
