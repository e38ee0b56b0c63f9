"""What the exchange of one call of a layer launches, by the op of its layer that does: for a ledger.

A layer decides anew in each call how its rows travel and whether experts have shadows. So the program of a
whole step holds DISPATCH, MLP and COMBINE, and the programs of the exchange say what these launch.
"""

from __future__ import annotations

from collections.abc import Iterator

from moeclipse.comm.async_ops.ledger import Ledger
from moeclipse.moe.exchange.dispatch import DispatchPlan
from moeclipse.schedule import kinds
from moeclipse.schedule.check import Verified
from moeclipse.schedule.kinds import A2A, Kind, Part
from moeclipse.schedule.op import Op

SAID: dict[Kind, str] = {
    kinds.S_F: "dispatch {op}",
    kinds.R_F: "combine {op}",
    kinds.S_B: "backward dispatch {op}",
    kinds.R_B: "backward combine {op}",
    kinds.SHADOW_SEND: "shadow weights",
    kinds.SHADOW_REDUCE: "shadow gradients",
}


def announce(
    ledger: Ledger,
    plan: DispatchPlan,
    forward: Verified,
    backward: Verified,
    num_inputs: int,
    *,
    pieces: bool,
) -> None:
    """`pieces`: a pipeline runs the exchange slice by slice."""
    rank = plan.dispatcher.group.index
    there, back = (list(verified.program.ranks[rank]) for verified in (forward, backward))
    slices = {**dict(_slices(there, pieces)), **dict(_slices_back(back, pieces))}
    slices[kinds.DISPATCH_R] = [op for op in there if op.kind is kinds.S_F]
    labels = {
        kind: [label for op in ops for label in _labels(op, plan, num_inputs)] for kind, ops in slices.items()
    }
    ledger.announce(plan.where, labels)


def _labels(op: Op, plan: DispatchPlan, num_inputs: int) -> list[str]:
    """What launches are called; units whose rows stay where they are launch nothing, inputs one each."""
    if op.lane != A2A:
        return []
    label = f"{SAID[op.kind].format(op=op)}, {plan.where}"
    if op.kind.part is Part.SHADOW:
        return [label]
    local = plan.units[op.step or 0, op.chunk or 0].local
    return [] if local else [label] * (num_inputs if op.kind is kinds.S_F else 1)


def _slices(ops: list[Op], pieces: bool) -> Iterator[tuple[Kind, list[Op]]]:
    if not pieces:
        yield kinds.DISPATCH_F, ops
        return
    computes = [position for position, op in enumerate(ops) if op.lane != A2A]
    yield kinds.DISPATCH_F, ops[: computes[0]]
    yield kinds.MLP_F, ops[computes[0] : computes[-1] + 1]
    yield kinds.COMBINE_F, ops[computes[-1] + 1 :]


def _slices_back(ops: list[Op], pieces: bool) -> Iterator[tuple[Kind, list[Op]]]:
    """Score gradients, which the step's own program lists, leave in front of the last weight gradients."""
    weights = max(position for position, op in enumerate(ops) if op.kind is kinds.C_W)
    if not pieces:
        if all(op.kind is not kinds.SHADOW_B for op in ops) and ops[-1].kind is kinds.SHADOW_ADD:
            yield kinds.COMBINE_B, ops  # gradients of guests: score gradients leave behind them
            return
        yield kinds.COMBINE_B, ops[:weights]
        yield kinds.MLP_W, ops[weights:]
        return
    first = next(position for position, op in enumerate(ops) if op.lane != A2A)
    last = max(position for position, op in enumerate(ops) if op.kind is kinds.C_B) + 1
    yield kinds.COMBINE_B, ops[:first]
    yield kinds.MLP_B, ops[first:last]
    yield kinds.DISPATCH_B, ops[last : [op.kind for op in ops].index(kinds.C_W)]
