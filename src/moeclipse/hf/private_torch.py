"""Every private name of transformers that this room uses. All are there in transformers 5.18.

config._experts_implementation
                    which implementation a model chose; there is no public way to ask for it
experts._apply_gate
                    what stands between the two products, where a family has its own
PreTrainedModel._can_set_experts_implementation
                    whether a model asks at all how its experts are to be computed
experts._is_expert_parallel
                    whether numbers of experts may go beyond the last one, for rows of other ranks
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def implementation_of(experts: nn.Module) -> str | None:
    return getattr(getattr(experts, "config", None), "_experts_implementation", None)


def gate_of(experts: nn.Module) -> Callable[..., Any]:
    kind: Any = type(experts)
    found: Callable[..., Any] = kind._apply_gate
    return found


def is_default(gate: Callable[..., Any]) -> bool:
    return gate.__name__ == "_default_apply_gate"


def own_forward(experts: nn.Module) -> Callable[..., Any]:
    """What the module computes where no implementation is chosen."""
    kind: Any = type(experts)
    found: Callable[..., Any] = kind.forward.__wrapped__
    return found


def asks(model: nn.Module) -> bool:
    """Whether a model of transformers asks how its experts are to be computed."""
    return bool(getattr(model, "_can_set_experts_implementation", lambda: False)())


def goes_beyond(experts: nn.Module) -> bool:
    return bool(getattr(experts, "_is_expert_parallel", False))
