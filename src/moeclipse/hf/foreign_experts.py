"""The experts of a transformers model as our calls want them.

transformers keeps the experts of a layer in one module, in one of several forms:

    gate_up_proj [E, 2 F, D], down_proj [E, D, F]      most families; ours to the letter
    gate_up_proj [E, D, 2 F], down_proj [E, F, D]      `is_transposed`
    gate and up in turns                               not `is_concatenated`
    up_proj                                            not `has_gate`
    *_bias [E, width]                                  `has_bias`

and computes an activation of its own between the two products. `own_form` gives the weights in our form, by
operations that autograd knows, so gradients arrive in theirs; where the forms agree nothing is copied.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from moeclipse.hf.private_torch import gate_of, is_default
from moeclipse.ops.activation import LIMIT, SLOPE, Activation

GATED: dict[str, Activation] = {"SiLU": "swiglu", "SiLUActivation": "swiglu", "GELUActivation": "geglu"}
CLAMPED = tuple(f"{name}Experts._apply_gate" for name in ("GptOss", "MiniMaxM3VL", "OpenAIPrivacyFilter"))
"""Gates that are our clamped_swiglu, with these numbers."""
PLAIN: dict[str, Activation] = {"GELUActivation": "gelu", "ReLUSquaredActivation": "relu2"}


def activation_of(experts: nn.Module) -> Activation | None:
    """What stands between the products; None where it is something that we do not compute."""
    given: Any = experts
    if getattr(given, "has_post_expert_norm", False):
        return None
    between = getattr(given, "act_fn", None)
    name = "SiLU" if between is F.silu else type(between).__name__
    if not given.has_gate:
        return PLAIN.get(name)
    if is_default(gate_of(given)):
        approximate = getattr(given.act_fn, "approximate", "none") != "none"
        return None if approximate else GATED.get(name)
    numbers = tuple(getattr(given, name, getattr(given, f"swiglu_{name}", 0)) for name in ("alpha", "limit"))
    # not by the class itself: peft's parametrizations give a module one of their own
    alike = gate_of(given).__qualname__ in CLAMPED and numbers == (SLOPE, LIMIT)
    return "clamped_swiglu" if alike else None


def parameter_names(experts: nn.Module) -> list[str]:
    """(up, down), or (up, down, up bias, down bias)."""
    given: Any = experts
    up = "gate_up_proj" if given.has_gate else "up_proj"
    return [up, "down_proj", *((f"{up}_bias", "down_proj_bias") if given.has_bias else ())]


def own_form(experts: nn.Module) -> tuple[torch.Tensor, ...]:
    """Their weights as `moe/experts/two_projections` has them."""
    given: Any = experts
    up, down, *biases = (getattr(given, name) for name in parameter_names(experts))
    if given.is_transposed:
        up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    if given.has_gate and not given.is_concatenated:
        up = apart(up)
        biases = [apart(biases[0]), biases[1]] if biases else []
    return (up, down, *biases)


def apart(rows_EH: torch.Tensor) -> torch.Tensor:
    """[gate, up] of rows that take turns."""
    return rows_EH.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def is_experts(module: nn.Module) -> bool:
    """Whether transformers lets this module's implementation be chosen."""
    marks = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts")
    return all(hasattr(module, name) for name in marks)
