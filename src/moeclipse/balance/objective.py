"""What a placement costs, in seconds per step of one MoE layer.

    fullest     row_seconds x rows of the fullest rank, with the split that really runs
    near        4 exchanges x bytes of the rows that enter or leave the busiest rank inside its node
    cross       4 exchanges x bytes of the rows that enter or leave the busiest card between nodes
    sync        gradients to owners and weights back, on the rank with most of them, and what that takes
                however few they are
    migration   parameters and optimizer state that move, on the rank with most of them, shared among the
                steps that a plan lasts

Replicas share the ownership of their expert (`balance/ownership`): each of r of them sends (r - 1) / r of its
gradients and receives as much, and where the ranks of an expert change, so do the parts that they own.

A card is what carries rows between nodes: the ranks of a node share one, or each has its own
(`card_per_rank`). Which of both holds is measured (`moe/tune/probe`).

Contract: pure. The same record judges every planner, so their plans can be compared. Searches and the solver
(`balance/draft`, `balance/solve`) minimise the same sum over loads that are poured, not yet cut into rows.

Hazard: counts must be those of a step that the planner has not seen, or balance looks better than it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moeclipse.balance.migration import RankMoves, moved
from moeclipse.balance.placement import Placement
from moeclipse.balance.split import ReplicaTable, split_rows
from moeclipse.core.errors import ConfigError
from moeclipse.cost.hardware import device, link

EXCHANGES = 4
"""Dispatch and combine, forward and backward."""
STATE_TENSORS = 3
"""Of AdamW: master weights and two moments."""
MATRICES = 3
"""Of a gated expert: gate, up, down."""
SHARED_CARD = 1.5
"""A rank that is so much faster while others rest shares its card with them."""


def rows_per_pair(experts_per_token: float, num_ranks: int) -> float:
    """Rows that are saved for each (token, expert) pair that stays on its rank.

    A token's vector travels to a rank once, for all of its experts there: it stays only where none of the
    others is there either. Loads count pairs; choices are taken not to know of each other.
    """
    return float((1 - 1 / num_ranks) ** (max(experts_per_token, 1.0) - 1)) if num_ranks > 1 else 1.0


@dataclass(frozen=True, kw_only=True)
class PlacementCosts:
    row_seconds: float
    """One row through one expert, forward and backward."""
    row_bytes: float
    weight_bytes: float
    """Parameters of one expert as they travel to a replica."""
    gradient_bytes: float
    state_bytes: float
    """Master weights and optimizer state of one expert."""
    near_bandwidth: float
    """Bytes per second of a rank inside its node."""
    far_bandwidth: float
    """Bytes per second of a card between nodes, in one direction."""
    card_per_rank: bool = False
    """Every rank has a card of its own; else the ranks of a node share one."""
    shared_wire: bool = False
    """All ranks of a node share one wire: `near_bandwidth` is a rank's part of it while all send."""
    every: int = 50
    """Steps that a plan lasts: what its moves are shared among."""
    loan_seconds: float = 0.0
    """Of one expert lent for one call, in one direction, beside its bytes."""
    replicas_seconds: float = 0.0
    """Of a step of a layer that has replicas, however few, beside their bytes."""
    copy_bandwidth: float = 0.0
    """Bytes per second of a rank's parameters, gradients and state, where slower than rows; 0: not known."""
    row_doubt: float = 0.0
    """Part that seconds of rows may be off by, as they were measured, ..."""
    wire_doubt: float = 0.0
    """... and those of all that travels."""
    shared_owners: bool = True
    """Replicas own their expert together; else its primary gets all gradients: a yardstick."""

    def __post_init__(self) -> None:
        problems = [
            f"{name} ({getattr(self, name)}) must not be negative"
            for name in (
                *("row_seconds", "row_bytes", "weight_bytes", "gradient_bytes", "state_bytes"),
                *("loan_seconds", "replicas_seconds", "copy_bandwidth", "row_doubt", "wire_doubt"),
            )
            if getattr(self, name) < 0
        ]
        problems += [
            f"{name} ({getattr(self, name)}) must be positive"
            for name in ("near_bandwidth", "far_bandwidth", "every")
            if getattr(self, name) <= 0
        ]
        if problems:
            raise ConfigError(problems)

    @classmethod
    def from_shapes(
        cls,
        *,
        d_model: int,
        d_ff: int,
        device_name: str = "h200",
        near: str = "nvlink4",
        far: str = "infiniband",
        links_per_node: int = 8,
        card_per_rank: bool = False,
        every: int = 50,
    ) -> PlacementCosts:
        """bf16 weights, fp32 gradients and AdamW state, gated experts, on hardware that `cost` knows.

        The links of a node are one card for all of its ranks, or with `card_per_rank` one for each.
        """
        chip, inside, outside = device(device_name), link(near), link(far)
        parameters = MATRICES * d_model * d_ff
        return cls(
            row_seconds=3 * 2 * parameters / (chip.flops * chip.efficiency),
            row_bytes=2 * d_model,
            weight_bytes=2 * parameters,
            gradient_bytes=4 * parameters,
            state_bytes=12 * parameters,
            near_bandwidth=inside.bandwidth * inside.efficiency,
            far_bandwidth=outside.bandwidth * outside.efficiency * (1 if card_per_rank else links_per_node),
            card_per_rank=card_per_rank,
            every=every,
        )

    @classmethod
    def from_measured(
        cls, probe: Mapping[str, Any], every: int, ranks_per_node: int = 1, rows_saved: float = 1.0
    ) -> PlacementCosts:
        """What ranks measured (`moe/tune/probe`); where nothing went between hosts, far is as near.

        `rows_saved`: for each pair that stays (`rows_per_pair`). What trials could not tell cannot be planned
        with: ConfigError.
        """
        unknown = [name for name, value in probe.items() if value is None]
        if unknown:
            raise ConfigError(f"trials could not tell what this costs: {', '.join(unknown)}")
        far, alone = probe.get("far_bandwidth") or probe["bandwidth"], probe.get("far_link") or 0.0
        card_per_rank = alone < SHARED_CARD * far if alone else False
        return cls(
            row_seconds=probe["row_forward"] + probe["row_backward"],
            row_bytes=rows_saved * probe["row_bytes"],
            weight_bytes=probe["parameter_bytes"],
            gradient_bytes=probe["gradient_bytes"],
            state_bytes=STATE_TENSORS * probe["gradient_bytes"],
            near_bandwidth=probe["bandwidth"],
            # A card carries what its ranks send together, and at least what one of them sends alone.
            far_bandwidth=far if card_per_rank else max(far * ranks_per_node, alone),
            card_per_rank=card_per_rank,
            shared_wire=probe["shared_wire"],
            loan_seconds=probe.get("loan") or 0.0,
            replicas_seconds=probe.get("sync") or 0.0,
            copy_bandwidth=probe.get("sync_bandwidth") or 0.0,
            row_doubt=probe.get("row_doubt") or 0.0,
            wire_doubt=probe.get("wire_doubt") or 0.0,
            every=every,
        )

    def cards(self, ranks: int) -> int:
        """Of a node with so many ranks."""
        return ranks if self.card_per_rank else 1

    def bandwidth(self, node_P: Sequence[int] = (0,)) -> float:
        """Of one rank's parameters and gradients: across nodes a rank has its share of the node's cards."""
        ranks_on = Counter(node_P)
        if len(ranks_on) == 1:
            return self.near_bandwidth
        most = max(ranks_on.values())
        return min(self.near_bandwidth, self.far_bandwidth * self.cards(most) / most)

    def move_seconds(self, weights: float, states: float, node_P: Sequence[int] = (0,)) -> float:
        """So many copies of parameters and of optimizer state over the link of one rank, once."""
        moved = weights * self.weight_bytes + states * self.state_bytes
        return moved / self._bandwidth_of_copies(node_P)

    def migration_seconds(self, moves: Sequence[RankMoves], node_P: Sequence[int] = (0,)) -> float:
        """The way to another placement, once: ranks send and receive side by side."""
        enter = [self.move_seconds(move.weights_in, move.states_in, node_P) for move in moves]
        leave = [self.move_seconds(move.weights_out, move.states_out, node_P) for move in moves]
        if self.shared_wire:
            return sum(enter) / max(len(enter), 1)
        return max([*enter, *leave], default=0.0)

    def copy_seconds(self, node_P: Sequence[int] = (0,)) -> float:
        """Of each copy: its gradients to their owners, and the new weights back."""
        return (self.gradient_bytes + self.weight_bytes) / self._bandwidth_of_copies(node_P)

    def unsure_seconds(self, score: Score) -> float:
        """That a step of a layer may be off by: what wins less is no better than what there is."""
        rows = score.fullest + score.drift
        return self.row_doubt * rows + self.wire_doubt * (score.near + score.cross + score.sync)

    def sync_seconds(self, copies: float, node_P: Sequence[int] = (0,)) -> float:
        """Of so many copies on a rank; of none nothing."""
        return self.replicas_seconds + copies * self.copy_seconds(node_P) if copies > 0 else 0.0

    def _bandwidth_of_copies(self, node_P: Sequence[int]) -> float:
        bandwidth = self.bandwidth(node_P)
        return min(bandwidth, self.copy_bandwidth) if self.copy_bandwidth else bandwidth


@dataclass(frozen=True, kw_only=True)
class Score:
    """Seconds per step, and what they come from."""

    fullest: float
    near: float
    cross: float
    sync: float
    migration: float
    balance: float
    """Mean over fullest rank."""
    cross_share: float
    """Part of all rows that cross nodes."""
    sent_share: float
    """Part of all rows that leave their rank."""
    moves: int
    """Copies of parameters that travel."""
    states: float
    """Copies of optimizer state that travel, parts of them added up."""
    drift: float = 0.0
    """Of the fullest rank, more than that: what loads that may come (`balance/futures`) add on average."""
    lent: float = 0.0
    """What lending experts for a step saves of it (`balance/lending`), where a planner may count on it."""

    @property
    def total(self) -> float:
        return self.fullest + self.near + self.cross + self.sync + self.migration + self.drift - self.lent


def nodes_of(num_ranks: int, num_nodes: int) -> tuple[int, ...]:
    """The node of each rank: equal runs of neighbours."""
    if num_nodes < 1 or num_ranks % num_nodes:
        fitting = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
        raise ConfigError(
            f"nodes ({num_nodes}) must divide ranks ({num_ranks}); "
            f"choose one of {', '.join(map(str, fitting))}"
        )
    return tuple(rank * num_nodes // num_ranks for rank in range(num_ranks))


def score(
    placement: Placement,
    counts_PE: np.ndarray,
    costs: PlacementCosts,
    *,
    current: Placement | None = None,
    node_P: Sequence[int] | None = None,
    expected_E: np.ndarray | None = None,
    table: ReplicaTable | None = None,
) -> Score:
    """The cost of a step with these counts; `expected_E` are the loads that the plan was made for.

    `table`: that of both, if it is known already.
    """
    table = table or ReplicaTable.of(placement, expected_E)
    split = split_rows(counts_PE, table, node_P)
    node_P = tuple(node_P if node_P is not None else [0] * placement.num_ranks)
    nodes = np.asarray(node_P)
    sent_PP = split.sent_PP
    far_PP = np.where(nodes[:, None] != nodes[None, :], sent_PP, 0)
    card_P = np.arange(placement.num_ranks) if costs.card_per_rank else nodes
    sent_C, got_C = (np.bincount(card_P, far_PP.sum(axis)) for axis in (1, 0))
    rows = max(int(counts_PE.sum()), 1)
    near_PP = sent_PP - far_PP
    np.fill_diagonal(near_PP, 0)
    busiest_rank = float(np.maximum(near_PP.sum(0), near_PP.sum(1)).max())
    copies = max(sync_copies(placement, costs.shared_owners))
    if costs.shared_wire:
        busiest_rank = float(near_PP.sum()) / placement.num_ranks
        copies = (placement.num_replicas - placement.num_experts) / placement.num_ranks
    moves = () if current is None else moved(current, placement, costs.shared_owners)
    busiest = float(np.maximum(sent_C, got_C).max())
    return Score(
        fullest=costs.row_seconds * float(split.load_P.max()),
        near=EXCHANGES * costs.row_bytes * busiest_rank / costs.near_bandwidth,
        cross=EXCHANGES * costs.row_bytes * busiest / costs.far_bandwidth,
        sync=costs.sync_seconds(copies, node_P),
        migration=costs.migration_seconds(moves, node_P) / costs.every,
        balance=split.balance,
        cross_share=float(far_PP.sum()) / rows,
        sent_share=(rows - float(np.trace(sent_PP))) / rows if counts_PE.any() else 0.0,
        moves=round(sum(move.weights_in for move in moves)),
        states=sum(move.states_in for move in moves),
    )


def sync_copies(placement: Placement, shared_owners: bool = True) -> list[float]:
    """Copies of gradients on each rank: what it sends to owners, or receives as one."""
    sends, receives = [0.0] * placement.num_ranks, [0.0] * placement.num_ranks
    for first, ranks in zip(placement.primary, placement.holders, strict=True):
        for rank in ranks:
            sent, received = exchanged(len(ranks), rank == first, shared_owners)
            sends[rank] += sent
            receives[rank] += received
    return [max(pair) for pair in zip(sends, receives, strict=True)]


def exchanged(replicas: int, primary: bool, shared_owners: bool) -> tuple[float, float]:
    """Copies of an expert's gradients that one of its replicas sends and receives."""
    if shared_owners:
        part = (replicas - 1) / replicas
        return part, part
    return (0.0, replicas - 1.0) if primary else (1.0, 0.0)
