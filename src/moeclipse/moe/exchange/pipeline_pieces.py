"""The dispatch, experts and combine of a MoE layer in pieces that a pipeline's schedule can place.

`moe/exchange/dispatch_combine` runs a layer's two programs in one go, as one autograd node. Here the same
programs run slice by slice, without autograd, so that the pieces of several microbatches can be interleaved:

    DISPATCH_F   rows start to travel            COMBINE_B    gradients of the output start to travel
    MLP_F        experts, unit by unit           MLP_B        input gradients of the experts
    COMBINE_F    the last results travel back    DISPATCH_B   the last of them, and the scores', travel back
                                                 MLP_W        weight gradients

With one unit a slice is one op. Under the smart schedule MLP_F also launches the units that return while
others compute. Recompute runs DISPATCH_F and MLP_F again over the same plan, and nothing travels back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeclipse.comm.async_ops.execute import Execution
from moeclipse.comm.async_ops.lane import InFlight, Joined, Ready
from moeclipse.moe.exchange.dispatch_combine import BackwardRun, ForwardRun, LayerCall
from moeclipse.moe.exchange.launches import announce
from moeclipse.moe.exchange.saved_tensors import without_rows
from moeclipse.schedule import kinds
from moeclipse.schedule.check import Verified
from moeclipse.schedule.kinds import A2A
from moeclipse.schedule.op import Op
from moeclipse.tensor.weight_grad import deliver

WAITED_FOR_LATER: InFlight[None] = Ready(None)
"""The slice behind it waits for its transfers by itself."""


class ExpertPass:
    """One microbatch's rows on their way to the experts and back, forward and backward."""

    def __init__(self, call: LayerCall, scores_TK: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
        self.call = call
        self.empty = [without_rows(tensor) for tensor in inputs]
        self.state: ForwardRun = call.forward(scores_TK, inputs)
        self.rank = call.plan.dispatcher.group.index
        programs, ledger = call.programs, call.plan.dispatcher.lane.recorder.ledger
        if ledger is not None:
            announce(ledger, call.plan, programs.forward, programs.pieces, call.num_inputs, pieces=True)

    def _execution(self, verified: Verified, run: ForwardRun | BackwardRun) -> Execution:
        return Execution(verified, self.rank, run.op)

    # forward

    def dispatch(self) -> InFlight[None]:
        self.state.start()
        self.forward = self._execution(self.call.programs.forward, self.state)
        self.forward.advance(first_compute(self.forward.ops))
        return self.forward if len(self.call.plan.units) == 1 else WAITED_FOR_LATER

    def compute(self) -> None:
        self.forward.advance(last_compute(self.forward.ops) + 1)

    def combine(self) -> InFlight[None]:
        self.forward.advance()
        return self.forward

    def output(self, again: bool = False, keep_rows: bool = False) -> torch.Tensor:
        """What came back, added up for each token. `again`: experts will run once more before backward."""
        out_TO = self.state.finish(keep_rows)
        if again:
            self.state.saved = {}
        return out_TO

    # recompute

    def dispatch_again(self, inputs: Sequence[torch.Tensor]) -> InFlight[None]:
        """Send the rows once more; who gets what is known."""
        state = self.state
        state.take_rows(inputs)
        sends = [op for op in self.forward.ops if op.kind is kinds.S_F]
        return Joined([state.op(op) for op in sends])

    def compute_again(self) -> None:
        """Fill what backward needs; the results are not wanted."""
        for op in self.forward.ops:
            if op.kind is kinds.C_F:
                self.state.recompute(op)
        self.state.rows, self.state.arrived = [], []

    # backward

    def combine_back(self, d_out_TO: torch.Tensor) -> InFlight[None]:
        self.back = BackwardRun(self.state.kept(), d_out_TO, self.empty)
        self.back.start()
        self.backward = self._execution(self.call.programs.pieces, self.back)
        self.backward.advance(first_compute(self.backward.ops))
        return self.backward if len(self.call.plan.units) == 1 else WAITED_FOR_LATER

    def compute_back(self) -> None:
        ops = self.backward.ops
        self.backward.advance(max(i for i, op in enumerate(ops) if op.kind is kinds.C_B) + 1)

    def dispatch_back(self) -> InFlight[None]:
        self.backward.advance([op.kind for op in self.backward.ops].index(kinds.C_W))
        self.back.return_scores()
        return self.backward

    def input_grads(self) -> tuple[list[torch.Tensor | None], torch.Tensor]:
        """(gradients of the inputs, d_scores_TK), after dispatch_back."""
        self.backward.get()
        return self.back.finish()

    def weights(self) -> None:
        """W: weight gradients, and those that shadows returned; before or after dispatch_back."""
        self.back.wgrad()
        if self.back.shadows is not None:
            self.back.shadows.add_grads(self.back.weight_grads)
        for parameter, grad in zip(self.call.experts.weights, self.back.weight_grads, strict=True):
            deliver(parameter, grad)


def first_compute(ops: Sequence[Op]) -> int:
    return next(position for position, op in enumerate(ops) if op.lane != A2A)


def last_compute(ops: Sequence[Op]) -> int:
    return max(position for position, op in enumerate(ops) if op.lane != A2A)
