"""A simulated step to look at: Perfetto JSON for the browser, ASCII for the terminal.

Perfetto (ui.perfetto.dev) shows one process per rank, one row per lane, and memory as a counter. The ASCII
timeline gives each rank one line for compute and, where there is any, one for communication.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import COMPUTE, Part
from moeclipse.schedule.op import Op
from moeclipse.schedule.shape import PipelineShape
from moeclipse.sim.engine import Simulation
from moeclipse.sim.measure import communication_time, compute_intervals, memory_curve

LEGEND = "F forward  B backward  I dX  W dW  # forward and backward paired  R recompute  . idle"
NEAR = 6
"""Compute ops of one side that may follow each other inside a pair."""
WIRE_LEGEND = "- communication under compute  ! exposed"


def perfetto(result: Simulation, *, seconds_per_unit: float = 1.0) -> dict[str, Any]:
    """Trace events in microseconds."""
    scale = 1e6 * seconds_per_unit
    events: list[dict[str, Any]] = []
    transfers = result.verified.graph.transfers
    for rank, ops in enumerate(result.program.ranks):
        lanes = {COMPUTE: 0}
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        begin = result.begin[rank]
        for position, op in enumerate(ops):
            row = lanes.setdefault(op.lane, len(lanes))
            events.append(_slice(rank, row, op, result, begin + position, scale))
        if transfers is not None:
            for at in np.flatnonzero(transfers.source == rank):
                lane = f"p2p:{rank}>{transfers.destination[at]}"
                node = result.verified.graph.num_ops + int(at)
                kind = kinds.SEND_F if transfers.is_forward[at] else kinds.SEND_B
                stage, microbatch = int(transfers.stage[at]), int(transfers.microbatch[at])
                op = Op(kind=kind, lane=lane, stage=stage, microbatch=microbatch)
                events.append(_slice(rank, lanes.setdefault(lane, len(lanes)), op, result, node, scale))
        events += [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": lane}}
            for lane, row in lanes.items()
        ]
        moments, held = memory_curve(result, rank)
        events += [
            {
                "ph": "C",
                "name": "activations",
                "pid": rank,
                "ts": float(t) * scale,
                "args": {"held": float(h)},
            }
            for t, h in zip(moments, held, strict=True)
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"program": result.program.name}}


def _slice(rank: int, row: int, op: Op, result: Simulation, node: int, scale: float) -> dict[str, Any]:
    start, finish = float(result.start[node]), float(result.finish[node])
    args: dict[str, Any] = {"launched": float(result.ready[node]) * scale}
    for field in ("stage", "layer", "microbatch", "step", "chunk", "expert"):
        if getattr(op, field) is not None:
            args[field] = getattr(op, field)
    return {
        "ph": "X",
        "name": str(op),
        "cat": op.kind.name,
        "pid": rank,
        "tid": row,
        "ts": start * scale,
        "dur": (finish - start) * scale,
        "args": args,
    }


def write_perfetto(result: Simulation, path: str | Path, *, seconds_per_unit: float = 1.0) -> None:
    Path(path).write_text(json.dumps(perfetto(result, seconds_per_unit=seconds_per_unit)))


def timeline(result: Simulation, width: int = 100, *, max_ranks: int = 16) -> str:
    """One line per rank (two with communication); a column shows what ran longest in it."""
    ranks = list(range(result.program.num_ranks))
    hidden = ranks[max_ranks:]
    lines, any_wire = [], False
    label = len(str(ranks[-1])) if ranks else 1
    for rank in ranks[:max_ranks]:
        lines.append(f"rank {rank:>{label}} {_compute_row(result, rank, width)}")
        row = _wire_row(result, rank, width)
        if row.strip():
            any_wire = True
            lines.append(" " * (6 + label) + row)
    if hidden:
        lines.append(f"... and {len(hidden)} more ranks")
    legend = LEGEND if _is_pipeline(result) else "S, R exchange  C compute  W dW  H shadow  . idle"
    return "\n".join([*lines, legend + ("  " + WIRE_LEGEND if any_wire else "")])


def _is_pipeline(result: Simulation) -> bool:
    return isinstance(result.program.shape, PipelineShape)


def _glyph(op: Op) -> str:
    if op.kind is kinds.PAIR:
        return "#"
    if op.kind is kinds.SELF:
        return _glyph(op.parts[0])
    if op.kind.part is Part.SHADOW:
        return "H"
    if op.kind in (kinds.C_F, kinds.C_B):
        return "C"
    return op.kind.form.name


def _cells(
    start: np.ndarray, finish: np.ndarray, makespan: float, width: int
) -> list[list[tuple[int, float]]]:
    """For each column: (index, time spent in it)."""
    cells: list[list[tuple[int, float]]] = [[] for _ in range(width)]
    if makespan <= 0:
        return cells
    column = makespan / width
    for index, (begin, end) in enumerate(zip(start, finish, strict=True)):
        first, last = int(begin / column), min(int(end / column), width - 1)
        for at in range(min(first, width - 1), last + 1):
            share = min(end, (at + 1) * column) - max(begin, at * column)
            if share > 0:
                cells[at].append((index, share))
    return cells


def _compute_row(result: Simulation, rank: int, width: int) -> str:
    ops = [op for op in result.program.ranks[rank] if op.lane == COMPUTE]
    start, finish = compute_intervals(result, rank)
    glyphs = _glyphs(ops)
    column = result.makespan / width
    row = ""
    for cell in _cells(start, finish, result.makespan, width):
        spent: dict[str, float] = {}
        for index, share in cell:
            spent[glyphs[index]] = spent.get(glyphs[index], 0.0) + share
        busy = sum(spent.values())
        row += max(spent, key=lambda g: spent[g]) if busy > column / 2 else "."
    return row


def _glyphs(ops: list[Op]) -> list[str]:
    """One per compute op. Layer ops of a pair are known by their neighbours: F and B in turn."""
    plain = [_glyph(op) for op in ops]
    glyphs = list(plain)
    for index, op in enumerate(ops):
        if op.layer is None:
            continue
        other = "BW" if plain[index] == "F" else "F"
        before, after = plain[max(0, index - NEAR) : index], plain[index + 1 : index + 1 + NEAR]
        if any(g in other for g in before) and any(g in other for g in after):
            glyphs[index] = "#"
    return glyphs


def _wire_row(result: Simulation, rank: int, width: int) -> str:
    lane = communication_time(result, rank)
    wire = _cells(lane.start, lane.finish, result.makespan, width)
    work = _cells(*compute_intervals(result, rank), result.makespan, width)
    column = result.makespan / width
    row = ""
    for sent, done in zip(wire, work, strict=True):
        share = sum(s for _, s in sent)
        idle = column - sum(s for _, s in done)
        row += " " if share < column / 4 else "!" if idle > column / 2 else "-"
    return row
