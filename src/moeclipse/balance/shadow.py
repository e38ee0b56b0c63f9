"""Which experts to shadow this step, and on which ranks.

Idea: a hot expert makes its rank compute while the others wait, and makes everybody's rows cross the wire. A
shadow is a copy of its parameters for one step: ranks that get one compute their own rows of that expert and
send a gradient back instead. It pays where many rows meet few parameters. The policy takes one expert after
the other, each on the ranks with most rows for it, as long as the ranks even out; of all places on that way
it keeps the first that is about as fast as the best.

    plan = choose_shadows(counts_PE, placement, costs)
    plan.shadows                   ((expert, (rank, ...)), ...)
    plan.before, plan.after        predicted seconds, part by part

Contract: a pure function of the count matrix, the placement and measured costs, hence the same on every rank.
Rows with a replica on their own rank stay there; the others go where `split` sends them, unless their own
rank gets a shadow.

Hazard: agree on the costs first. A rank with other costs would choose other shadows and wait for parameters
that nobody sends.

Shapes: P ranks, E experts, C candidate experts, K ways to choose how many ranks get a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from moeclipse.balance.placement import Placement
from moeclipse.balance.shadow_model import Latency, ShadowCosts, Work, latency, merit
from moeclipse.balance.split import ReplicaTable, split_rows
from moeclipse.core.errors import ConfigError

Shadows = tuple[tuple[int, tuple[int, ...]], ...]

MAX_CANDIDATES = 24
"""Experts that are looked at: those with most rows on the wire."""
NEAR_BEST = 1.01
PATIENCE = 4
"""The walk ends when so many shadows in a row have won nothing."""


@dataclass(frozen=True, kw_only=True)
class ShadowPlan:
    shadows: Shadows
    """(expert, ranks that get a copy), ascending; no such rank holds the expert already."""
    before: Latency
    after: Latency
    serving: bool = False
    """Whether they compute rows of other ranks, too (`balance/serving`)."""

    @property
    def gain(self) -> float:
        """Predicted seconds saved."""
        return self.before.total - self.after.total

    def table(self, num_experts: int, num_ranks: int) -> np.ndarray:
        """Whether a rank gets a copy: bool [E, P]."""
        copies = np.zeros((num_experts, num_ranks), dtype=bool)
        for expert, ranks in self.shadows:
            copies[expert, list(ranks)] = True
        return copies


def choose_shadows(
    counts_PE: np.ndarray,
    placement: Placement,
    costs: ShadowCosts,
    *,
    max_shadows: int | None = None,
    node_P: Sequence[int] | None = None,
    table: ReplicaTable | None = None,
) -> ShadowPlan:
    """The shadows of one step.

    `max_shadows` bounds the copies that one rank takes in (its buffers). `table` saves work when the caller
    keeps it beside the placement.
    """
    traffic = _Traffic.of(counts_PE, placement, node_P, table, costs.far)
    before = latency(traffic.work, costs)
    walk = _Walk(traffic=traffic, placement=placement, costs=costs, max_shadows=max_shadows)
    work, best = traffic.work, before.total
    chosen: dict[int, set[int]] = {}
    seen: list[tuple[float, Shadows]] = [(best, ())]
    since_best = 0
    # Walk on also where the fullest rank has a twin, so that one shadow alone wins nothing.
    while since_best < PATIENCE and (step := walk.next(work)) is not None:
        expert, ranks, work = step
        chosen.setdefault(expert, set()).update(ranks)
        time = latency(work, costs).total
        since_best = 0 if time < best else since_best + 1
        best = min(best, time)
        seen.append((time, tuple((e, tuple(sorted(chosen[e]))) for e in sorted(chosen))))
    shadows = next(shadows for time, shadows in seen if time <= NEAR_BEST * best)
    after = predict(counts_PE, placement, costs, shadows, node_P=node_P, table=traffic.table)
    if before.total - after.total < costs.worthwhile(before):
        return ShadowPlan(shadows=(), before=before, after=before)
    return ShadowPlan(shadows=shadows, before=before, after=after)


def forced_shadows(
    counts_PE: np.ndarray,
    placement: Placement,
    costs: ShadowCosts,
    experts: Iterable[int],
    *,
    node_P: Sequence[int] | None = None,
) -> ShadowPlan:
    """Shadow these experts on every rank that has rows for them and does not hold them."""
    wanted = sorted(set(experts))
    unknown = [e for e in wanted if not 0 <= e < placement.num_experts]
    if unknown:
        raise ConfigError(
            f"expert {unknown[0]} cannot be shadowed; experts are 0 to {placement.num_experts - 1}"
        )
    before = predict(counts_PE, placement, costs, (), node_P=node_P)
    needed_EP = (counts_PE.T > 0) & ~placement.holds_EP
    shadows = tuple((e, tuple(np.flatnonzero(needed_EP[e]).tolist())) for e in wanted if needed_EP[e].any())
    after = predict(counts_PE, placement, costs, shadows, node_P=node_P)
    return ShadowPlan(shadows=shadows, before=before, after=after)


def predict(
    counts_PE: np.ndarray,
    placement: Placement,
    costs: ShadowCosts,
    shadows: Iterable[tuple[int, Sequence[int]]],
    *,
    node_P: Sequence[int] | None = None,
    table: ReplicaTable | None = None,
) -> Latency:
    """Seconds of the layer with these shadows."""
    traffic = _Traffic.of(counts_PE, placement, node_P, table, costs.far)
    work = traffic.work
    for expert, ranks in shadows:
        given_KP = np.zeros((1, placement.num_ranks))
        given_KP[0, list(ranks)] = 1
        owner_P = _one_hot([placement.primary[expert]], placement)[0]
        sent_PP = traffic.sent([expert])[0]
        work = work.with_copies(given_KP, sent_PP, owner_P, traffic.near_PP).at(0)
    return latency(work, costs)


@dataclass(frozen=True, kw_only=True)
class _Traffic:
    """Where rows go without shadows."""

    table: ReplicaTable
    rows_RP: np.ndarray
    """Rows that leave their source rank, for each slot."""
    near_PP: np.ndarray
    """What one row, or copy, from a rank to another is in near ones."""
    work: Work

    @classmethod
    def of(
        cls,
        counts_PE: np.ndarray,
        placement: Placement,
        node_P: Sequence[int] | None,
        table: ReplicaTable | None,
        far: float,
    ) -> _Traffic:
        table = table or ReplicaTable.of(placement)
        split = split_rows(counts_PE, table, node_P)
        rows_RP = split.rows_PR.T.astype(np.float64)
        rows_RP[np.arange(len(rows_RP)), table.rank_R] = 0
        none, nodes = np.zeros(table.num_ranks), np.asarray(node_P or [0] * table.num_ranks)
        near_PP = np.where(nodes[:, None] == nodes, 1.0, far)
        travel_RP = rows_RP * near_PP[table.rank_R]
        work = Work(
            rows=split.load_P.astype(np.float64),
            rows_in=np.bincount(table.rank_R, travel_RP.sum(1), table.num_ranks),
            rows_out=travel_RP.sum(0),
            copies_in=none,
            copies_out=none,
        )
        return cls(table=table, rows_RP=rows_RP, near_PP=near_PP, work=work)

    def sent(self, experts: Sequence[int]) -> np.ndarray:
        """Rows of each expert from a source to the rank that computes them: [C, P source, P]."""
        place_E = np.full(self.table.num_experts, -1)
        place_E[list(experts)] = np.arange(len(experts))
        place_R = place_E[self.table.expert_R]
        place_R[self.table.empty] = -1
        slots = np.flatnonzero(place_R >= 0)
        sent_CPP = np.zeros((len(experts), self.table.num_ranks, self.table.num_ranks))
        sent_CPP[place_R[slots], :, self.table.rank_R[slots]] = self.rows_RP[slots]
        return sent_CPP


class _Walk:
    """Candidates for the next shadow; each call of `next` takes some of them out."""

    def __init__(
        self, *, traffic: _Traffic, placement: Placement, costs: ShadowCosts, max_shadows: int | None
    ) -> None:
        table = traffic.table
        rows_R = traffic.rows_RP.sum(1)
        rows_R[table.empty] = 0
        rows_E = np.bincount(table.expert_R, rows_R, table.num_experts)
        hottest = np.argsort(-rows_E, kind="stable")[:MAX_CANDIDATES]
        self.experts = hottest[rows_E[hottest] > 0].tolist()
        self.costs, self.near_PP = costs, traffic.near_PP
        self.sent_CPP = traffic.sent(self.experts)
        self.rows_CP = self.sent_CPP.sum(-1)
        self.able_CP = (self.rows_CP >= costs.enough_rows) & ~placement.holds_EP[self.experts]
        self.owner_CP = _one_hot([placement.primary[e] for e in self.experts], placement)
        self.sizes_K = _prefix_sizes(table.num_ranks - 1)
        self.room_P = np.full(table.num_ranks, len(self.experts) if max_shadows is None else max_shadows)

    def next(self, work: Work) -> tuple[int, tuple[int, ...], Work] | None:
        """The expert and ranks that even out the ranks most, and the work that remains; None: the end."""
        able_CP = self.able_CP & (self.room_P > 0)
        if not able_CP.any():
            return None
        # Ranks take a copy in the order of the rows they can take over without becoming the fullest.
        useful_CP = np.minimum(self.rows_CP, work.rows.max() - work.rows)
        order = np.lexsort((-self.rows_CP, -useful_CP, ~able_CP), axis=-1)
        turn_CP = np.argsort(order, axis=-1, kind="stable")
        given_CKP = ((turn_CP[:, None] < self.sizes_K[:, None]) & able_CP[:, None]).astype(np.float64)
        options = work.with_copies(given_CKP, self.sent_CPP, self.owner_CP, self.near_PP)
        # A candidate without any able rank offers "no copy", which must not look like a step.
        merit_CK = np.where(given_CKP.any(-1), merit(options, self.costs), np.inf)
        c, k = divmod(int(merit_CK.argmin()), len(self.sizes_K))
        if not merit_CK[c, k] < merit(work, self.costs):
            return None
        ranks = np.flatnonzero(given_CKP[c, k])
        self.able_CP[c, ranks] = False
        self.rows_CP[c, ranks] = 0
        self.sent_CPP[c, ranks] = 0
        self.room_P[ranks] -= 1
        return self.experts[c], tuple(ranks.tolist()), options.at(c, k)


def _prefix_sizes(most: int) -> np.ndarray:
    """How many ranks may get a copy: all numbers up to 8, then ever larger steps, and everybody."""
    sizes, size = {most}, 1
    while size < most:
        sizes.add(size)
        size = size + 1 if size < 8 else size * 3 // 2
    return np.array(sorted(sizes))


def _one_hot(ranks: Sequence[int], placement: Placement) -> np.ndarray:
    hot = np.zeros((len(ranks), placement.num_ranks))
    hot[np.arange(len(ranks)), list(ranks)] = 1
    return hot
