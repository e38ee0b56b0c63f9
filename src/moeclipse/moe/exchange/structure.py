"""What a layer takes: a tensor, or a tuple or dict of tensors that travel together.

All of them have one row for each token. The first is what the gate reads. Integers and booleans travel too,
but carry no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moeclipse.core.errors import ConfigError

Inputs = torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Structure:
    """How flat tensors were given: keys of a dict, or their number in a tuple, or one tensor alone."""

    keys: tuple[str, ...] | None = None
    is_tuple: bool = False

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
            structure, tensors = cls(keys=tuple(inputs)), tuple(inputs.values())
        else:
            structure, tensors = cls(is_tuple=True), tuple(inputs)
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
        return tuple(tensors) if self.is_tuple else tensors[0]

    def flatten(self, value: Any) -> tuple[Any, ...]:
        """The inverse of put_together."""
        if self.keys is not None:
            return tuple(value[key] for key in self.keys)
        return tuple(value) if self.is_tuple else (value,)


def describe(inputs: Any) -> str:
    """What it is, and of a container what is in it."""
    name = type(inputs).__name__
    if isinstance(inputs, Mapping | Sequence) and not isinstance(inputs, str):
        parts = inputs.values() if isinstance(inputs, Mapping) else inputs
        return f"a {name} of {', '.join(sorted({type(part).__name__ for part in parts})) or 'nothing'}"
    return "None" if inputs is None else f"a {name}"
