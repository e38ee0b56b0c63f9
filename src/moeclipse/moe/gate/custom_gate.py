"""Any module as a gate: it reads tokens and says which experts they visit.

    class MyGate(nn.Module):
        def forward(self, x_TD: torch.Tensor, tokens: Tokens) -> Routing: ...

    moe = moeclipse.MoE(d_model, d_ff, num_experts, gate=MyGate())

`Routing` (`moe/gate/routing`) names up to K logical experts for each token, -1 for none, and a score for
each; everything behind it is as with our own gates. `tokens` says which of the tokens of all ranks these are,
for gates that draw or count (`moe/tokens`). A module with a `config` that is a GateConfig chooses losses by
it (`balance_loss`, `z_loss`), over `probs_TE` and `logits_TE`; without one there are none.

Contract. A recomputed forward (activation checkpointing) must say the same. `routing_of` makes a Routing
of choices and scores alone.
"""

from __future__ import annotations

import torch
from torch import nn

from moeclipse.core.errors import ConfigError
from moeclipse.moe.config import GateConfig
from moeclipse.moe.experts.weight_init import WeightInit
from moeclipse.moe.gate.gates import Gate
from moeclipse.moe.gate.routing import Routing, count_experts
from moeclipse.moe.tokens import Tokens
from moeclipse.ops.precision import WIDE


def routing_of(
    expert_ids_TK: torch.Tensor,
    scores_TK: torch.Tensor,
    num_experts: int,
    logits_TE: torch.Tensor | None = None,
) -> Routing:
    """Of choices and scores; with logits, losses may be asked for."""
    if logits_TE is None:
        logits_TE = scores_TK.detach().new_zeros(len(scores_TK), num_experts)
    check_numbers(expert_ids_TK, num_experts, "routing_of")
    load_E = count_experts(expert_ids_TK, num_experts)
    return Routing(
        expert_ids_TK=expert_ids_TK,
        scores_TK=scores_TK,
        load_E=load_E,
        probs_TE=logits_TE.softmax(-1),
        logits_TE=logits_TE,
    )


def check_numbers(ids_TK: torch.Tensor, num_experts: int, who: str) -> None:
    """On a CPU alone: elsewhere the host would have to wait, and indices are checked by kernels."""
    if ids_TK.device.type != "cpu" or not ids_TK.numel():
        return
    least, most = (int(end) for end in ids_TK.aminmax())
    if least < -1 or most >= num_experts:
        raise ConfigError(
            f"{who} got expert {least if least < -1 else most} from a gate; experts have the numbers 0 to "
            f"{num_experts - 1}, and -1 is none"
        )


def make_gate(
    given: object,
    config: GateConfig,
    *,
    d_model: int,
    num_experts: int,
    init: WeightInit,
) -> Gate | OwnGate:
    """Ours, as the configuration says, or what was given."""
    if isinstance(given, nn.Module):
        return OwnGate(given, config, d_model=d_model, num_experts=num_experts, init=init)
    return Gate(config, d_model=d_model, num_experts=num_experts, init=init)


class OwnGate(nn.Module):
    """What a layer asks of a gate, of a module that only routes."""

    weight: torch.Tensor
    """Nothing, where the layer is and as wide as its tokens."""
    bias_E: torch.Tensor
    near_E: torch.Tensor | None
    compiles = False

    def __init__(
        self, module: nn.Module, config: GateConfig, *, d_model: int, num_experts: int, init: WeightInit
    ) -> None:
        super().__init__()
        self.config = config
        self.module, self.num_experts = module, num_experts
        self.register_buffer("weight", init.empty(0, d_model), persistent=False)
        bias_E = torch.zeros(num_experts, device=init.device, dtype=WIDE[self.weight.dtype])
        self.register_buffer("bias_E", bias_E, persistent=False)
        self.register_buffer("near_E", None, persistent=False)

    def forward(self, x_TD: torch.Tensor, tokens: Tokens) -> Routing:
        try:
            routing = self.module(x_TD, tokens)
        except Exception as error:
            error.add_note(f"raised by the gate {type(self.module).__name__} that the layer was given")
            raise
        if not isinstance(routing, Routing):
            raise ConfigError(
                f"the gate {type(self.module).__name__} returned {type(routing).__name__}; return a "
                "moeclipse.Routing, or moeclipse.routing_of(expert_ids, scores, num_experts)"
            )
        ids_TK, scores_TK = routing.expert_ids_TK, routing.scores_TK
        if ids_TK.shape != scores_TK.shape or len(ids_TK) != len(x_TD) or ids_TK.dim() != 2:
            raise ConfigError(
                f"the gate {type(self.module).__name__} returned experts of shape {tuple(ids_TK.shape)} and "
                f"scores of shape {tuple(scores_TK.shape)} for {len(x_TD)} tokens; both must be "
                "[tokens, choices]"
            )
        check_numbers(ids_TK, self.num_experts, f"the layer of {type(self.module).__name__}")
        if routing.load_E.shape != (self.num_experts,):
            raise ConfigError(
                f"the gate {type(self.module).__name__} returned loads of shape "
                f"{tuple(routing.load_E.shape)}; the layer has {self.num_experts} experts"
            )
        return routing

    def reset_parameters(self) -> None:
        """Asks the module, where it knows how."""
        reset = getattr(self.module, "reset_parameters", None)
        if callable(reset):
            reset()
        self.bias_E.zero_()

    @property
    def learns(self) -> bool:
        return any(parameter.requires_grad for parameter in self.module.parameters())

    @property
    def adapts(self) -> bool:
        return False

    def take_seen(self) -> torch.Tensor:
        return self.bias_E.new_zeros(3, dtype=torch.int64)

    def rebalance(self, *_: object) -> None:
        """Nothing moves by itself."""
