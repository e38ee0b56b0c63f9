"""Tensors of a Hugging Face folder, put together from logical tensors of ours and written as a stream.

One tensor is in memory at a time. `Read` is what checkpoints and folders offer: elements of a flattened
logical tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from moeclipse.hf.folder import INDEX, ONE_FILE
from moeclipse.hf.row_ranges import LogicalTensor, RowRange

Read = Callable[[str, int, int], torch.Tensor]
"""(name, first element, stop) -> elements."""

CHUNK_BYTES = 1 << 24
SHARD_BYTES = 4 << 30
"""Most bytes of one file; a tensor that is larger has a file of its own."""
CODES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """Rows of a logical tensor that belong to a tensor of the folder."""

    name: str
    width: int
    vector: bool
    begin: int
    """The first of them."""
    part: RowRange


def sources_of(table: Mapping[str, LogicalTensor]) -> dict[str, list[Source]]:
    """The table the other way round: tensor of the folder -> what it is made of."""
    found: dict[str, list[Source]] = {}
    for name, tensor in table.items():
        begin = 0
        for part in tensor.parts:
            source = Source(
                name=name, width=tensor.width, vector=len(tensor.shape) == 1, begin=begin, part=part
            )
            found.setdefault(part.key, []).append(source)
            begin += part.rows
    return found


def assemble(sources: Sequence[Source], read: Read, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the folder."""
    whole = torch.empty(sources[0].part.shape, dtype=dtype)
    for source in sources:
        part, width = source.part, source.width
        rows = read(source.name, source.begin * width, (source.begin + part.rows) * width)
        place = slice(part.first, part.first + part.step * (part.rows - 1) + 1, part.step)
        where = part.index(place, None if source.vector else slice(None))
        values = rows if source.vector else rows.view(part.rows, width)
        whole[where] = (values.t() if part.transposed else values).to(dtype)
    return whole


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A tensor that is going to be written."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def shards_of(tensors: Sequence[Outline], most: int = SHARD_BYTES) -> dict[str, list[Outline]]:
    """File -> its tensors, in the order given."""
    groups: list[list[Outline]] = [[]]
    for tensor in tensors:
        if groups[-1] and sum(other.num_bytes for other in groups[-1]) + tensor.num_bytes > most:
            groups.append([])
        groups[-1].append(tensor)
    if len(groups) == 1:
        return {ONE_FILE: groups[0]}
    count = len(groups)
    return {f"model-{n + 1:05d}-of-{count:05d}.safetensors": group for n, group in enumerate(groups)}


def index_of(shards: Mapping[str, Sequence[Outline]]) -> dict[str, bytes]:
    """The index file, where there are several shards."""
    if len(shards) == 1:
        return {}
    total = sum(tensor.num_bytes for group in shards.values() for tensor in group)
    placed = {tensor.key: file for file, group in shards.items() for tensor in group}
    tree = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
    return {INDEX: json.dumps(tree, indent=2).encode() + b"\n"}


def chunks_of(tensors: Sequence[Outline], load: Callable[[Outline], torch.Tensor]) -> Iterator[memoryview]:
    """The bytes of a safetensors file."""
    # Each begins at a multiple of its element size: readers map the file.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in ordered:
        header[tensor.key] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.num_bytes],
        }
        offset += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for tensor in ordered:
        raw = load(tensor).contiguous().view(-1).view(torch.uint8)
        for first in range(0, len(raw), CHUNK_BYTES):
            yield raw[first : first + CHUNK_BYTES].numpy().data
