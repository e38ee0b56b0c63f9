"""Our kernels inside the models of transformers: `experts_implementation="moeclipse"`.

    moeclipse.hf.register()
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="moeclipse")

transformers routes, we compute: rows, the experts of each and their scores come in, the weighted sum goes
out. Where an activation is not one of ours, the call goes to transformers' own grouped products, so a model
is never wrong; `num_experts_layers(model)` says how many layers really use us, because transformers accepts a
name for models that never ask for it.

With `share_experts` (`hf/share`) the same call exchanges rows over ranks. Adapters of peft's
`target_parameters` arrive inside the weights, as W + B A; on ranks they are refused, because no one would
sum their gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from transformers.integrations import moe as theirs

from moeclipse.core.errors import ConfigError
from moeclipse.hf.foreign_experts import activation_of, is_experts, own_form
from moeclipse.hf.private_torch import goes_beyond, implementation_of
from moeclipse.moe.experts.autocast import is_on, off, rows_for
from moeclipse.moe.own_loop.standalone import held_layer
from moeclipse.ops.grouped_experts import grouped_experts

NAME = "moeclipse"
SHARED_ADAPTERS = (
    "experts that are shared out cannot have adapters of peft (target_parameters): each rank would have its "
    "own, and no one to sum them; train them with moeclipse train --lora.rank, or leave the model whole"
)


def register() -> None:
    """Make "moeclipse" a choice of every model; a second call changes nothing."""
    theirs.ExpertsInterface.register(NAME, experts_forward)


def experts_forward(
    experts: nn.Module, x_TD: torch.Tensor, ids_TK: torch.Tensor, scores_TK: torch.Tensor
) -> torch.Tensor:
    """What transformers calls instead of the module's own forward."""
    layer = held_layer(experts)
    if layer is not None:
        if is_parametrized(experts):
            raise ConfigError(SHARED_ADAPTERS)
        call: Any = layer
        return call.exchange_rows(x_TD, ids_TK, scores_TK)
    activation = activation_of(experts)
    if activation is None:
        found: torch.Tensor = theirs.grouped_mm_experts_forward(experts, x_TD, ids_TK, scores_TK)
        return found
    given: Any = experts
    if goes_beyond(experts):  # a number beyond the last stands for no expert
        ids_TK = ids_TK.masked_fill(ids_TK >= given.num_experts, -1)
    weights = own_form(experts)
    rows_TD = rows_for(x_TD, weights[0])
    weights = tuple(weight.to(rows_TD.dtype) for weight in weights)
    if is_on(x_TD.device):
        with off(x_TD.device):
            return grouped_experts(rows_TD, scores_TK, ids_TK, *weights, activation=activation).to(x_TD.dtype)
    return grouped_experts(rows_TD, scores_TK, ids_TK, *weights, activation=activation)


def num_experts_layers(model: nn.Module) -> int:
    """Layers of this model whose experts we compute."""
    return sum(
        is_experts(module) and implementation_of(module) == NAME and activation_of(module) is not None
        for module in model.modules()
    )
