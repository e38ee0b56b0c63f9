"""Quantised tensors of a folder, expanded slice by slice while they are read.

    fp8      KEY [out, in] in e4m3, KEY_scale_inv [out / b, in / b]: each block of b x b has a factor
             (DeepSeek-V3: b = 128; the last blocks of a row or column may be cut short)
    mxfp4    KEY_blocks [E, out, in / 32, 16] with two numbers in each byte, the first in its low half, and
             KEY_scales [E, out, in / 32]: 32 numbers share a power of two (gpt-oss; KEY is [E, in, out])

Idea. To whoever reads a folder a quantised tensor is one of bfloat16 under its plain key: `expand` reads the
blocks under a slice and their factors, and nothing else. Products are in float32; who wants another type
rounds once.

Contract. A tensor whose other half is missing, or does not fit it, is a CheckpointError in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from moeclipse.core.errors import CheckpointError
from moeclipse.ops.block_floats import MX_BLOCK as GROUP
from moeclipse.ops.block_floats import SIDES, expand_fp8, expand_mxfp4

FP8, BYTES, EXPANDED = "F8_E4M3", "U8", "BF16"
SCALE_INV, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
METHODS = ("fp8", "mxfp4")

Slice = Callable[[str, tuple[Any, ...]], torch.Tensor]
"""(key in the files, index) -> what is stored there."""
Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Key in the files -> (shape, type)."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A quantised tensor: its shape once expanded, and how it lies in the files."""

    key: str
    kind: Literal["fp8", "mxfp4"]
    shape: tuple[int, ...]
    block: tuple[int, int] = SIDES

    @property
    def parts(self) -> tuple[str, str]:
        """Keys in the files: numbers, and their factors."""
        if self.kind == "fp8":
            return self.key, self.key + SCALE_INV
        return self.key + BLOCKS, self.key + SCALES

    def expand(self, index: tuple[Any, ...], read: Slice) -> torch.Tensor:
        """A slice in float32; `index` is a slice for each of the last two dimensions, behind an entry."""
        entry, rows, columns = (*index[:-2], *index[-2:]) if len(index) == 3 else (None, *index)
        height, width = self.shape[-2:]
        down, across = rows.indices(height)[:2], columns.indices(width)[:2]
        if self.kind == "fp8":
            return self._fp8(down, across, read)
        if entry is None:
            raise ValueError(f"{self.key} is a stack; a slice of it names an entry")
        return self._mxfp4(entry, down, across, read)

    def rows(
        self, entry: int | None, first: int, step: int, count: int, read: Slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes, scales) of so many rows of [out, in], as `ops/frozen` keeps them; nothing is expanded."""
        numbers, factors = self.parts
        if self.kind == "fp8":
            codes, scales = (
                read(numbers, (slice(None), slice(None))),
                read(factors, (slice(None), slice(None))),
            )
            return codes.view(torch.uint8), scales.float()
        where = (entry, slice(first, first + step * (count - 1) + 1))
        return read(numbers, where)[::step].contiguous(), read(factors, where)[::step].contiguous()

    def why_not_kept(self, rows: int, *, last: bool) -> str:
        """Why its blocks cannot stand above another's, or be kept at all; empty where they can."""
        if self.kind == "fp8" and self.block != SIDES:
            return f"its blocks are {self.block[0]} x {self.block[1]}, not {SIDES[0]} x {SIDES[1]}"
        if self.kind == "fp8" and rows % SIDES[0] and not last:
            return f"another matrix lies under it, and its {rows} rows end inside a block of {SIDES[0]}"
        return ""

    def _fp8(self, rows: tuple[int, int], columns: tuple[int, int], read: Slice) -> torch.Tensor:
        bounds = (rows, columns)
        values = read(self.parts[0], tuple(slice(*bound) for bound in bounds))
        pairs = zip(bounds, self.block, strict=True)
        under = tuple(slice(first // size, -(-stop // size)) for (first, stop), size in pairs)
        return expand_fp8(values, read(self.parts[1], under), self.block, (rows[0], columns[0]))

    def _mxfp4(
        self, entry: int, rows: tuple[int, int], columns: tuple[int, int], read: Slice
    ) -> torch.Tensor:
        first, stop = rows[0] // GROUP, -(-rows[1] // GROUP)
        under = (entry, slice(*columns), slice(first, stop))
        numbers = expand_mxfp4(read(self.parts[0], under), read(self.parts[1], under))
        return numbers[:, rows[0] - first * GROUP : rows[1] - first * GROUP].t()


def packed_tensors(shapes: Shapes, theirs: Mapping[str, Any], where: str) -> dict[str, Packed]:
    """The quantised tensors of a folder, by their plain keys; CheckpointError for halves of them."""
    told = theirs.get("quantization_config") or {}
    if not isinstance(told, dict):
        raise CheckpointError(f"{where}: quantization_config holds no table; download the model again")
    method = told.get("quant_method")
    if told and method not in METHODS:
        raise CheckpointError(
            f"{where}: weights are quantised by {method!r}, and only {' and '.join(METHODS)} are read; "
            "convert them to bfloat16 with transformers first"
        )
    block = told.get("weight_block_size") or SIDES
    if not isinstance(block, list | tuple) or [type(side) for side in block] != [int, int] or min(block) < 1:
        raise CheckpointError(f"{where}: weight_block_size must be two numbers, not {block!r}")
    found: dict[str, Packed] = {}
    for key, (shape, kind) in shapes.items():
        if kind == FP8:
            found[key] = Packed(key=key, kind="fp8", shape=shape, block=(block[0], block[1]))
        elif key.endswith(BLOCKS) and kind == BYTES and len(shape) == 4:
            plain = key.removesuffix(BLOCKS)
            experts, out, groups, _ = shape
            found[plain] = Packed(key=plain, kind="mxfp4", shape=(experts, GROUP * groups, out))
    halves = {half for packed in found.values() for half in packed.parts}
    for key in shapes:
        if key.endswith((SCALE_INV, SCALES)) and key not in halves:
            raise CheckpointError(
                f"{where}: {key} has the factors of a tensor that is missing, or is not quantised; download "
                "the model again"
            )
    for packed in found.values():
        _check(packed, shapes, where)
    return found


def _check(packed: Packed, shapes: Shapes, where: str) -> None:
    numbers, factors = packed.parts
    if factors not in shapes:
        raise CheckpointError(f"{where}: {numbers} is quantised, but {factors} is missing; download it again")
    if packed.kind == "fp8":
        if len(packed.shape) != 2:
            raise CheckpointError(f"{where}: {numbers} is a stack of fp8 matrices, which is not read")
        sides = zip(packed.shape, packed.block, strict=True)
        wanted: tuple[int, ...] = tuple(-(-size // block) for size, block in sides)
    else:
        wanted = shapes[numbers][0][:3]
        if shapes[numbers][0][3] * 2 != GROUP or shapes[factors][1] != BYTES:
            raise CheckpointError(f"{where}: {numbers} is not laid out as mxfp4 in groups of {GROUP}")
    if shapes[factors][0] != wanted:
        raise CheckpointError(
            f"{where}: {factors} has shape {list(shapes[factors][0])}, but {numbers} needs {list(wanted)}; "
            "files of different models are mixed"
        )
