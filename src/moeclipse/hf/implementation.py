"""Our kernels inside the models of transformers: `experts_implementation="moeclipse"`.

    moeclipse.hf.register()
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="moeclipse")

transformers routes, we compute: rows, the experts of each and their scores come in, the weighted sum goes
out. Where an activation is not one of ours, the call goes to transformers' own grouped products (in float64,
which these do not have, to the module's own code), so a model is never wrong; `num_experts_layers(model)`
says how many layers really use us. transformers also accepts the name for models that never ask for it
(Llama 4, JetMoe, Doge): these are told when they are made.

With `share_experts` (`hf/share`) the same call exchanges rows over ranks. Adapters of peft's
`target_parameters` arrive inside the weights, as W + B A; on ranks they are refused, because no one would
sum their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedModel
from transformers.integrations import moe as theirs

from moeclipse.core.errors import ConfigError
from moeclipse.core.shown import warn
from moeclipse.hf.foreign_experts import activation_of, is_experts, own_form
from moeclipse.hf.private_torch import asks, goes_beyond, implementation_of, own_forward
from moeclipse.moe.own_loop.standalone import held_layer
from moeclipse.moe.tokens import rows_for
from moeclipse.ops.grouped_experts import grouped_experts

NAME = "moeclipse"
NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
SHARED_ADAPTERS = (
    "experts that are shared out cannot have adapters of peft (target_parameters): each rank would have its "
    "own, and no one to sum them; train them with moeclipse train --lora.rank, or leave the model whole"
)


def register() -> None:
    """Make "moeclipse" a choice of every model; a second call changes nothing."""
    theirs.ExpertsInterface.register(NAME, experts_forward)
    checked: Any = PreTrainedModel.get_correct_experts_implementation
    if getattr(checked, "asked_by", "") != NAME:
        PreTrainedModel.get_correct_experts_implementation = telling(checked)  # type: ignore[method-assign]


def telling(check: Callable[..., str]) -> Callable[..., str]:
    """A check of transformers, called once for each model that is made, that also tells who does not ask."""

    @wraps(check)
    def checked(model: PreTrainedModel, requested: str | None) -> str:
        found = check(model, requested)
        if found == NAME and has_experts(model) and not asks(model):
            warn(
                f"{model.config.model_type}: transformers {transformers.__version__} lets nobody "
                f"choose how experts of this family are computed: experts_implementation={NAME!r} changes "
                "nothing"
            )
        return found

    checked.asked_by = NAME  # type: ignore[attr-defined]
    return checked


def has_experts(model: PreTrainedModel) -> bool:
    """By the number of experts in its configuration, whatever the family calls it."""
    config: Any = model.config
    parts = [config, getattr(config, "ffn_config", None)]
    found = [getattr(part, name, None) for part in parts for name in NUMBERS_OF_EXPERTS]
    return getattr(config, "is_moe", True) and any(isinstance(number, int) and number > 1 for number in found)


def experts_forward(
    experts: nn.Module, x_TD: torch.Tensor, ids_TK: torch.Tensor, scores_TK: torch.Tensor
) -> torch.Tensor:
    """What transformers calls instead of the module's own forward."""
    layer = held_layer(experts)
    if layer is not None:
        if is_parametrized(experts):
            raise ConfigError(SHARED_ADAPTERS)
        shared: Any = layer
        return shared.exchange_rows(x_TD, ids_TK, scores_TK)
    activation = activation_of(experts)
    if activation is None:
        narrow = x_TD.dtype.itemsize < 8
        call = theirs.grouped_mm_experts_forward if narrow else own_forward(experts)
        found: torch.Tensor = call(experts, x_TD, ids_TK, scores_TK)
        return found
    given: Any = experts
    if goes_beyond(experts):  # a number beyond the last stands for no expert
        ids_TK = ids_TK.masked_fill(ids_TK >= given.num_experts, -1)
    weights = own_form(experts)
    rows_TD = rows_for(x_TD, weights[0])
    weights = tuple(weight.to(rows_TD.dtype) for weight in weights)
    if torch.is_autocast_enabled(x_TD.device.type):
        with torch.autocast(x_TD.device.type, enabled=False):
            return grouped_experts(rows_TD, scores_TK, ids_TK, *weights, activation=activation).to(x_TD.dtype)
    return grouped_experts(rows_TD, scores_TK, ids_TK, *weights, activation=activation)


def num_experts_layers(model: nn.Module) -> int:
    """Layers of this model whose experts we compute."""
    return sum(
        is_experts(module) and implementation_of(module) == NAME and activation_of(module) is not None
        for module in model.modules()
    )
