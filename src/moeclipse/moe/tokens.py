"""What a call of the layer takes: tensors, and which of all ranks' tokens they are.

tensors   alone, or a tuple or dict of them that travel together. All have one row for each token, and the
          first is what the gate reads. Integers and booleans travel too, but carry no gradient.
types     under `torch.autocast` as torch's own layers have them: experts compute in autocast's type, as
          `nn.Linear` does, from weights that stay as they are; gates compute in fp32, because a rounded
          logit chooses another expert. float64 is never rounded. Inside the layer autocast is off:
          backward does not run under it, and must meet the types that forward had.
mask      y = moe(x, mask=mask): one boolean for each token, True for those that take part. The others
          are left out before anything is counted, and get zeros: a call with fewer tokens, so loads,
          losses, capacity and gradients are those of the layer without padding, on any ranks.

The global microbatch as one rank sees it is its tokens, and the rows that ranks have for each expert.
Each rank of a group holds a contiguous part of the microbatch's tokens, in rank order. A gate that counts or
draws over the whole microbatch asks here, and so gives the same answer however the tokens are shared out.
Rows are counted once, for all who balance or share them out. Both numbers travel by themselves, or with the
sizes of the exchange that follows (`Piggyback`): a call of a layer has one small message then, not three.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import torch

from moeclipse.comm.async_ops.exchange import sum_of_parts
from moeclipse.comm.async_ops.lane import InFlight, gather, gather_to_host
from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CommError, ConfigError


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """This rank's tokens are first .. first + local - 1 of `total`."""

    mesh: Mesh
    first: int
    total: int
    step: int = 0
    microbatch: int = 0
    group: Group = None  # type: ignore[assignment]
    """The ranks that share out the tokens; left out: all of them."""
    largest: int = 0
    """Tokens of the rank that has most; 0: all have as many."""

    def __post_init__(self) -> None:
        if self.group is None:
            object.__setattr__(self, "group", self.mesh.stage)

    @classmethod
    def of(
        cls, mesh: Mesh, local: int, step: int = 0, microbatch: int = 0, group: Group | None = None
    ) -> Tokens:
        """Ask the other ranks how many tokens they have; who wants to know waits for it."""
        group = group or mesh.stage
        if group.size == 1:
            return cls(mesh=mesh, first=0, total=local, step=step, microbatch=microbatch, group=group)
        mine = torch.tensor([local], device=mesh.device)
        counts = gather_to_host(mesh.a2a, group, mine, "exchange of token counts")
        return AskedTokens.asked(mesh, counts, step, microbatch, group)

    def most(self, local: int, group: Group) -> int:
        """Tokens that no rank of `group` has more of, the same number on all of them."""
        if not self.largest and self.total != local * self.group.size:
            raise CommError(
                f"rank {self.mesh.rank} has {local} of {self.total} tokens, and nobody said how many others "
                "have"
            )
        del group
        return self.largest or local

    def gather(self, value: torch.Tensor, label: str) -> InFlight[torch.Tensor]:
        """Every rank's value, [P, ...]."""
        return gather(self.mesh.a2a, self.group, value, f"{label}, microbatch {self.microbatch}")


class AskedTokens(Tokens):
    """Whose `first` and `total` are on their way until somebody asks for one of them."""

    @classmethod
    def asked(
        cls, mesh: Mesh, counts: InFlight[list[list[int]]], step: int, microbatch: int, group: Group
    ) -> AskedTokens:
        """`counts`: tokens of each rank of the group. What `replace` makes of it knows all numbers."""
        tokens = object.__new__(cls)
        vars(tokens).update(mesh=mesh, step=step, microbatch=microbatch, group=group, _counts=counts)
        return tokens

    @cached_property
    def _of_ranks(self) -> list[int]:
        counts: InFlight[list[list[int]]] = vars(self)["_counts"]
        return [count for (count,) in counts.get()]

    def most(self, local: int, group: Group) -> int:
        del local
        return max(self._of_ranks[self.group.ranks.index(rank)] for rank in group.ranks)

    @cached_property
    def first(self) -> int:
        return sum(self._of_ranks[: self.group.index])

    @cached_property
    def total(self) -> int:
        return sum(self._of_ranks)


@dataclass
class Piggyback:
    """Loads and the number of tokens of each rank, sent with the sizes of an exchange."""

    mine: torch.Tensor | None = None
    _all: torch.Tensor | None = None

    def arrived(self, table: list[list[int]]) -> None:
        self._all = torch.tensor(table)

    @property
    def all(self) -> torch.Tensor:
        """[P, E + 1], the tokens last; after the sizes have arrived."""
        assert self._all is not None, "the sizes of the exchange have not been asked for"
        return self._all

    def loads(self, load_E: torch.Tensor, num_tokens: int, group: Group) -> Loads:
        self.mine = torch.cat([load_E, load_E.new_tensor([num_tokens])])
        return Loads(PiggybackLoads(self), group, self)

    @property
    def tokens(self) -> PiggybackTokens:
        """Of each rank, an `InFlight`."""
        return PiggybackTokens(self)


@dataclass(frozen=True)
class PiggybackLoads:
    message: Piggyback

    def get(self) -> torch.Tensor:
        return self.message.all[:, :-1]


@dataclass(frozen=True)
class PiggybackTokens:
    message: Piggyback

    def get(self) -> list[list[int]]:
        tokens: list[list[int]] = self.message.all[:, -1:].tolist()
        return tokens


@dataclass(frozen=True)
class Loads:
    """Rows of each rank of a group for each expert, maybe still on their way."""

    parts: InFlight[torch.Tensor]
    group: Group
    message: Piggyback | None = None
    """What brings them, where that is the exchange of sizes."""

    def total(self) -> torch.Tensor:
        """The load of each expert, the same bits on every rank."""
        return sum_of_parts(self.parts.get()) if self.message is None else self.message.all[:, :-1].sum(0)

    def of(self, group: Group) -> np.ndarray:
        """Those of the ranks of another group, [P, E]."""
        places = [self.group.ranks.index(rank) for rank in group.ranks]
        table: np.ndarray = self.parts.get().cpu().numpy()[places]
        return table


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

    def put_together(self, tensors: Sequence[torch.Tensor]) -> Inputs:
        if self.keys is not None:
            return dict(zip(self.keys, tensors, strict=True))
        return tensors[0] if self.alone else tuple(tensors)

    def flatten(self, value: Inputs) -> tuple[torch.Tensor, ...]:
        """The inverse of put_together."""
        if isinstance(value, torch.Tensor):
            return (value,)
        if self.keys is not None and isinstance(value, Mapping):
            return tuple(value[key] for key in self.keys)
        return tuple(cast(Sequence[torch.Tensor], value))


def describe(inputs: object) -> str:
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
