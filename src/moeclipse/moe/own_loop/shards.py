"""A tensor over all experts of which this rank has some: what `state_dict` says of their weights.

    shape   [experts, ...]                 of the logical tensor
    local   [slots, ...]                   what is here: views of the weights, never copies
    place   which expert is in which slot, and which part of its width

A DTensor cannot say it: experts have replicas, move, and are shared out unevenly. But checkpoints need
little: `torch.distributed.checkpoint` asks any tensor for its chunks, and here a chunk is one expert, or its
part on this rank. So weights and optimizer state are saved once and loaded by any number of ranks, into
whatever experts are there. Replicas offer the same chunk, of which one is written.

Contract. It is carried, copied, cast and pickled as tensors are, and computes nothing: `full_tensor` gathers,
`local` is plain. Hazard: a chunk is a view, so loading writes into the weights themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch

from moeclipse.core.errors import ConfigError
from moeclipse.moe.private_torch import TO_COPY, accelerate_saves, wrapper
from moeclipse.tensor.cut import Cut

if TYPE_CHECKING:  # half a second to load, for those who save through it
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

COPY, EQUAL = torch.ops.aten.copy_.default, torch.ops.aten.equal.default
NEW_EMPTY = torch.ops.aten.new_empty.default
ALIKE = (
    *(TO_COPY, torch.ops.aten.detach.default, torch.ops.aten.clone.default),
    *(torch.ops.aten.empty_like.default, torch.ops.aten.zeros_like.default),
)
"""What keeps a tensor's shape, so that the local part is all there is to do."""
Offsets = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ExpertPlace:
    """Which part of a tensor over all experts is here."""

    experts: tuple[int, ...]
    """The expert of each slot; -1: none."""
    num_experts: int
    cut: Cut | None = None
    """This rank's part of each expert; None: all of it."""

    @property
    def whole(self) -> bool:
        return self.experts == tuple(range(self.num_experts)) and self.cut is None

    def shape(self, local: Sequence[int]) -> torch.Size:
        """Of the logical tensor."""
        return torch.Size((self.num_experts, *(local[1:] if self.cut is None else self.cut.shape)))

    def pieces(self, local: torch.Tensor) -> Iterator[tuple[Offsets, torch.Tensor]]:
        """(where it begins in the logical tensor, a view of the local one)."""
        rest, cut = (0,) * (local.dim() - 1), self.cut
        for slot, expert in enumerate(self.experts):
            if expert < 0:
                continue
            here = local[slot : slot + 1]
            if cut is None:
                yield (expert, *rest), here
            elif cut.dim == 1:
                yield (expert, 0, cut.start), here
            else:
                for block, rows in enumerate(here.split(cut.length, dim=1)):
                    yield (expert, block * (cut.shape[0] // cut.blocks) + cut.start, *rest[1:]), rows

    def pick(self, logical: torch.Tensor) -> torch.Tensor:
        """The local tensor, of a logical one; empty slots get zeros."""
        shape = logical.shape[1:] if self.cut is None else self.cut.local_shape
        local = logical.new_zeros(len(self.experts), *shape)
        for offsets, here in self.pieces(local):
            here.copy_(
                logical[tuple(slice(at, at + size) for at, size in zip(offsets, here.shape, strict=True))]
            )
        return local

    def put(self, local: torch.Tensor, logical: torch.Tensor) -> None:
        """The inverse: what is here into its place."""
        for offsets, here in self.pieces(local):
            at = tuple(slice(first, first + size) for first, size in zip(offsets, here.shape, strict=True))
            logical[at] = here

    def take(self, given: torch.Tensor, name: str) -> object:
        """The local tensor, of one that was saved: these experts' own, or one over all experts.

        A plain tensor of the local shape says nothing of experts, and is taken at its word.
        """
        if isinstance(given, ExpertShards):
            if given.place != self:
                raise ConfigError(
                    f"{name} was saved by a rank with {given.place}, but this rank has {self}; load what "
                    "this rank saved, moeclipse.full_state_dict, or with torch.distributed.checkpoint"
                )
            return given.local
        local = (len(self.experts), *(given.shape[1:] if self.cut is None else self.cut.local_shape))
        over_all = tuple(given.shape) != local and given.shape == self.shape(given.shape)
        return self.pick(given) if over_all else given

    def __str__(self) -> str:
        part = "" if self.cut is None else f", {self.cut.start} to {self.cut.stop - 1} of their width"
        return f"experts {list(self.experts)} of {self.num_experts}{part}"


class ExpertShards(torch.Tensor):
    local: torch.Tensor
    place: ExpertPlace

    @staticmethod
    def __new__(cls, local: torch.Tensor, place: ExpertPlace) -> ExpertShards:
        made = wrapper(cls, place.shape(local.shape), local)
        made.local, made.place = local, place
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        first, *others = args
        if func in ALIKE and isinstance(first, ExpertShards):
            return ExpertShards(func(first.local, *others, **(kwargs or {})), first.place)
        other = others[0] if others else None
        if func is NEW_EMPTY and isinstance(first, ExpertShards) and tuple(others[0]) == tuple(first.shape):
            return ExpertShards(func(first.local, first.local.shape, **(kwargs or {})), first.place)
        if isinstance(first, ExpertShards) and isinstance(other, ExpertShards) and first.place == other.place:
            if func is COPY:
                first.local.copy_(other.local, *args[2:])
                return first
            if func is EQUAL:
                return torch.equal(first.local, other.local)
        given = chain.from_iterable(arg if isinstance(arg, (list, tuple)) else (arg,) for arg in args)
        raise next(arg for arg in given if isinstance(arg, ExpertShards)).cannot(str(func))

    def cannot(self, what: str) -> NotImplementedError:
        return NotImplementedError(
            f"{what} knows nothing of a tensor of which this rank has {self.place}; take its .local, or "
            "moeclipse.full_state_dict(model) for tensors over all experts"
        )

    def untyped_storage(self) -> NoReturn:
        """Whoever writes the bytes of tensors must not take this rank's for all."""
        raise self.cannot("whoever asks for the memory")

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        cut = None if self.place.cut is None else tuple(vars(self.place.cut).values())
        return rebuild_shards, (self.local, self.place.experts, self.place.num_experts, cut)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"ExpertShards({self.place}, local={self.local!r})"

    # What torch.distributed.checkpoint asks for.

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=here.shape)
            for offsets, here in self.place.pieces(self.local)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for offsets, here in self.place.pieces(self.local):
            if torch.Size(offsets) == index.offset:
                return here
        raise ValueError(f"{index.fqn} has no chunk at {index.offset} here: this rank has {self.place}")


def trust_shards() -> None:
    """Let `torch.load(weights_only=True)` read them in this process."""
    torch.serialization.add_safe_globals([rebuild_shards])


def rebuild_shards(
    local: torch.Tensor,
    experts: tuple[int, ...],
    num_experts: int,
    cut: tuple[tuple[int, ...], int, int, int, int] | None,
) -> ExpertShards:
    """Of what a pickle keeps: plain values, so that `torch.load(weights_only=True)` has one name to trust."""
    part = None
    if cut is not None:
        shape, dim, start, stop, blocks = cut
        part = Cut(shape=shape, dim=dim, start=start, stop=stop, blocks=blocks)
    return ExpertShards(local, ExpertPlace(experts=tuple(experts), num_experts=num_experts, cut=part))


def save_shards(state_dict: dict[str, object], prefix: str, places: Mapping[str, ExpertPlace]) -> None:
    """Let tensors that a module has put there say which experts they are, unless they are all."""
    for name, place in places.items():
        key = prefix + name
        if key in state_dict and not place.whole:
            refuse_one_writer(place)
            state_dict[key] = ExpertShards(cast(torch.Tensor, state_dict[key]), place)


def refuse_one_writer(place: ExpertPlace) -> None:
    """accelerate lets one rank write its state: the experts of all others would be lost until somebody loads.

    All ranks ask for it, so all of them are told, before a file is there. Hooks may save in its stead.
    """
    if accelerate_saves():
        raise ConfigError(
            f"accelerator.save_state() and save_model() write one rank's experts, here {place}; save with "
            "torch.distributed.checkpoint (docs/own-loop.md, State), or write "
            "moeclipse.full_state_dict(model)"
        )


def load_shards(state_dict: dict[str, object], prefix: str, places: Mapping[str, ExpertPlace]) -> list[str]:
    """The reverse, before a module takes them; what cannot be taken is told, one line each."""
    problems = []
    for name, place in places.items():
        key = prefix + name
        if key in state_dict:
            found = cast(torch.Tensor, state_dict[key])
            try:
                state_dict[key] = place.take(found, key)
            except ConfigError as error:
                problems.append(str(error))
                state_dict[key] = cast(ExpertShards, found).local
    return problems
