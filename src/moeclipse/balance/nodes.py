"""Tables over two levels: experts over nodes first, then over the ranks of each node.

Idea: a row that stays on its node is cheap. Experts with many rows from everywhere get places on several
nodes, as long as slots last, so their rows need not cross; every other expert goes to the node that sends it
most rows and still has room. Then each node is filled by itself, as if it were alone.

Slots are either for rows that would cross or for evenness inside nodes, and which is better depends on
prices. `plan_two_level` leaves what flowing from rank to rank takes (wrap-fill); `tables_for_nodes` are
several that spend more and more of the slots on other nodes (greedy inside), for whoever judges them.

Contract: pure and deterministic; the result fits the slots of each rank, whatever the nodes look like.

Shapes: N nodes, E experts, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from moeclipse.balance.placement import Placement
from moeclipse.balance.replicate import placement_of, plan_greedy, plan_wrap_fill

ABROAD = (0.35, 0.6, 0.8, 1.0)
"""Parts of the spare slots that hold experts on further nodes."""


def plan_two_level(counts_PE: np.ndarray, slots_P: Sequence[int], node_P: Sequence[int]) -> Placement:
    ranks_of, rows_NE = _by_node(counts_PE, node_P)
    if len(ranks_of) == 1:
        return plan_wrap_fill(counts_PE.sum(0), slots_P)
    holds_NE = spread_over_nodes(rows_NE, [[slots_P[p] for p in ranks] for ranks in ranks_of])
    return _filled(rows_NE, holds_NE, ranks_of, slots_P, plan_wrap_fill)


def tables_for_nodes(counts_PE: np.ndarray, slots_P: Sequence[int], node_P: Sequence[int]) -> list[Placement]:
    """From few experts on several nodes to as many as slots allow."""
    ranks_of, rows_NE = _by_node(counts_PE, node_P)
    slots_N = np.array([sum(min(slots_P[p], rows_NE.shape[1]) for p in ranks) for ranks in ranks_of])
    ranks_N = np.array([sum(slots_P[p] > 0 for p in ranks) for ranks in ranks_of])
    spare = int(slots_N.sum()) - rows_NE.shape[1]
    return [
        _filled(rows_NE, _placed(rows_NE, slots_N, ranks_N, number), ranks_of, slots_P, plan_greedy)
        for number in sorted({round(part * spare) for part in ABROAD} - {0})
    ]


def _by_node(counts_PE: np.ndarray, node_P: Sequence[int]) -> tuple[list[list[int]], np.ndarray]:
    """Ranks of each node, and the rows that it sends to each expert."""
    ranks_of = [[rank for rank, node in enumerate(node_P) if node == n] for n in sorted(set(node_P))]
    return ranks_of, np.stack([counts_PE[ranks].sum(0) for ranks in ranks_of]).astype(float)


def _filled(
    rows_NE: np.ndarray,
    holds_NE: np.ndarray,
    ranks_of: list[list[int]],
    slots_P: Sequence[int],
    plan_inside: Callable[[np.ndarray, list[int]], Placement],
) -> Placement:
    """Each node by itself."""
    load_NE = loads_of_nodes(rows_NE, holds_NE, np.array([len(ranks) for ranks in ranks_of]))
    rows: list[tuple[int, ...]] = [()] * len(slots_P)
    for n, ranks in enumerate(ranks_of):
        experts = np.flatnonzero(holds_NE[n])
        if not len(experts):
            continue
        inside = plan_inside(load_NE[n, experts], [slots_P[p] for p in ranks])
        for rank, held in zip(ranks, inside.held, strict=True):
            rows[rank] = tuple(experts[list(held)].tolist())
    return placement_of(rows, slots_P)


def _placed(rows_NE: np.ndarray, slots_N: np.ndarray, ranks_N: np.ndarray, abroad: int) -> np.ndarray:
    """Which node gets which expert: each at home, and so many of those with most rows on further nodes."""
    home_E = rows_NE.argmax(0)
    further_NE = rows_NE.copy()
    further_NE[home_E, np.arange(len(home_E))] = 0
    holds_NE, room_N = np.zeros(rows_NE.shape, dtype=bool), slots_N.copy()
    for place in np.argsort(-further_NE, axis=None, kind="stable").tolist():
        node, expert = divmod(place, len(home_E))
        new = [n for n in dict.fromkeys((node, int(home_E[expert]))) if not holds_NE[n, expert]]
        if abroad <= 0 or further_NE[node, expert] <= 0:
            break
        if (room_N[new] > 0).all():
            holds_NE[new, expert] = True
            room_N[new] -= 1
            abroad -= 1
    return _rest_placed(rows_NE, holds_NE, room_N, ranks_N)


def spread_over_nodes(rows_NE: np.ndarray, slots_of: list[list[int]]) -> np.ndarray:
    """Which node gets which expert, bool [N, E]."""
    num_nodes, num_experts = rows_NE.shape
    slots_N = np.array([sum(min(count, num_experts) for count in slots) for slots in slots_of])
    # Inside a node, flowing from rank to rank takes one more slot for each rank but the last.
    flow_N = np.array([max(sum(count > 0 for count in slots) - 1, 0) for slots in slots_of])
    capacity_N = np.array([sum(count > 0 for count in slots) for slots in slots_of], dtype=float)
    room_N = slots_N - flow_N
    if (room_N < 0).any() or room_N.sum() < num_experts:
        room_N = slots_N
    holds_NE = np.zeros((num_nodes, num_experts), dtype=bool)
    everywhere = _experts_for_every_node(rows_NE, room_N, num_experts)
    holds_NE[:, everywhere] = True
    return _rest_placed(rows_NE, holds_NE, room_N - len(everywhere), capacity_N)


def _rest_placed(
    rows_NE: np.ndarray, holds_NE: np.ndarray, room_N: np.ndarray, capacity_N: np.ndarray
) -> np.ndarray:
    """The experts that stand nowhere yet, each on one node."""
    room_N, load_E = room_N.copy(), rows_NE.sum(0)
    target_N = load_E.sum() * capacity_N / max(capacity_N.sum(), 1.0)
    load_N = np.where(holds_NE, rows_NE, 0.0).sum(1)
    rest = np.flatnonzero(~holds_NE.any(0))
    for expert in rest[np.argsort(-load_E[rest], kind="stable")].tolist():
        fullness = np.where(room_N > 0, (load_N + load_E[expert]) / np.maximum(target_N, 1e-300), np.inf)
        fitting = np.flatnonzero((fullness <= 1.0) & (room_N > 0))
        # Where it fits, the node with most rows for it; else the least full one.
        node = int(fitting[rows_NE[fitting, expert].argmax()]) if len(fitting) else int(fullness.argmin())
        holds_NE[node, expert] = True
        room_N[node] -= 1
        load_N[node] += load_E[expert]
    return holds_NE


def _experts_for_every_node(rows_NE: np.ndarray, room_N: np.ndarray, num_experts: int) -> np.ndarray:
    """The experts with most rows that would cross otherwise, as many as the slots allow."""
    num_nodes = len(rows_NE)
    extra = int(room_N.sum()) - num_experts
    most = max(min(extra // max(num_nodes - 1, 1), int(room_N.min()), num_experts), 0)
    saved_E = rows_NE.sum(0) - rows_NE.max(0)
    order = np.argsort(-saved_E, kind="stable")[:most]
    return np.sort(order[saved_E[order] > 0])


def loads_of_nodes(rows_NE: np.ndarray, holds_NE: np.ndarray, ranks_N: np.ndarray) -> np.ndarray:
    """Rows that each node computes for each expert: its own first, shared experts even out the nodes."""
    load_NE = np.where(holds_NE, rows_NE, 0.0)
    unheld_E = rows_NE.sum(0) - load_NE.sum(0)
    load_NE += holds_NE * (unheld_E / np.maximum(holds_NE.sum(0), 1))
    shared_E = holds_NE.all(0)
    target_N = load_NE.sum() * ranks_N / ranks_N.sum()
    over_N = load_NE.sum(1) - target_N
    movable_N = load_NE[:, shared_E].sum(1)
    give_N = np.clip(over_N, 0, movable_N)
    if give_N.sum() <= 0:
        return load_NE
    taken_E = (load_NE[:, shared_E] * (give_N / np.maximum(movable_N, 1e-300))[:, None]).sum(0)
    load_NE[:, shared_E] *= (1 - give_N / np.maximum(movable_N, 1e-300))[:, None]
    want_N = np.clip(-over_N, 0, None)
    load_NE[:, shared_E] += taken_E[None, :] * (want_N / max(want_N.sum(), 1e-300))[:, None]
    return load_NE
