"""One rank's tensors as a safetensors file, written as a stream.

Idea. The format is a header (length, JSON of name -> dtype, shape, offsets) and then the tensors' bytes one
after the other. The header follows from shapes alone, so the bytes can leave through a small buffer: a rank
that saves 70 GB from its device needs 16 MiB of host memory. Reading is left to the safetensors library.

Contract. A piece that is a whole tensor is stored under its own name in its own shape; another piece is
stored flat, as `name[start:stop]`. Tensors are ordered by element size, largest first, so that each begins at
a multiple of its element size: readers map the file and need that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypedDict

import torch

from moeclipse.core.errors import CheckpointError
from moeclipse.train.checkpoints.host_memory import CudaPins, HostMemory

CHUNK_BYTES = 1 << 24
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class Later:
    """Values that are made when they are written, some at a time: there may be no room for all of them."""

    length: int
    dtype: torch.dtype
    make: Callable[[int, int], torch.Tensor]
    """Elements [start, stop)."""

    is_cuda = False

    def numel(self) -> int:
        return self.length

    def element_size(self) -> int:
        return self.dtype.itemsize

    def __getitem__(self, part: slice) -> torch.Tensor:
        start, stop, _ = part.indices(self.length)
        return self.make(start, stop).to(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Elements [start, start + data.numel()) of the logical tensor `name` of `shape`, in row-major order."""

    name: str
    shape: tuple[int, ...]
    start: int
    data: torch.Tensor | Later

    @property
    def flat(self) -> torch.Tensor | Later:
        return self.data if isinstance(self.data, Later) else self.data.detach().reshape(-1)

    @property
    def values(self) -> torch.Tensor:
        """All of it."""
        return self.flat[:]

    @property
    def stop(self) -> int:
        return self.start + self.data.numel()

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.data.numel() == prod(self.shape)

    @property
    def key(self) -> str:
        return self.name if self.is_whole else f"{self.name}[{self.start}:{self.stop}]"

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()


class PieceRecord(TypedDict):
    """What other ranks must know of a piece."""

    name: str
    shape: list[int]
    dtype: str
    key: str
    start: int
    stop: int


class Shard:
    """The pieces one rank writes, in the order of the file."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces = sorted(pieces, key=lambda piece: (-piece.data.element_size(), piece.name, piece.start))
        keys = set()
        for piece in self.pieces:
            _check(piece)
            if piece.key in keys:
                raise CheckpointError(f"tensor {piece.key!r} was given twice; give each piece once")
            keys.add(piece.key)

    @property
    def stored(self) -> list[Piece]:
        """Pieces that have a place in the file: a share of nothing has none."""
        return [piece for piece in self.pieces if piece.data.numel()]

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.stored)

    def copied(self, memory: HostMemory | None = None) -> tuple[Shard, HostMemory]:
        """The same pieces in host memory, which training leaves alone; that of an earlier copy is used.

        Pieces lie in the order of the file, so each begins at a multiple of its element size.
        """
        on_device = any(piece.data.is_cuda for piece in self.stored)
        if memory is None or memory.num_bytes < self.num_bytes:
            if memory is not None:
                memory.close()
            memory = HostMemory(self.num_bytes, CudaPins() if on_device else None)
        copies, offset = [], 0
        for piece in self.pieces:
            memory.copy(offset, piece.values)
            place = memory.data[offset : offset + piece.num_bytes].view(piece.data.dtype)
            copies.append(replace(piece, data=place))
            offset += piece.num_bytes
        if on_device:
            torch.cuda.synchronize()
        return Shard(copies), memory

    def records(self) -> list[PieceRecord]:
        """What other ranks must know of these pieces, JSON-able."""
        return [
            {
                "name": piece.name,
                "shape": list(piece.shape),
                "dtype": DTYPE_NAMES[piece.data.dtype],
                "key": piece.key,
                "start": piece.start,
                "stop": piece.stop,
            }
            for piece in self.pieces
        ]

    def chunks(self) -> Iterator[memoryview]:
        """The bytes of the file."""
        yield memoryview(self._header())
        for piece in self.stored:
            flat = piece.flat
            length = CHUNK_BYTES // piece.data.element_size()
            for first in range(0, flat.numel(), length):
                chunk = flat[first : first + length].to("cpu").contiguous()
                yield chunk.view(torch.uint8).numpy().data

    def _header(self) -> bytes:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for piece in self.stored:
            shape = piece.shape if piece.is_whole else (piece.data.numel(),)
            header[piece.key] = {
                "dtype": DTYPE_NAMES[piece.data.dtype],
                "shape": list(shape),
                "data_offsets": [offset, offset + piece.num_bytes],
            }
            offset += piece.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def _check(piece: Piece) -> None:
    if piece.data.dtype not in DTYPE_NAMES:
        expected = ", ".join(str(dtype) for dtype in DTYPE_NAMES)
        raise CheckpointError(
            f"tensor {piece.name!r} has dtype {piece.data.dtype}, which checkpoints do not hold; convert it "
            f"to one of {expected}"
        )
    if piece.name in ("", "__metadata__"):
        raise CheckpointError(f"{piece.name!r} cannot be a tensor's name; give it another one")
    if not 0 <= piece.start <= piece.stop <= prod(piece.shape):
        raise CheckpointError(
            f"tensor {piece.name!r} of shape {list(piece.shape)} has {prod(piece.shape)} elements, but a "
            f"piece holds [{piece.start}, {piece.stop}); a piece must lie inside its tensor"
        )
