"""What each op of a program takes when it starts and gives back when it ends.

One table for both sides: generators write it into the ops, the verifier demands it of them, so that a peak
is the peak of what the ops hold and not of what somebody wrote.

    whole stages   F takes one unit (`PipelineShape.unit`), B and W give it back; I keeps what W needs
    layers         forward keeps, recompute brings back what forward did not keep, dX takes gradients for dW
                   and releases what only it needed, dW releases the rest; an input that lies on the host
                   is released by its store, and taken again by its fetch
    exchange       forward S keeps a share of the rows for each event, backward R releases it
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import Form, Kind, Part
from moeclipse.schedule.op import ACTIONS, ActionColumns, Op, Program
from moeclipse.schedule.shape import ExchangeShape, LayerShape, PipelineShape

Floats = npt.NDArray[np.float64]
Change = tuple[float, float]
"""(taken, given back)."""
NOTHING: Change = (0.0, 0.0)
OF_ACTION: dict[Kind, Change] = {kinds.F: (1.0, 0.0), kinds.B: (0.0, 1.0), kinds.W: (0.0, 1.0)}
"""In units of what a stage keeps of one microbatch."""


def layer_memory(layer: LayerShape, kind: Kind) -> Change:
    """Of a whole part; one chunk of it has its share."""
    part, form = kind.part, kind.form
    if part is Part.WEIGHTS:  # from one buffer of a ring that is there anyway to the host
        return NOTHING
    if part is Part.INPUT:
        size = layer.activation.input
        return (0.0, size) if form is Form.STORE else (size, 0.0)
    kept = layer.kept.get(part, 0.0)
    outside = layer.activation.input if part is Part.ATTN else 0.0
    if form is Form.F:
        return outside + (0.0 if part in layer.recomputed else kept), 0.0
    if form is Form.R:
        return kept, 0.0
    pending = layer.pending.get(part, 0.0)
    if form is Form.B:
        return max(pending, 0.0), max(-pending, 0.0)
    return 0.0, kept + outside + pending


def event_memory(shape: ExchangeShape, kind: Kind) -> Change:
    share = 1.0 / shape.num_events
    if kind is kinds.S_F:
        return share, 0.0
    return (0.0, share) if kind is kinds.R_B else NOTHING


def memory_of(shape: PipelineShape | ExchangeShape, op: Op) -> Change:
    """What `op` must say; its stage and layer exist in the shape."""
    if isinstance(shape, ExchangeShape):
        return event_memory(shape, op.kind)
    if op.layer is not None and op.stage is not None:
        taken, given = layer_memory(shape.layers[op.stage][op.layer], op.kind)
        return taken / op.chunks, given / op.chunks
    taken = given = 0.0
    for leaf in op.leaves:
        more, less = OF_ACTION.get(leaf.kind, NOTHING)
        taken, given = taken + more * shape.unit, given + less * shape.unit
    return taken, given


def memory_columns(program: Program, rank: int) -> tuple[Floats, Floats]:
    """(taken, given back) of a rank's ops, in launch order."""
    ranks = program.ranks
    if isinstance(ranks, ActionColumns):
        unit = program.pipeline().unit
        table = unit * np.array([OF_ACTION.get(kind, NOTHING) for kind in ACTIONS])
        mine = ranks.kind[int(ranks.begin[rank]) : int(ranks.begin[rank + 1])]
        return table[mine, 0], table[mine, 1]
    ops = ranks[rank]
    return np.array([op.alloc for op in ops]), np.array([op.free for op in ops])
