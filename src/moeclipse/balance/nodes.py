"""Wrap-fill over two levels: experts over nodes first, then over the ranks of each node.

Idea: a row that stays on its node is cheap. Experts with many rows from everywhere get a place on every
node, as long as slots last, so their rows need not cross; every other expert goes to the node that sends it
most rows and still has room. Then each node is filled by itself, as if it were alone.

Contract: pure and deterministic; the result fits the slots of each rank, whatever the nodes look like.

Shapes: N nodes, E experts, P ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeclipse.balance.placement import Placement
from moeclipse.balance.replicate import placement_of, plan_wrap_fill


def plan_two_level(counts_PE: np.ndarray, slots_P: Sequence[int], node_P: Sequence[int]) -> Placement:
    nodes = sorted(set(node_P))
    ranks_of = [[rank for rank, node in enumerate(node_P) if node == n] for n in nodes]
    if len(nodes) == 1:
        return plan_wrap_fill(counts_PE.sum(0), slots_P)
    rows_NE = np.stack([counts_PE[ranks].sum(0) for ranks in ranks_of]).astype(float)
    holds_NE = spread_over_nodes(rows_NE, [[slots_P[p] for p in ranks] for ranks in ranks_of])
    load_NE = loads_of_nodes(rows_NE, holds_NE, np.array([len(ranks) for ranks in ranks_of]))
    rows: list[tuple[int, ...]] = [()] * len(slots_P)
    for n, ranks in enumerate(ranks_of):
        experts = np.flatnonzero(holds_NE[n])
        if not len(experts):
            continue
        inside = plan_wrap_fill(load_NE[n, experts], [slots_P[p] for p in ranks])
        for rank, held in zip(ranks, inside.held, strict=True):
            rows[rank] = tuple(experts[list(held)].tolist())
    return placement_of(rows, slots_P)


def spread_over_nodes(rows_NE: np.ndarray, slots_of: list[list[int]]) -> np.ndarray:
    """Which node gets which expert, bool [N, E]."""
    num_nodes, num_experts = rows_NE.shape
    slots_N = np.array([sum(min(count, num_experts) for count in slots) for slots in slots_of])
    # Inside a node, flowing from rank to rank takes one more slot for each rank but the last.
    flow_N = np.array([max(sum(count > 0 for count in slots) - 1, 0) for slots in slots_of])
    capacity_N = np.array([sum(count > 0 for count in slots) for slots in slots_of], dtype=float)
    target_N = rows_NE.sum() * capacity_N / max(capacity_N.sum(), 1.0)
    room_N = slots_N - flow_N
    if (room_N < 0).any() or room_N.sum() < num_experts:
        room_N = slots_N
    holds_NE = np.zeros((num_nodes, num_experts), dtype=bool)
    load_N = np.zeros(num_nodes)
    load_E = rows_NE.sum(0)
    everywhere = _experts_for_every_node(rows_NE, room_N, num_experts)
    holds_NE[:, everywhere] = True
    room_N = room_N - len(everywhere)
    load_N += rows_NE[:, everywhere].sum(1)
    rest = np.setdiff1d(np.arange(num_experts), everywhere)
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
