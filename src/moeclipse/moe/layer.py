"""The Mixture-of-Experts layer, a drop-in `nn.Module`.

    moe = moeclipse.MoE(d_model=512, d_ff=1024, num_experts=8, top_k=2)        # one rank, nothing to set up
    y = moe(x)                                                                 # any leading dimensions
    loss = task_loss + moeclipse.aux_loss(model)

With `exchange={"schedule": "smart"}` the rows travel in units, and the experts compute one while others
travel; "blocking" sends all, then computes all, then returns all. Both give the same gradients.

On several ranks give it a mesh: `MoE(..., mesh=Mesh.of_world(ep=4))`. Its expert parameters then differ from
rank to rank: keep them out of DDP with `DDP(exclude_experts(model))`, and call `sync_gradients(model)` after
backward, before the optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from moeclipse.balance.placement import Placement
from moeclipse.comm.flight.exchange import gather
from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.wires.open import open_wire
from moeclipse.core.config import named_in, problems_of, with_values
from moeclipse.core.errors import ConfigError
from moeclipse.moe.adapters import Joint, ModuleExperts
from moeclipse.moe.config import LAYER_KEYS, ExchangeConfig, GateConfig, MoEConfig, layer_problems
from moeclipse.moe.dispatch import Dispatcher
from moeclipse.moe.dispatch_combine import DispatchCombine, LayerCall
from moeclipse.moe.expert_set import PairExperts
from moeclipse.moe.experts import Experts, PadToCapacity
from moeclipse.moe.fused import FusedExperts, fits
from moeclipse.moe.gates import Gate
from moeclipse.moe.losses import balance_loss, z_loss
from moeclipse.moe.pairwise import PairwiseExperts
from moeclipse.moe.probe import Probe, measure
from moeclipse.moe.routing import Routing
from moeclipse.moe.schedule import ExchangeSchedule, Loads
from moeclipse.moe.structure import Inputs, Structure
from moeclipse.moe.tokens import Tokens
from moeclipse.moe.topology import near_experts
from moeclipse.moe.weight_init import WeightInit
from moeclipse.ops.activation import Activation
from moeclipse.ops.grouped_experts import grouped_experts


@dataclass(frozen=True, kw_only=True)
class MoEReport:
    """What a layer tells about one microbatch."""

    aux_loss: torch.Tensor
    """This rank's share: over all ranks the shares sum to the loss."""
    load_E: torch.Tensor
    """Tokens of this rank that wanted each expert."""
    num_dropped: torch.Tensor


class MoE(nn.Module):
    def __init__(
        self,
        d_model: int,
        d_ff: int,
        num_experts: int,
        top_k: int = 2,
        *,
        gate: GateConfig | None = None,
        num_shared_experts: int = 0,
        activation: Activation = "swiglu",
        expert_bias: bool = False,
        experts: Callable[[int], nn.Module] | Joint | None = None,
        d_out: int | None = None,
        exchange: ExchangeConfig | Mapping[str, Any] | None = None,
        expert_tp: Literal["folded", "sharded"] = "folded",
        mesh: Mesh | None = None,
        placement: Placement | None = None,
        layer: int = 0,
        seed: int = 0,
        init_std: float = 0.02,
        down_std: float | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`exchange`: how rows travel. `placement`: which rank holds which experts; left out: equal parts."""
        super().__init__()
        gate = gate or GateConfig(top_k=top_k)
        config = MoEConfig(
            num_experts=num_experts,
            d_ff=d_ff,
            num_shared_experts=num_shared_experts,
            activation=activation,
            expert_bias=expert_bias,
            expert_tp=expert_tp,
            **vars(given_exchange(exchange)),
        )
        self.mesh = mesh or Mesh.single(device or "cpu")
        self.sharded = expert_tp == "sharded" and self.mesh.tp > 1
        group = self.mesh.shard_experts if self.sharded else self.mesh.experts
        check(config, gate, self.mesh, group, placement, experts)
        self.layer, self.num_experts, self.calls = layer, num_experts, 0
        device = device or self.mesh.device
        init = WeightInit(layer=layer, seed=seed, std=init_std, down_std=down_std, device=device, dtype=dtype)
        self.gate = Gate(gate, d_model=d_model, num_experts=num_experts, init=init)
        placement = self._place(config, group, device, placement)
        shard = (self.mesh.tp_index, self.mesh.tp) if self.sharded else (0, 1)
        build = partial(
            Experts, d_model=d_model, init=init, shard=shard, activation=activation, bias=expert_bias
        )
        ids = placement.slots[group.index]
        self.experts: Experts | ModuleExperts = (
            build(ids, d_ff=d_ff, kernels=config.kernels != "off")
            if experts is None
            else ModuleExperts(ids, experts, d_out or d_model)
        )
        self.shared = build([-1], d_ff=num_shared_experts * d_ff) if num_shared_experts else None
        self.fused: bool | None = False if config.kernels == "off" else None  # None: where the kernels fit
        load_E = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.register_buffer("load_E", load_E, persistent=False)

    load_E: torch.Tensor
    """Tokens of this rank that wanted each expert since the last optimizer step."""
    last: MoEReport | None = None
    """Of the last forward."""

    def _place(
        self, config: MoEConfig, group: Group, device: torch.device, placement: Placement | None
    ) -> Placement:
        """Which rank holds which expert, and how rows get there."""
        placement = placement or Placement.contiguous(self.num_experts, group.size)
        self.gate.near_E = near_experts(self.mesh, group, placement, device, sharded=self.sharded)
        transport = open_wire(config.transport, self.mesh, group)
        self.dispatcher = Dispatcher.of(placement, group, self.mesh.a2a, device, transport)
        hosts = self.mesh.hosts
        self.schedule = ExchangeSchedule(config, tuple(hosts[rank] for rank in group.ranks))
        return placement

    def move_to(self, placement: Placement, expected_E: np.ndarray | None = None) -> None:
        """Route rows by another placement from now on; whoever calls this has moved the weights."""
        self.dispatcher = self.dispatcher.moved(placement, expected_E)
        group = self.dispatcher.group
        self.experts.ids = placement.slots[group.index]
        device = self.dispatcher.rank_of_E.device
        self.gate.near_E = near_experts(self.mesh, group, placement, device, sharded=self.sharded)

    def forward(self, x: Inputs) -> torch.Tensor:
        """A tensor [..., d_model], or a tuple or dict of tensors of which the first is [tokens, d_model]."""
        shape = x.shape if isinstance(x, torch.Tensor) else None
        if isinstance(x, torch.Tensor):
            x = x.flatten(0, -2)
        num_tokens = len(Structure.take_apart(x)[1][0])
        tokens = Tokens.of(self.mesh, num_tokens, step=self.calls, group=self.token_group)
        self.calls += self.training
        y_TO, self.last = self.run(x, tokens)
        return y_TO if shape is None else y_TO.view(*shape[:-1], -1)

    @property
    def token_group(self) -> Group:
        """The ranks that have different tokens."""
        return self.mesh.data if self.sharded else self.mesh.stage

    def run(self, x: Inputs, tokens: Tokens) -> tuple[torch.Tensor, MoEReport]:
        """The layer on this rank's part of a global microbatch.

        Where experts are sharded over tp, all tp ranks get the same tokens, and output, gradients and losses
        are shares: their sums over tp are the layer's.
        """
        structure, inputs = Structure.take_apart(x)
        x_TD = inputs[0]
        routing = self.gate(x_TD, tokens)
        loads = self.gather_loads([routing], tokens)
        y_TD = self._routed(routing, structure, inputs, tokens, loads)
        if self.shared is not None:
            y_TD = y_TD + _Shared.apply(x_TD, self.shared, *self.shared.weights)
        return y_TD, self.report(routing, loads, tokens)

    def gather_loads(self, routings: Sequence[Routing], tokens: Tokens) -> Loads:
        """Those of the whole microbatch, on their way; `routings` are those of this rank's tokens."""
        load_E = torch.stack([routing.load_E for routing in routings]).sum(0)
        label = f"sum of expert loads, {self.where(tokens)}"
        return Loads(gather(self.mesh.a2a, tokens.group, load_E, label), tokens.group)

    def where(self, tokens: Tokens) -> str:
        return f"layer {self.layer}, microbatch {tokens.microbatch}"

    def report(self, routing: Routing, loads: Loads, tokens: Tokens) -> MoEReport:
        """Losses and counts of one call; in training the counts are added up until the optimizer step."""
        config = self.gate.config
        aux = config.balance_loss * balance_loss(routing, loads.total(), tokens.total)
        if config.z_loss:
            aux = aux + config.z_loss * z_loss(routing, tokens.total)
        load_E, num_dropped = routing.load_E, routing.num_dropped
        if self.sharded:
            aux = aux / self.mesh.tp
            counts = int(self.mesh.tp_index == 0)  # every tp rank saw these tokens: one of them counts
            load_E, num_dropped = load_E * counts, num_dropped * counts
        if self.training:
            self.load_E += load_E
        return MoEReport(aux_loss=aux, load_E=load_E, num_dropped=num_dropped)

    def _routed(
        self,
        routing: Routing,
        structure: Structure,
        inputs: tuple[torch.Tensor, ...],
        tokens: Tokens,
        loads: Loads | None = None,
    ) -> torch.Tensor:
        """Dispatch, experts and combine; on one rank with kernels, all of it without a word to the host."""
        experts = self._kernel_experts(inputs)
        all_here = self.dispatcher.group.size == 1 and self.experts.ids == tuple(range(self.num_experts))
        if experts is not None and all_here and not experts.wgrads.deferring:
            sums = tuple(getattr(weight, "main_grad", None) for weight in experts.weights)
            into = None if any(into is None for into in sums) else sums
            given = (inputs[0], routing.scores_TK, routing.expert_ids_TK, *experts.weights)
            return grouped_experts(*given, activation=experts.activation, into=into)
        call = self.prepare(routing, structure, inputs, tokens, loads)
        return DispatchCombine.apply(routing.scores_TK, call, *inputs, *self.experts.weights)

    def _kernel_experts(self, inputs: Sequence[torch.Tensor]) -> Experts | None:
        """The experts, where kernels take them and these rows."""
        if self.gate.config.overflow == "pad" or not isinstance(self.experts, Experts):
            return None
        takes = fits(self.experts, inputs) if self.fused is None else self.fused
        return self.experts if takes else None

    def _pairwise(self, structure: Structure, inputs: Sequence[torch.Tensor]) -> PairwiseExperts:
        like = [tensor.detach()[:0] for tensor in inputs]
        return PairwiseExperts(experts=self.experts, structure=structure, like=like)

    def measure_costs(self) -> Probe:
        """Collective over the ranks of a stage, for rows that are one vector each."""
        return measure(self._pairwise(Structure(), (self.gate.weight,)), self.dispatcher, self.mesh)

    def prepare(
        self,
        routing: Routing,
        structure: Structure,
        inputs: tuple[torch.Tensor, ...],
        tokens: Tokens,
        loads: Loads | None = None,
    ) -> LayerCall:
        """Exchange sizes and decide what runs; no row travels yet."""
        pairwise = self._pairwise(structure, inputs)
        prepared = self.schedule.prepare(
            routing.expert_ids_TK,
            self.dispatcher,
            pairwise,
            self.mesh,
            self.where(tokens),
            self.training,
            loads,
        )
        experts: PairExperts = pairwise
        if self.gate.config.overflow == "pad":
            experts = replace(pairwise, experts=PadToCapacity(self.experts, routing.capacity))
        elif (taken := self._kernel_experts(inputs)) is not None:
            experts = FusedExperts(taken, routing.expert_ids_TK.shape[1])
        return LayerCall(
            plan=prepared.plan,
            programs=prepared.programs,
            experts=experts,
            shadows=prepared.shadows,
            num_inputs=len(inputs),
            watch=self.schedule.watch,
        )


def given_exchange(given: ExchangeConfig | Mapping[str, Any] | None) -> ExchangeConfig:
    return given if isinstance(given, ExchangeConfig) else with_values(ExchangeConfig(), given or {})


def check(
    config: MoEConfig,
    gate: GateConfig,
    mesh: Mesh,
    group: Group,
    placement: Placement | None,
    experts: Callable[[int], nn.Module] | Joint | None = None,
) -> None:
    """All that is wrong with a layer, in one error."""
    problems = [*problems_of(config, "moe."), *problems_of(gate, "gate.")]
    if named_in(" ".join(problems), LAYER_KEYS):
        raise ConfigError(problems)
    problems += layer_problems(config, gate, mesh.tp)
    if placement is not None:
        given, expected = (placement.num_experts, placement.num_ranks), (config.num_experts, group.size)
        if given != expected:
            problems.append(
                f"the placement has {given[0]} experts on {given[1]} ranks, but the layer has {expected[0]} "
                f"experts on {expected[1]} ranks"
            )
        if experts is not None and any(len(ranks) > 1 for ranks in placement.holders):
            problems.append(
                "a placement with replicas needs experts whose initial weights follow from their numbers; "
                "modules of your own may stand on one rank each"
            )
    elif group.size > config.num_experts:
        axes = f"ep ({mesh.ep})" if group.size == mesh.ep else f"ep x tp ({group.size})"
        problems.append(f"{axes} must not exceed num_experts ({config.num_experts})")
    if isinstance(experts, Joint) and group.size > 1 and config.shadow not in ("off", ()):
        problems.append(
            f"moe.shadow ({config.shadow!r}) cannot go with one module for all experts, which cannot "
            "shadow one; set it to 'off', or give a module for each expert"
        )
    if problems:
        raise ConfigError(problems)


class _Shared(torch.autograd.Function):
    """The shared expert: all tokens, one expert, no exchange."""

    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, experts: Experts, *_: nn.Parameter) -> torch.Tensor:
        y_TD, ctx.saved = experts.forward(x_TD, [len(x_TD)])
        ctx.experts = experts
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: torch.Tensor) -> tuple[Any, ...]:
        dx_TD, pending = ctx.experts.dgrad(dy_TD.contiguous(), ctx.saved)
        ctx.saved = None
        return dx_TD, None, *ctx.experts.wgrad([pending])
