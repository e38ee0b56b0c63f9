"""Seconds of every op of a program, from a table of costs.

What a table leaves out is derived: B = I + W and I = B - W, PAIR = F + B, an action that overlaps itself
costs what it costs alone, recompute what forward costs, and a transfer the table's `wire`. An op that is cut
into chunks takes its share of `seconds` plus the whole of `fixed`, so that cutting has a price.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moeclipse.core.errors import ConfigError, ScheduleError
from moeclipse.cost.model import Costs
from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import COMPUTE, ENDS, KIND_OF, LAUNCHES, TRANSFERS, Form, Kind
from moeclipse.schedule.op import ACTIONS, ActionColumns, Op, Program

FREE_UNLESS_GIVEN = (kinds.REDUCE, kinds.UNSHARD, kinds.RESHARD, kinds.SHADOW_ADD, *LAUNCHES, *ENDS)
Floats = npt.NDArray[np.float64]


def seconds_of(costs: Costs, kind: Kind, inner: Kind | None = None) -> float:
    """Seconds of a whole op; `inner` is the action inside a SELF."""
    table = costs.seconds
    if kind.name in table:
        return table[kind.name]
    if kind is kinds.B and {"I", "W"} <= set(table):
        return table["I"] + table["W"]
    if kind is kinds.I and {"B", "W"} <= set(table):
        return table["B"] - table["W"]
    if kind is kinds.PAIR:
        return seconds_of(costs, kinds.F) + seconds_of(costs, kinds.B)
    if kind is kinds.SELF and inner is not None:
        return table.get(self_name(inner), seconds_of(costs, inner))
    if kind in TRANSFERS:
        return costs.wire
    if kind.form is Form.R and kind not in LAUNCHES:
        return seconds_of(costs, KIND_OF[kind.part, Form.F])
    if kind in FREE_UNLESS_GIVEN:
        return 0.0
    raise ConfigError(f"costs {costs.name!r} say nothing about {kind}; known: {', '.join(sorted(table))}")


def self_name(inner: Kind) -> str:
    """Under which name a table lists an action that overlaps itself."""
    return f"{kinds.SELF}_{inner}"


def tells_self_overlap(costs: Costs) -> bool:
    """Whether a table knows what an action costs that overlaps itself."""
    return any(name in costs.seconds for name in (kinds.SELF.name, *map(self_name, ACTIONS)))


def table_durations(program: Program, costs: Costs) -> list[float]:
    """In rank order."""
    known: dict[tuple[Kind, Kind | None], float] = {}
    flat: list[float] = []
    plain = not (costs.fixed or costs.stage_scale)
    alone = kinds.SELF  # looked up once: there may be a million ops
    for rank, ops in enumerate(program.ranks):
        slow = 1.0 / costs.rank_speed[rank] if costs.rank_speed else 1.0
        for op in ops:
            key = (op.kind, op.parts[0].kind if op.kind is alone else None)
            if key not in known:
                known[key] = seconds_of(costs, *key)
            seconds = known[key]
            if op.chunks > 1:
                seconds /= op.chunks
            if not plain:
                seconds = seconds * _scale(op, costs) + costs.fixed.get(op.kind.name, 0.0)
            flat.append(seconds * slow if op.lane == COMPUTE else seconds)
    return flat


def column_durations(columns: ActionColumns, costs: Costs) -> Floats:
    """The same for actions that are kept as columns."""
    used = np.unique(columns.kind)
    table = np.zeros(len(ACTIONS))
    fixed = np.zeros(len(ACTIONS))
    for code in used.tolist():
        table[code] = seconds_of(costs, ACTIONS[code])
        fixed[code] = costs.fixed.get(ACTIONS[code].name, 0.0)
    seconds = table[columns.kind]
    if costs.stage_scale:
        if int(columns.stage.max(initial=0)) >= len(costs.stage_scale):
            raise ScheduleError(
                f"stage {columns.stage.max()} has no entry among the {len(costs.stage_scale)} scales of "
                "stages"
            )
        seconds = seconds * np.asarray(costs.stage_scale)[columns.stage]
    seconds = seconds + fixed[columns.kind]
    if costs.rank_speed:
        seconds = seconds / np.repeat(np.asarray(costs.rank_speed), columns.sizes)
    return seconds


def _scale(op: Op, costs: Costs) -> float:
    if not costs.stage_scale or op.lane != COMPUTE:
        return 1.0
    scales = []
    for leaf in op.leaves:
        if leaf.stage is None or leaf.stage >= len(costs.stage_scale):
            raise ScheduleError(f"{op} has no entry among the {len(costs.stage_scale)} scales of stages")
        scales.append(costs.stage_scale[leaf.stage])
    return sum(scales) / len(scales)


def checked_durations(program: Program, durations: Sequence[Sequence[float]]) -> list[float]:
    """Given ones, in rank order."""
    sizes, wanted = [len(d) for d in durations], [len(ops) for ops in program.ranks]
    if sizes != wanted:
        raise ScheduleError(f"durations have {sizes} entries per rank, but the program has {wanted} ops")
    return [seconds for rank_durations in durations for seconds in rank_durations]
