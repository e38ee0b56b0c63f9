"""Expert parallelism for a transformers model: each rank keeps its experts, and rows travel to them.

    moeclipse.hf.register()
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="moeclipse")
    moeclipse.hf.share_experts(model, mesh, exchange={"schedule": "smart"})

The model stays theirs: names, routers, losses and the order of its parts. Its experts hold this rank's slices
under the names that they had, so optimizers and `state_dict` see what they saw, but for their first
dimension; DDP leaves them alone. All functions for loops of one's own take such a model
(`moe/own_loop/standalone`): `parallelize`, `sync_gradients`, `clip_grad_norm_`, `overlap`, `full_state_dict`.
The router's loss is transformers' own.

Contract. All ranks share out models with the same weights, and call them equally often. Hazard: plain
`model.save_pretrained` cannot gather, and says so; use `save_pretrained` here, on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from moeclipse.balance.placement import Placement
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.hf.foreign_experts import activation_of, is_experts, own_form, parameter_names
from moeclipse.hf.implementation import NAME, SHARED_ADAPTERS
from moeclipse.hf.private_torch import implementation_of
from moeclipse.moe.config import ExchangeConfig, GateConfig, MoEConfig
from moeclipse.moe.experts.two_projections import Experts
from moeclipse.moe.gate.routing import Routing, count_experts
from moeclipse.moe.layer import MoE
from moeclipse.moe.losses import Calls, MoEReport, UnreadLosses
from moeclipse.moe.own_loop.full_state import full_state_dict
from moeclipse.moe.own_loop.guards import refuse_wrong_wrap, wrapping
from moeclipse.moe.own_loop.shards import ExpertPlace, load_shards, save_shards, trust_shards
from moeclipse.moe.own_loop.standalone import exclude_experts, held_layer, hold_layer, moe_layers
from moeclipse.moe.tokens import Tokens
from moeclipse.moe.validate import expert_group, given_exchange
from moeclipse.ops.activation import Activation
from moeclipse.ops.expert_passes import NAMES
from moeclipse.ops.precision import WIDE
from moeclipse.tensor.weight_grad import WeightGrads


def share_experts(
    model: nn.Module, mesh: Mesh, *, exchange: ExchangeConfig | Mapping[str, Any] | None = None
) -> nn.Module:
    """The model, of whose experts this rank keeps its part; nothing on a mesh with one rank. Collective."""
    found = [(name, module) for name, module in model.named_modules() if is_experts(module)]
    problems = [
        f"{name} ({type(module).__name__}) computes an activation that we do not have; leave the model whole"
        for name, module in found
        if activation_of(module) is None
    ]
    if not found:
        problems.append(f"{type(model).__name__} has no experts whose implementation can be chosen")
    if any(implementation_of(module) != NAME for _, module in found):
        problems.append(
            'the model must use our experts: moeclipse.hf.register(), then experts_implementation="moeclipse"'
        )
    if any("experts" in name and "lora_A" in name for name, _ in model.named_modules()):
        problems.append(SHARED_ADAPTERS)
    if problems:
        raise ConfigError(problems)
    if mesh.num_ranks > 1:
        for number, (_, module) in enumerate(found):
            hold_layer(module, ForeignLayer(module, mesh, number, given_exchange(exchange)))
        exclude_experts(model)  # whoever wraps the model in DDP, a Trainer or accelerate, asks nobody
    return model


def save_pretrained(model: nn.Module, folder: str | Path, **options: Any) -> None:
    """As the model's own, with all experts; rank 0 writes. Collective."""
    given: Any = model
    inner = given.module if hasattr(given, "module") and not hasattr(given, "save_pretrained") else given
    state = full_state_dict(inner)
    layers = [layer for _, layer in moe_layers(inner)]
    if not layers or layers[0].mesh.rank == 0:
        inner.save_pretrained(folder, state_dict=state, **options)
    if layers:
        layers[0].mesh.barrier()


class ForeignExperts(Experts):
    """The weights of a transformers module in the calls of ours. It has no parameters of its own."""

    def __init__(
        self, module: nn.Module, ids: tuple[int, ...], num_experts: int, activation: Activation
    ) -> None:
        nn.Module.__init__(self)
        trust_shards()
        object.__setattr__(self, "module", module)  # not a submodule: the model has it already
        self.ids, self.num_experts, self.activation = ids, num_experts, activation
        self.kernels, self.wgrads = True, WeightGrads()

    module: nn.Module
    num_experts: int

    @property
    def weights(self) -> Any:
        return own_form(self.module)

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES[: len(self.weights)]

    @property
    def up(self) -> Any:  # type: ignore[override]
        return self.weights[0]

    @property
    def down(self) -> Any:  # type: ignore[override]
        return self.weights[1]

    @property
    def places(self) -> dict[str, ExpertPlace]:
        place = ExpertPlace(experts=self.ids, num_experts=self.num_experts)
        return dict.fromkeys(parameter_names(self.module), place)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the module, by its names."""
        return self.module.named_parameters()

    def parameters(self, *_: Any, **__: Any) -> Iterator[nn.Parameter]:
        return self.module.parameters()


class RoutedElsewhere(nn.Module):
    """Stands for a gate where transformers routes: what the functions for loops of one's own ask of one."""

    adapts, near_E, compiles = False, None, False
    bias_E: torch.Tensor
    weight: torch.Tensor

    def __init__(self, like: torch.Tensor, num_experts: int) -> None:
        super().__init__()
        self.config = GateConfig(top_k=min(2, num_experts), balance_loss=0.0)
        self.register_buffer("weight", like.detach().new_empty(0), persistent=False)
        bias_E = like.new_zeros(num_experts, dtype=WIDE[like.dtype])
        self.register_buffer("bias_E", bias_E, persistent=False)

    def take_seen(self) -> torch.Tensor:
        return self.bias_E.new_zeros(3, dtype=torch.int64)


class ForeignLayer(MoE):
    """One layer's experts of a transformers model, shared out over a mesh."""

    def __init__(self, module: nn.Module, mesh: Mesh, number: int, exchange: ExchangeConfig) -> None:
        nn.Module.__init__(self)
        first, *_ = (getattr(module, name) for name in parameter_names(module))
        num_experts, activation = len(first), activation_of(module)
        assert activation is not None
        object.__setattr__(self, "module", module)
        self.config = MoEConfig(num_experts=num_experts, **vars(exchange))
        self.layer, self.num_experts = number, num_experts
        group = expert_group(mesh, self.config)
        if group.size > num_experts:
            raise ConfigError(f"ep x tp ({group.size}) must not exceed the {num_experts} experts of a layer")
        placement = Placement.contiguous(num_experts, group.size)
        ids = placement.slots[group.index]
        for name in parameter_names(module):
            whole = getattr(module, name)
            setattr(module, name, nn.Parameter(whole.detach()[list(ids)].clone(), whole.requires_grad))
        gate: Any = RoutedElsewhere(first, num_experts)
        self.gate, self.shared = gate, None
        self.experts = ForeignExperts(module, ids, num_experts, activation)
        self.fused = False if self.config.kernels == "off" else None
        load_E = torch.zeros(num_experts, dtype=torch.int64, device=first.device)
        self.register_buffer("load_E", load_E, persistent=False)
        self.history, self.unread = Calls(), UnreadLosses()
        module.register_state_dict_post_hook(_say)
        module.register_load_state_dict_pre_hook(_take)
        self.attach(mesh, placement)

    module: nn.Module

    def exchange_rows(
        self, x_TD: torch.Tensor, ids_TK: torch.Tensor, scores_TK: torch.Tensor
    ) -> torch.Tensor:
        """Their rows to the experts that they chose, and the weighted sums back, in the type of x."""
        if torch.compiler.is_compiling():
            outside = cast(Callable[..., torch.Tensor], torch.compiler.disable(self.exchange_rows))
            return outside(x_TD, ids_TK, scores_TK)
        if (now := wrapping(self.module)) != self._wrapping:
            refuse_wrong_wrap(self.module)
            self._wrapping = now
        self.training = self.module.training
        call, again = self.history.begin() if self.training else (None, False)
        load_E = count_experts(ids_TK, self.num_experts)
        nothing = scores_TK.detach().new_empty(0, self.num_experts)
        routing = Routing(
            expert_ids_TK=ids_TK, scores_TK=scores_TK, load_E=load_E, probs_TE=nothing, logits_TE=nothing
        )
        tokens = Tokens(mesh=self.mesh, first=0, total=len(x_TD), step=0 if call is None else call.step)
        y_TD = self.apply_experts(routing, x_TD, tokens, None, call)
        if not again:
            no_loss = x_TD.detach().new_zeros(())
            self.last = MoEReport(aux_loss=no_loss, load_E=load_E, num_dropped=load_E.new_zeros(()))
            if self.training:
                self.load_E += load_E
        return y_TD.to(x_TD.dtype)


def _say(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    save_shards(state_dict, prefix, _places(module))


def _take(module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    errors: list[str] = others[-1]
    errors += load_shards(state_dict, prefix, _places(module))


def _places(module: nn.Module) -> dict[str, ExpertPlace]:
    layer = held_layer(module)
    return layer.experts.places if layer is not None and isinstance(layer.experts, Experts) else {}
