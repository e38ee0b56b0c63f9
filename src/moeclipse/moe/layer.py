"""The Mixture-of-Experts layer, a drop-in `nn.Module`.

    moe = moeclipse.MoE(d_model=512, d_ff=1024, num_experts=8, top_k=2)        # one rank, nothing to set up
    y = moe(x)                                                                 # any leading dimensions
    loss = task_loss + moeclipse.aux_loss(model)

With `exchange={"schedule": "smart"}` the rows travel in units, and the experts compute one while others
travel; "blocking" sends all, then computes all, then returns all. Both give the same gradients.

On several ranks give it a mesh: `MoE(..., mesh=Mesh.of_world(ep=4))`. Expert parameters then differ by rank:
keep them out of DDP (`DDP(exclude_experts(model))`), and call `sync_gradients(model)` before optimizer steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn

from moeclipse.balance.placement import Placement
from moeclipse.comm.async_ops.lane import Ready, gather
from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.reduce.token_gather import TokenGather
from moeclipse.comm.transports.open import open_wire
from moeclipse.core.errors import ConfigError
from moeclipse.moe.config import MoEConfig
from moeclipse.moe.exchange.dispatch import Dispatcher
from moeclipse.moe.exchange.dispatch_combine import DispatchCombine, LayerCall
from moeclipse.moe.exchange.dispatch_interleaved import dispatch_in_turns
from moeclipse.moe.exchange.gathered import visit_gathered
from moeclipse.moe.exchange.plan import plan_call, shadows_of
from moeclipse.moe.experts.fused import FusedExperts, fits, visit_all
from moeclipse.moe.experts.module_experts import Joint, ModuleExperts
from moeclipse.moe.experts.pairwise import PairwiseExperts, visit_local
from moeclipse.moe.experts.protocols import PairExperts
from moeclipse.moe.experts.served import with_guests
from moeclipse.moe.experts.shared import shared_expert, shared_of, visit_traced
from moeclipse.moe.experts.two_projections import Experts, PadToCapacity
from moeclipse.moe.experts.weight_init import WeightInit
from moeclipse.moe.gate.custom_gate import OwnGate, make_gate
from moeclipse.moe.gate.gates import Gate
from moeclipse.moe.gate.node_limit import near_experts
from moeclipse.moe.gate.routing import Routing
from moeclipse.moe.losses import Call, Calls, MoEReport, UnreadLosses, defer_loss, replay_loss, report_on
from moeclipse.moe.own_loop.guards import (
    gradients_of,
    name_layer,
    refuse_transforms,
    refuse_wrong_wrap,
    unattached_text,
    wrapping,
    wrong_width_text,
)
from moeclipse.moe.own_loop.microbatch_threads import Turns
from moeclipse.moe.own_loop.optimizer_state import watch_optimizers
from moeclipse.moe.private_torch import NO_BACKWARD, running_backward, transforming
from moeclipse.moe.tokens import AskedTokens, Inputs, Loads, Piggyback, Structure, Tokens, leave_out, rows_for
from moeclipse.moe.tune.exchange_policy import ExchangeSchedule
from moeclipse.moe.tune.probe import Probe, measure
from moeclipse.moe.validate import (
    TOP_K,
    GivenExchange,
    GivenGate,
    GivenMesh,
    alike,
    alone,
    check,
    check_place,
    check_types,
    expert_group,
    given_device,
    given_exchange,
    given_gate,
    given_mesh,
    is_sharded,
    settled,
)
from moeclipse.ops.activation import Activation


class MoE(nn.Module):
    def __init__(
        self,
        d_model: int,
        d_ff: int,
        num_experts: int,
        top_k: int = TOP_K,
        *,
        gate: GivenGate | None = None,
        num_shared_experts: int = 0,
        shared_d_ff: int = 0,
        shared_gate: bool = False,
        activation: Activation = "swiglu",
        expert_bias: bool = False,
        score_input: bool = False,
        experts: Callable[[int], nn.Module] | Joint | None = None,
        d_out: int | None = None,
        exchange: GivenExchange | None = None,
        expert_tp: Literal["folded", "sharded"] = "folded",
        mesh: GivenMesh | None = None,
        placement: Placement | None = None,
        layer: int = 0,
        seed: int = 0,
        init_std: float = 0.02,
        down_std: float | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`gate`: how ours chooses (a name, a dict, a GateConfig), or a module (`moe/gate/custom_gate`).

        `exchange`: how rows travel, likewise. `mesh`: ours, or a DeviceMesh with axes pp, dp, ep, tp.
        `placement`: which rank holds which experts; left out: equal parts.
        """
        super().__init__()
        check_types(d_model=d_model, d_ff=d_ff, num_experts=num_experts, d_out=d_out, gate=gate, mesh=mesh)
        check_types(exchange=exchange, placement=placement, dtype=dtype, init_std=init_std, down_std=down_std)
        mesh, choice = given_mesh(mesh), given_gate(gate, top_k)
        style: dict[str, Any] = {"activation": activation, "expert_bias": expert_bias, "expert_tp": expert_tp}
        style |= {"num_shared_experts": num_shared_experts, "shared_d_ff": shared_d_ff}
        style |= {"shared_gate": shared_gate, "score_input": score_input}
        config = MoEConfig(num_experts=num_experts, d_ff=d_ff, **style, **vars(given_exchange(exchange)))
        device = given_device(device, mesh)
        mesh = mesh or alone(device)
        self.config, self.layer, self.num_experts = settled(config, choice), layer, num_experts
        group = expert_group(mesh, config)
        check(config, choice, mesh, group, placement, experts)
        init = WeightInit(layer=layer, seed=seed, std=init_std, down_std=down_std, device=device, dtype=dtype)
        self.gate = make_gate(gate, choice, d_model=d_model, num_experts=num_experts, init=init)
        placement = placement or Placement.contiguous(num_experts, group.size)
        shard = (mesh.tp_index, mesh.tp) if is_sharded(mesh, config) else (0, 1)
        common: dict[str, Any] = {"d_model": d_model, "activation": activation, "bias": expert_bias}
        build: Callable[..., Experts] = partial(Experts, init=init, shard=shard, **common)
        ids = placement.slots[group.index]
        own = None if experts is None else ModuleExperts(ids, experts, d_out or d_model, num_experts)
        given: dict[str, Any] = {"kernels": config.kernels != "off", "num_experts": num_experts}
        self.experts: Experts | ModuleExperts = own or build(ids, d_ff=d_ff, **given)
        self.shared = shared_of(config, build, init)
        self.fused: bool | None = False if config.kernels == "off" else None  # None: where the kernels fit
        self.register_buffer("load_E", torch.zeros(num_experts, dtype=torch.int64, device=device), False)
        self.history, self.unread = Calls(), UnreadLosses()
        self.attach(mesh, placement)

    gate: Gate | OwnGate
    load_E: torch.Tensor
    """Tokens of this rank that wanted each expert since the last optimizer step."""
    last: MoEReport | None = None
    """Of the last forward."""
    turns: Turns | None = None
    """While `moeclipse.overlap` runs: who lets other microbatches go on."""
    _placement: Placement
    _wrapping: tuple[int, int] | None = None
    """Of the last forward: what wrappers do with a layer is looked at once."""

    def attach(self, mesh: Mesh, placement: Placement | None = None) -> None:
        """Exchange rows over this mesh from now on; collective over its ranks.

        A layer that was unpickled has none: `moeclipse.attach` gives it one with as many ranks as it had.
        """
        placement = placement or self._placement
        group = expert_group(mesh, self.config)
        check_place(placement, group, self.experts.ids)
        self.mesh, self.sharded, self._placement = mesh, is_sharded(mesh, self.config), placement
        device = self.gate.weight.device
        self.gate.near_E = near_experts(mesh, group, placement, device, sharded=self.sharded)
        transport = open_wire(self.config.transport, mesh, group)
        tables = mesh.device if device.type == "meta" else device
        self.dispatcher = Dispatcher.of(placement, group, mesh.a2a, tables, transport)
        self.schedule = ExchangeSchedule(self.config, tuple(mesh.hosts[rank] for rank in group.ranks))
        name_layer(self)
        if isinstance(self.experts, Experts) and mesh.num_ranks > 1:
            watch_optimizers(mesh, self.experts)

    def move_to(self, placement: Placement, expected_E: np.ndarray | None = None) -> None:
        """Route rows by another placement from now on; whoever calls this has moved the weights."""
        self.dispatcher = self.dispatcher.moved(placement, expected_E)
        self._placement = placement
        group = self.dispatcher.group
        self.experts.ids = placement.slots[group.index]
        device = self.gate.weight.device
        self.gate.near_E = near_experts(self.mesh, group, placement, device, sharded=self.sharded)

    def __getstate__(self) -> dict[str, object]:
        """Everything but what belongs to running processes; and the last report, whose loss has a graph."""
        state = dict(self.__dict__)
        for name in ("mesh", "dispatcher", "schedule", "last", "turns", "_wrapping", "gradients"):
            state.pop(name, None)
        return state | {"history": Calls(), "unread": UnreadLosses()}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        if self._placement.num_ranks == 1:
            self.attach(alone(self.gate.weight.device))

    def __deepcopy__(self, memo: dict[int, object]) -> MoE:
        """On the same ranks; a copy knows nothing of calls that the layer has under way."""
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        nn.Module.__setstate__(made, copy.deepcopy(self.__getstate__(), memo))
        if "mesh" in self.__dict__:
            made.attach(self.mesh)
        return made

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> MoE:
        super()._apply(fn, recurse)
        device = self.gate.weight.device
        if "mesh" in self.__dict__ and self.mesh.num_ranks == 1 and not alike(device, self.mesh.device):
            self.attach(alone(device))
        return self

    def extra_repr(self) -> str:
        config, gate = self.config, self.gate.config if isinstance(self.gate, Gate) else None
        sizes = f"d_model={self.gate.weight.shape[1]}, d_ff={config.d_ff}, num_experts={self.num_experts}"
        chosen = "" if gate is None else f", gate={gate.kind!r}, top_k={gate.top_k}"
        shared = f", num_shared_experts={config.num_shared_experts}" if config.num_shared_experts else ""
        held = "" if self._placement.num_ranks == 1 else f", here experts {list(self.experts.ids)}"
        return f"{sizes}{chosen}, activation={config.activation!r}{shared}{held}"

    def reset_parameters(self) -> None:
        """Weights and counters as they were when the layer was made; after `to_empty`, all of them."""
        for module in (self.gate, self.experts, self.shared):
            if module is not None:
                module.reset_parameters()
        self.load_E.zero_()
        if self.gate.near_E is not None:
            self.attach(self.mesh)

    def forward(self, x: Inputs, mask: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor [..., d_model], or a tuple or dict of tensors of which the first is [tokens, d_model].

        `mask`: one boolean for each token; those without take no part and get zeros.
        """
        if mask is not None:
            return leave_out(self.forward, x, mask)
        if not isinstance(x, torch.Tensor):
            return self._compiled(x) if torch.compiler.is_compiling() else self._eager(x)
        x_TD = x if x.dim() == 2 else Structure.as_tokens(x)
        y_TO = self._compiled(x_TD) if torch.compiler.is_compiling() else self._eager(x_TD)
        return y_TO.view(*x.shape[:-1], y_TO.shape[-1])

    def _eager(self, x: Inputs) -> torch.Tensor:
        """Which tokens these are of all ranks, and what activation checkpointing repeats, are found here."""
        if "mesh" not in self.__dict__:
            raise ConfigError(unattached_text(self._placement.num_ranks))
        if transforming():
            refuse_transforms()
        if self.mesh.num_ranks > 1:
            self._look_at_wrappers()
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            rows_TD = Structure.take_apart(x)[1][0]
        else:
            rows_TD = x
        if rows_TD.shape[1] != self.gate.weight.shape[1]:
            raise ConfigError(wrong_width_text(tuple(rows_TD.shape), self.gate.weight.shape[1]))
        num_tokens = len(rows_TD)
        call, again = self.history.begin() if self.training else (None, False)
        step = self.history.count if call is None else call.step
        group, message = self.token_group, Piggyback() if self._sends_with_sizes else None
        if message is None:
            tokens = Tokens.of(self.mesh, num_tokens, step=step, group=group)
        else:
            tokens = AskedTokens.asked(self.mesh, message.tokens, step, 0, group)
        y_TO, report = self.run(x, tokens, call, message=message)
        if call is not None and call.deferred and again:
            return replay_loss(y_TO, report.aux_loss, call)
        if call is not None and not again and not torch.is_grad_enabled() and self.gate.learns:
            report = replace(report, aux_loss=defer_loss(report.aux_loss, call))
        if not again:
            self.last = report
            self.unread.add(report.aux_loss, y_TO)
        return y_TO

    def _look_at_wrappers(self) -> None:
        """What wrappers and optimizers of others do with weights that differ from rank to rank."""
        if (now := wrapping(self.experts)) != self._wrapping:
            refuse_wrong_wrap(self.experts)
            self._wrapping = now
        if self.training and torch.is_grad_enabled():
            gradients_of(self).before_forward()

    def _compiled(self, x: Inputs) -> torch.Tensor:
        """Inside `torch.compile`: on one rank with the built-in experts a graph without a break."""
        experts, traced = self.experts, self.mesh.num_ranks == 1 and self.gate.compiles
        traced = traced and not self.config.score_input and not getattr(experts, "frozen", False)
        if not (traced and isinstance(x, torch.Tensor) and isinstance(experts, Experts)):
            eager = cast(Callable[[Inputs], torch.Tensor], torch.compiler.disable(self._eager))
            return eager(x)
        tokens = Tokens(mesh=self.mesh, first=0, total=len(x), group=self.mesh.stage)
        routing = self.gate(x, tokens)
        self.last = report_on(routing, routing.load_E, tokens.total, self.gate.config)
        if self.training:
            self.load_E += routing.load_E
        return visit_traced(x, routing, experts, self.shared)

    @property
    def token_group(self) -> Group:
        """The ranks that have different tokens."""
        return self.mesh.data if self.sharded else self.mesh.stage

    @property
    def _sends_with_sizes(self) -> bool:
        """Whether loads and token counts go into the exchange of sizes.

        Where the same ranks share experts and tokens, and nobody asks before: a gate of one's own may.
        """
        if self.mesh.device.type != "cpu" or self.dispatcher.holds_all or self.gathers:
            return False
        alike = self.dispatcher.group.ranks == self.token_group.ranks
        late = isinstance(self.gate, Gate) and self.gate.compiles and self.dispatcher.table is None
        return alike and late

    def run(
        self,
        x: Inputs,
        tokens: Tokens,
        call: Call | None = None,
        *,
        routing: Routing | None = None,
        message: Piggyback | None = None,
        output: bool = True,
    ) -> tuple[torch.Tensor, MoEReport]:
        """Gate, plan, dispatch, experts, combine, report, on this rank's part of a global microbatch.

        `routing`: where the gate has been asked already. `message`: what takes loads along with the sizes of
        the exchange. Without `output` nobody reads it: experts that are here compute what gradients need.
        Where experts are sharded over tp, all tp ranks get the same tokens, and output, gradients and losses
        are shares: their sums over tp are the layer's.
        """
        rows_TD = x if isinstance(x, torch.Tensor) else Structure.take_apart(x)[1][0]
        chosen: Routing = self.gate(rows_TD, tokens) if routing is None else routing
        loads: Loads | None = None
        if message is not None:
            loads = message.loads(chosen.load_E, len(chosen.expert_ids_TK), tokens.group)
        elif tokens.group.size > 1:
            loads = self.gather_loads([chosen], tokens)
        y_TO = self.apply_experts(chosen, x, tokens, loads, call, output=output)
        return y_TO, self.report(chosen, chosen.load_E if loads is None else loads.total(), tokens)

    def apply_experts(
        self,
        routing: Routing,
        x: Inputs,
        tokens: Tokens,
        loads: Loads | None = None,
        call: Call | None = None,
        *,
        output: bool = True,
    ) -> torch.Tensor:
        """Those that the gate chose, and those that all tokens share.

        The former here, where all of them are; over all tokens of all ranks; or by a plan that sends rows.
        """
        built_in = isinstance(self.experts, Experts)
        narrow: Any = self.experts if built_in else self.shared
        like = None if narrow is None else narrow.like
        structure, inputs = Structure.take_apart(x)
        rows_TD = inputs[0] if like is None else rows_for(inputs[0], like)
        inputs = (rows_TD, *inputs[1:]) if built_in else inputs
        device = rows_TD.device.type
        cast = built_in and torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=False) if cast else nullcontext():
            if self.all_here:
                y_TO = self._apply_here(routing, inputs, structure, output)
            elif self.gathers and self.training:
                here = partial(self._apply_here, structure=structure, output=output)
                where = self.where(tokens)
                y_TO = visit_gathered(here, routing, inputs, self.wire(), self.dispatcher, tokens, where)
            else:
                turns, given = self.turns, (routing, structure, inputs, tokens, loads, call)
                plan = self.plan(*given, on_device=turns is None, whole=turns is None)
                if turns is not None and turns.taken:
                    y_TO = dispatch_in_turns(turns, routing.scores_TK, plan, inputs, self.experts.weights)
                else:
                    y_TO = DispatchCombine.apply(routing.scores_TK, plan, *inputs, *self.experts.weights)
            return y_TO if self.shared is None else y_TO + shared_expert(rows_TD, self.shared, output)

    def _apply_here(
        self, routing: Routing, inputs: tuple[torch.Tensor, ...], structure: Structure, output: bool = True
    ) -> torch.Tensor:
        """By kernels without a device-to-host copy, or by plain torch."""
        experts = self._kernel_experts(inputs)
        if experts is not None and not experts.wgrads.deferring:
            given = (inputs[0], routing.scores_TK, routing.expert_ids_TK)
            return visit_all(experts, *given, sums=True, output=output)
        pairwise = self._pairwise(structure, inputs, routing.capacity)
        return visit_local(routing.scores_TK, routing.expert_ids_TK, pairwise, inputs)

    def gather_loads(self, routings: Sequence[Routing], tokens: Tokens) -> Loads:
        """Those of the whole microbatch, on their way; `routings` are those of this rank's tokens."""
        load_E = sum((routing.load_E for routing in routings[1:]), start=routings[0].load_E)
        label = f"sum of expert loads, {self.where(tokens)}"
        if self.gathers:  # in a graph, by what all else in it goes over
            parts = self.wire(tokens.group).gather(load_E[None].to(torch.int32), label)
            return Loads(Ready(parts.to(load_E.dtype)), tokens.group)
        return Loads(gather(self.mesh.a2a, tokens.group, load_E, label), tokens.group)

    def where(self, tokens: Tokens) -> str:
        return f"layer {self.layer}, microbatch {tokens.microbatch}"

    def report(self, routing: Routing, global_load_E: torch.Tensor, tokens: Tokens) -> MoEReport:
        """Losses and counts of one call; in training the counts are added up until the optimizer step."""
        tp = (self.mesh.tp_index, self.mesh.tp) if self.sharded else (0, 1)
        report = report_on(routing, global_load_E, tokens.total, self.gate.config, tp)
        if self.training and running_backward() == NO_BACKWARD:  # inside of one it has been counted before
            self.load_E += report.load_E
        return report

    def plan(
        self,
        routing: Routing,
        structure: Structure,
        inputs: tuple[torch.Tensor, ...],
        tokens: Tokens,
        loads: Loads | None = None,
        call: Call | None = None,
        on_device: bool = False,
        whole: bool = False,
    ) -> LayerCall:
        """Who sends what to whom, in which order, with which shadows; sizes travel and no row does.

        `on_device`: kernels plan, on all ranks. `whole`: no pipeline cuts the call into pieces.
        """
        policy, dispatcher, where = self.schedule, self.dispatcher, self.where(tokens)
        pairwise, taken = self._pairwise(structure, inputs), self._kernel_experts(inputs)
        padded = self._pairwise(structure, inputs, routing.capacity) if routing.capacity else pairwise
        known = None if call is None else call.decided
        learns = self.training and known is None and running_backward() == NO_BACKWARD
        given = (routing, dispatcher, pairwise, self.mesh, where)
        decide = partial(policy.decide, *given, plain=padded if whole else None)
        agreed = (routing, dispatcher, where)
        asked: dict[str, Any] = {"known": known, "learns": learns, "loads": loads, "on_device": on_device}
        decision, plan, staying = plan_call(policy, decide, agreed, **asked)
        if call is not None:
            call.decided = decision.decided
        top_k = routing.expert_ids_TK.shape[1]
        computes: PairExperts = padded if taken is None else FusedExperts(taken, top_k)
        if decision.guests is not None:
            pairwise, computes = with_guests(padded, computes, dispatcher)
        return LayerCall(
            plan=plan,
            programs=decision.programs,
            experts=computes,
            out_width=self.experts.out_width,
            shadows=shadows_of(decision, staying, pairwise, dispatcher, where) if decision.shadows else None,
            num_inputs=len(inputs),
            watch=decision.watch,
        )

    def wire(self, group: Group | None = None) -> TokenGather:
        """What a gathered exchange goes over."""
        return TokenGather.of(self.mesh, group or self.dispatcher.group, self.config.transport)

    @property
    def gathers(self) -> bool:
        """Whether training has all tokens of the group on every rank; replicas are shared out by sizes."""
        return self.config.schedule == "gathered" and not self.all_here and self.dispatcher.table is None

    @property
    def all_here(self) -> bool:
        return self.dispatcher.holds_all

    @property
    def runs_on_device(self) -> bool:
        """Whether a call has no device-to-host sync: no sizes to tell, kernels, a gate that draws nothing."""
        experts = self.experts
        by_kernels = isinstance(experts, Experts) and self._kernel_experts([experts.like]) is not None
        return by_kernels and (self.all_here or self.gathers) and self.gate.compiles

    def _kernel_experts(self, inputs: Sequence[torch.Tensor]) -> Experts | None:
        """The experts, where kernels take them and these rows."""
        plain = self.gate.config.overflow == "pad" or self.config.score_input
        if plain or not isinstance(self.experts, Experts):
            return None
        takes = inputs[0].is_cuda and fits(self.experts, inputs) if self.fused is None else self.fused
        return self.experts if takes else None

    def _pairwise(
        self, structure: Structure, inputs: Sequence[torch.Tensor], capacity: int = 0
    ) -> PairwiseExperts:
        """`capacity`: of a gate that fills its experts up to it."""
        pads = capacity and self.gate.config.overflow == "pad"
        own: Any = self.experts
        experts = PadToCapacity(own, capacity) if pads else own
        like = [tensor.new_empty((0, *tensor.shape[1:])) for tensor in inputs]  # a slice would keep the rows
        return PairwiseExperts(
            experts=experts, structure=structure, like=like, score_input=self.config.score_input
        )

    def measure_costs(self, prices: Callable[..., Probe] = measure) -> Probe:
        """Collective over the ranks of a stage, for rows that are one vector each."""
        return prices(self._pairwise(Structure(), (self.gate.weight,)), self.dispatcher, self.mesh)
