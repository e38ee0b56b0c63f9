"""What a layer takes: tokens with one tensor each or several, in the type that it computes in, some left out.

tensors   alone, or a tuple or dict of them that travel together. All have one row for each token, and the
          first is what the gate reads. Integers and booleans travel too, but carry no gradient.
types     under `torch.autocast` as torch's own layers have them: experts compute in autocast's type, as
          `nn.Linear` does, from weights that stay as they are; gates compute in fp32, because a rounded
          logit chooses another expert. float64 is never rounded. Inside the layer autocast is off:
          backward does not run under it, and must meet the types that forward had.
mask      y = moe(x, mask=mask): one boolean for each token, True for those that take part. The others
          are left out before anything is counted, and get zeros: a call with fewer tokens, so loads,
          losses, capacity and gradients are those of the layer without padding, on any ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moeclipse.core.errors import ConfigError

Inputs = torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Structure:
    """How flat tensors were given: keys of a dict, or their number in a tuple, or one tensor alone."""

    keys: tuple[str, ...] | None = None
    alone: bool = True

    @classmethod
    def take_apart(cls, inputs: Inputs) -> tuple[Structure, tuple[torch.Tensor, ...]]:
        if isinstance(inputs, torch.Tensor):
            if not inputs.is_floating_point():
                raise ConfigError(
                    f"the layer got {str(inputs.dtype).removeprefix('torch.')} tokens; give it vectors in a "
                    "floating type, [..., d_model]: numbers of tokens go through an embedding first"
                )
            return cls(), (inputs,)
        parts = inputs.values() if isinstance(inputs, Mapping) else inputs
        if not isinstance(inputs, Mapping | Sequence) or not all(isinstance(x, torch.Tensor) for x in parts):
            raise ConfigError(
                f"the layer got {describe(inputs)}; give it a tensor [..., d_model], or a tuple or dict of "
                "tensors of which the first is [tokens, d_model]"
            )
        if isinstance(inputs, Mapping):
            structure, tensors = cls(keys=tuple(inputs), alone=False), tuple(inputs.values())
        else:
            structure, tensors = cls(alone=False), tuple(inputs)
        sizes = {tensor.shape[:1] for tensor in tensors}
        if len(sizes) != 1 or not tensors[0].is_floating_point() or tensors[0].dim() != 2:
            shapes = ", ".join(f"{tuple(tensor.shape)}" for tensor in tensors)
            raise ConfigError(
                f"tensors that travel together must have the same leading size, and the first must be "
                f"[tokens, d_model] in a floating type; got shapes {shapes}"
            )
        return structure, tensors

    @staticmethod
    def as_tokens(x: torch.Tensor) -> torch.Tensor:
        """[tokens, d_model] of any leading dimensions; one vector is one token."""
        if x.dim() == 0:
            raise ConfigError("the layer got a single number; give it vectors, [..., d_model]")
        return x[None] if x.dim() == 1 else x.flatten(0, -2)

    def put_together(self, tensors: Sequence[Any]) -> Any:
        if self.keys is not None:
            return dict(zip(self.keys, tensors, strict=True))
        return tensors[0] if self.alone else tuple(tensors)

    def flatten(self, value: Any) -> tuple[Any, ...]:
        """The inverse of put_together."""
        if self.keys is not None:
            return tuple(value[key] for key in self.keys)
        return (value,) if self.alone else tuple(value)


def describe(inputs: Any) -> str:
    """What it is, and of a container what is in it."""
    name = type(inputs).__name__
    if isinstance(inputs, Mapping | Sequence) and not isinstance(inputs, str):
        parts = inputs.values() if isinstance(inputs, Mapping) else inputs
        return f"a {name} of {', '.join(sorted({type(part).__name__ for part in parts})) or 'nothing'}"
    return "None" if inputs is None else f"a {name}"


def rows_for(x_TD: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The tokens in the type that experts with this weight compute in."""
    narrows = x_TD.dtype != torch.float64 and weight.dtype != torch.float64
    if narrows and torch.is_autocast_enabled(x_TD.device.type):
        return x_TD.to(torch.get_autocast_dtype(x_TD.device.type))
    if x_TD.dtype != weight.dtype:
        given, has = (str(dtype).removeprefix("torch.") for dtype in (x_TD.dtype, weight.dtype))
        raise ConfigError(
            f"the layer got {given} tokens, but its experts have {has} weights; call it inside "
            f"torch.autocast({x_TD.device.type!r}, dtype=torch.{given}) to compute in {given} with {has} "
            f"weights, or give both one type: moe.to(torch.{given}), or x.to(torch.{has})"
        )
    return x_TD


def leave_out(call: Callable[[Inputs], torch.Tensor], x: Inputs, mask: torch.Tensor) -> torch.Tensor:
    """`call` on the tokens of the mask; zeros for all others."""
    leading = x.shape[:-1] if isinstance(x, torch.Tensor) else Structure.take_apart(x)[1][0].shape[:1]
    if mask.dtype != torch.bool or mask.shape != leading:
        raise ConfigError(
            f"the mask must have one boolean for each token, shape {tuple(leading)}; got {mask.dtype} of "
            f"shape {tuple(mask.shape)}"
        )
    structure, tensors = Structure.take_apart(Structure.as_tokens(x) if isinstance(x, torch.Tensor) else x)
    (kept,) = mask.flatten().nonzero(as_tuple=True)
    y = call(structure.put_together([tensor[kept] for tensor in tensors]))
    out = y.new_zeros(mask.numel(), y.shape[-1]).index_copy(0, kept, y)
    return out.view(*leading, y.shape[-1])
