"""What of a run lies in the host's memory: weights of experts, inputs of layers, gradients, optimizer state.

    weights     before the model is built: each layer's experts move out as soon as it is
    state       with the optimizer
    inputs      once there is a program, which says when each travels
    gradients   behind these, for whatever room is left

Idea. All of them travel over one lane each way, in the order of one verified program, so that what waits for
what has been proved once for all of them.

Contract: the part of `Learner` that is neither a step nor saved with it.
"""

from __future__ import annotations

from moeclipse.core.errors import ConfigError
from moeclipse.schedule.check import Verified
from moeclipse.train.optim.deferred import DeferredUpdates
from moeclipse.train.optim.host_grads import HostGrads, host_grads_of
from moeclipse.train.predict.step_program import first_layers
from moeclipse.train.step.checkpointed_state import CheckpointedState
from moeclipse.train.step.host_inputs import HostInputs, host_inputs_of
from moeclipse.train.step.host_weights import HostWeights, host_weights_of
from moeclipse.train.step.pipelined import Pipelined
from moeclipse.train.step.sequential import SequentialStep


class HostedLearner(CheckpointedState):
    """Of one rank."""

    grads: HostGrads | None = None
    """Where gradients lie until the next forward, if not on the device."""
    inputs: HostInputs | None = None
    """Of layers, where they lie there between forward and backward."""
    weights: HostWeights | None = None
    """Of experts, where they lie there."""
    pipelined: Pipelined | None
    sequential: SequentialStep

    def program(self) -> Verified:
        """The whole step."""
        raise NotImplementedError

    def _weights_on_host(self) -> None:
        """Before the model is built; all others take their lane."""
        if self.config.memory.weights == "host":
            self.weights = host_weights_of(self.config, self.mesh)

    def _inputs_on_host(self) -> None:
        if self.config.memory.activations != "host":
            return
        others = [other for other in (self.optim.host, self.weights) if other is not None]
        self.inputs = host_inputs_of(self.config, self.mesh, self.program().program, others)
        if self.pipelined is not None:
            self.pipelined.runtime.inputs = self.inputs
        else:
            self.inputs.watch(self.model)

    def _follow_program(self, later: bool) -> None:
        """What is on the host travels as the program says; `later`: for updates under the next forward."""
        leave = self.config.memory.main_grad == "host"
        if leave and not later:
            raise ConfigError(
                f"memory.main_grad = 'host' needs one rank, not {self.mesh.num_ranks}; set it to 'device'"
            )
        if self.optim.host is None and self.weights is None and not leave:
            return
        ops = (program := self.program().program).ranks[self.mesh.pp_index]
        if self.weights is not None:
            self.weights.follow(program, by_autograd=self.pipelined is None)
            self.weights.watch(self.model)
            if self.pipelined is not None:
                self.pipelined.runtime.weights = self.weights
        if self.optim.host is not None:
            self.optim.host.follow(ops, self.optim.buckets.buckets)
        if later:
            if leave:
                others = [one for one in (self.optim.host, self.inputs, self.weights) if one is not None]
                given = (self.config, self.mesh, self.optim, self.model, ops, others)
                self.grads = self.optim.grads = host_grads_of(*given)
            self.optim.deferred = DeferredUpdates(self.optim, first_layers(program))
            self.optim.deferred.watch(self.model)
            if self.sequential.graphs is not None:
                self.sequential.graphs.first_eagerly = True

    def _begin_copies(self) -> None:
        """As a step begins: what it needs first is under way."""
        if self.weights is not None:
            self.weights.begin_step()
        if self.inputs is not None:
            self.inputs.begin_step()
        if self.optim.deferred is None:
            self.optim.begin_fetching()
