"""Weights that are not trained, kept in few bits and decoded where a product needs them.

    weight = Frozen("nf4", [E, R, C], scratch)      its parts are parameters: codes, factors, ...
    weight.write(values)                            quantised here
    weight.numbers(dtype)                           [E, R, C] in memory that others use, too
    with scratch.reusing(): ...                     numbers that are still there are not decoded again

Idea. A product reads its weight once, so one buffer serves all layers, one after the other: whoever computes
asks for the numbers right before the product, in forward and again in backward, and keeps the Frozen itself
for backward, never the numbers. Matrices of one role (all up-projections, all down-projections) share a
buffer: a layer that is recomputed in backward leaves there what its gradients need next. Parts are parameters
that want no gradient, an entry for each matrix, so that they are saved, read, sent to ranks and compared like
any frozen weight.

Contract. Gradients of the other operand are those that the decoded numbers have. Numbers are made in float32
and rounded once to the type that is asked for (`ops/quantised`).

Hazard. What `numbers` returns is overwritten by the next call of any Frozen of its role: use it before that,
on the same stream. A `Scratch` never changes its memory once it has some, because a CUDA graph may have its
address. Outside of `reusing` nothing counts as decoded: a replayed graph writes here without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn

from moeclipse.ops import nf4
from moeclipse.ops.block_floats import MX_BLOCK, SIDES, Fp8Blocks, Mxfp4
from moeclipse.ops.quantised import Quantised, span_of

Parts = dict[str, torch.Tensor]
Sizes = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Part -> (its shape for one matrix, its type)."""


@dataclass(frozen=True, kw_only=True)
class Rounded(Quantised):
    """bf16 as it is."""

    codes: torch.Tensor
    """[..., R, C] bfloat16."""

    def experts(self, first: int, stop: int) -> Rounded:
        return replace(self, codes=self.codes[first:stop], shape=span_of(self.shape, first, stop)[2])

    def numbers(self, matrix: int, first: int, stop: int) -> torch.Tensor:
        return self.codes.view(self.num_matrices, *self.shape[-2:])[matrix, first:stop].float()

    def launch(self, out: torch.Tensor, first: int) -> bool:
        out.copy_(self.codes[..., first : first + out.shape[-2], :])
        return True


def sizes_nf4(rows: int, columns: int) -> Sizes:
    blocks = rows * columns // nf4.BLOCK
    return {
        "codes": ((rows, columns // 2), torch.uint8),
        "factors": ((blocks,), torch.uint8),
        "scales": ((-(-blocks // nf4.GROUP),), torch.float32),
        "offsets": ((1,), torch.float32),
    }


def sizes_mxfp4(rows: int, columns: int) -> Sizes:
    blocks = (rows, columns // MX_BLOCK)
    return {"codes": ((*blocks, MX_BLOCK // 2), torch.uint8), "scales": (blocks, torch.uint8)}


def sizes_fp8(rows: int, columns: int) -> Sizes:
    blocks = (-(-rows // SIDES[0]), -(-columns // SIDES[1]))
    # Bytes: not every wire knows numbers of 8 bits.
    return {"codes": ((rows, columns), torch.uint8), "scales": (blocks, torch.float32)}


def sizes_bf16(rows: int, columns: int) -> Sizes:
    return {"codes": ((rows, columns), torch.bfloat16)}


def join_nf4(shape: tuple[int, ...], parts: Mapping[str, torch.Tensor]) -> Quantised:
    kept: dict[str, Any] = {name: part.reshape(-1) for name, part in parts.items()}
    return nf4.Nf4(shape=shape, dtype=torch.bfloat16, **kept)


def join_fp8(_shape: tuple[int, ...], parts: Mapping[str, torch.Tensor]) -> Quantised:
    return Fp8Blocks.of(parts["codes"].view(torch.float8_e4m3fn), parts["scales"])


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """A way of keeping matrices."""

    sizes: Callable[[int, int], Sizes]
    join: Callable[[tuple[int, ...], Mapping[str, torch.Tensor]], Quantised]
    quantise: Callable[[torch.Tensor], Quantised]
    """Of fp32 numbers, each matrix on its own."""
    fits: Callable[[int, int], str]
    """Why matrices of so many rows and columns cannot be kept so; empty where they can."""


def multiple(what: str, number: int, of: int) -> str:
    return "" if number % of == 0 else f"{what} ({number}) is no multiple of {of}"


KINDS: Mapping[str, Keeping] = {
    "bf16": Keeping(
        sizes=sizes_bf16,
        join=lambda shape, parts: Rounded(shape=shape, dtype=torch.bfloat16, codes=parts["codes"]),
        quantise=lambda v: Rounded(shape=tuple(v.shape), dtype=torch.bfloat16, codes=v.bfloat16()),
        fits=lambda _rows, _columns: "",
    ),
    "nf4": Keeping(
        sizes=sizes_nf4,
        join=join_nf4,
        quantise=nf4.quantise,
        fits=lambda rows, columns: (
            multiple("columns", columns, 2) or multiple("rows x columns", rows * columns, nf4.BLOCK)
        ),
    ),
    "mxfp4": Keeping(
        sizes=sizes_mxfp4,
        join=lambda _, parts: Mxfp4.of(parts["codes"], parts["scales"]),
        quantise=Mxfp4.quantise,
        fits=lambda _, columns: multiple("columns", columns, MX_BLOCK),
    ),
    "fp8": Keeping(
        sizes=sizes_fp8, join=join_fp8, quantise=Fp8Blocks.quantise, fits=lambda _rows, _columns: ""
    ),
}


class Scratch:
    """Memory for the numbers of one Frozen of each role at a time."""

    def __init__(self) -> None:
        self.numel: dict[str, int] = {}
        self.memory: dict[tuple[str, torch.device, torch.dtype], torch.Tensor] = {}
        self.holder: dict[str, tuple[Frozen, torch.dtype]] | None = None
        """Role -> whose numbers its memory has; None: not to be relied on."""

    def reserve(self, role: str, numel: int) -> None:
        """Whoever comes has at most so many numbers."""
        known = self.numel.get(role, 0)
        assert not self.memory or numel <= known, "a graph may have the address of what is there"
        self.numel[role] = max(known, numel)

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Before any graph could make it a part of its own memory."""
        device = torch.empty(0, device=device).device  # "cuda" may be given; a weight says "cuda:0"
        for role in self.numel:
            self.room(role, (0,), dtype, device)

    def room(
        self, role: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        key = (role, device, dtype)
        if key not in self.memory:
            self.memory[key] = torch.empty(self.numel[role], dtype=dtype, device=device)
        return self.memory[key][: prod(shape)].view(shape)

    @contextmanager
    def reusing(self) -> Iterator[None]:
        """What is decoded in here is there until others of its role are."""
        before, self.holder = self.holder, {}
        try:
            yield
        finally:
            self.holder = None if before is None else {}


class Frozen(nn.Module):
    """Matrices [..., R, C] of one kind."""

    def __init__(
        self,
        kind: str,
        shape: tuple[int, ...],
        scratch: Scratch,
        device: torch.device | None = None,
        role: str = "weight",
    ) -> None:
        super().__init__()
        self.kind, self.shape, self.scratch, self.role = kind, tuple(shape), scratch, role
        scratch.reserve(role, prod(shape))
        for name, (size, dtype) in KINDS[kind].sizes(*shape[-2:]).items():
            empty = torch.zeros((*shape[:-2], *size), dtype=dtype, device=device)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    @classmethod
    def of(cls, kind: str, values: torch.Tensor, scratch: Scratch, role: str = "weight") -> Frozen:
        made = cls(kind, tuple(values.shape), scratch, values.device, role)
        made.write(values)
        return made

    @torch.no_grad()
    def write(self, values: torch.Tensor) -> None:
        """Matrix by matrix: what quantising takes is several times what it leaves."""
        if values.is_meta:
            return
        sizes = KINDS[self.kind].sizes(*self.shape[-2:])
        stacks = {name: getattr(self, name).data.view(-1, *size) for name, (size, _) in sizes.items()}
        for matrix, numbers in enumerate(values.reshape(-1, *self.shape[-2:])):
            for name, part in encode(self.kind, numbers).items():
                stacks[name][matrix].copy_(part)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parameters())

    def quantised(self) -> Quantised:
        parts = {name: part.data for name, part in self.named_parameters()}
        return KINDS[self.kind].join(self.shape, parts)

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        scratch, role = self.scratch, self.role
        room = scratch.room(role, self.shape, dtype, self.device)
        if room.is_meta or (scratch.holder and scratch.holder.get(role) == (self, dtype)):
            return room
        if scratch.holder is not None:
            scratch.holder[role] = (self, dtype)
        return self.quantised().decode(room)


Weight = torch.Tensor | Frozen


def freeze(module: nn.Module, names: Sequence[str], kind: str, scratch: Scratch) -> None:
    """Parameters of a module become Frozens of the same names, which are also their roles.

    All are made before the first weight is given back: its memory serves the next layer's, whole.
    """
    made = {name: Frozen.of(kind, getattr(module, name).data, scratch, name) for name in names}
    for name, frozen in made.items():
        delattr(module, name)
        setattr(module, name, frozen)


def encode(kind: str, values: torch.Tensor) -> Parts:
    """The parts of matrices [..., R, C], each in the shape that a Frozen has it."""
    if not values.isfinite().all():
        raise ValueError("what is quantised has NaN or infinity in it")
    found = KINDS[kind].quantise(values.detach().float())
    sizes = KINDS[kind].sizes(*values.shape[-2:])
    return {name: in_bytes(part, sizes[name], values.shape[:-2]) for name, part in found.tensors.items()}


def in_bytes(
    part: torch.Tensor, size: tuple[tuple[int, ...], torch.dtype], stack: tuple[int, ...]
) -> torch.Tensor:
    shape, dtype = size
    return part.reshape(*stack, *shape).view(dtype)


def decode(kind: str, shape: tuple[int, ...], parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """fp32 numbers of parts as `encode` gives them."""
    return KINDS[kind].join(shape, parts).decode(torch.empty(shape, dtype=torch.float32))


def kind_of(parts: Mapping[str, torch.dtype]) -> str:
    """Of matrices whose parts have these types; what is stored says itself how."""
    found = [kind for kind, how in KINDS.items() if parts == types_of(how)]
    assert len(found) == 1, f"{dict(parts)} are no parts of a matrix"
    return found[0]


def types_of(how: Keeping) -> dict[str, torch.dtype]:
    return {name: dtype for name, (_, dtype) in how.sizes(64, 64).items()}


def shape_of(kind: str, codes: tuple[int, ...]) -> tuple[int, ...]:
    """Of matrices, by the shape of their codes."""
    if kind == "nf4":
        return (*codes[:-1], 2 * codes[-1])
    return (*codes[:-2], MX_BLOCK * codes[-2]) if kind == "mxfp4" else codes


def decoded(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """What a product takes: a weight as it is, or the numbers of a Frozen, until the next one's."""
    return weight.numbers(dtype) if isinstance(weight, Frozen) else weight


def in_type(weight: Weight, dtype: torch.dtype) -> Weight:
    """A weight in this type; a Frozen takes it on when it is decoded."""
    return weight if isinstance(weight, Frozen) else weight.to(dtype)
