"""Sum what all ranks hold: the same bits whoever adds, because ranks are added in order.

    sum_ranks      out = round(x_0 + x_1 + ... + x_{P-1})          added from left to right in fp32
    add_rms_norm   h = round(residual + x_0 + ... ),  y = round(h / rms(h) * weight)

fp64 inputs are added in fp64. A result is rounded to the dtype of the inputs once, at the end, so two ranks
or eight lose the same single rounding. `h` is rounded before it is normalised: then it does not matter which
rank computed which rows of it.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from moeclipse.core.errors import ConfigError
from moeclipse.ops.cuda_driver import LaunchConfig, cuda_driver
from moeclipse.ops.precision import WIDE
from moeclipse.ops.private_torch import raw_stream_function

BLOCK = 1 << 14  # elements added at a time: operands and fp32 temporaries stay in the first caches


def part_bounds(length: int, num_ranks: int) -> list[int]:
    """Where each rank's part begins, and the end. The last rank takes the remainder: 403 over 4 ranks is
    [0, 100, 200, 300, 403]."""
    part = length // num_ranks
    return [rank * part for rank in range(num_ranks)] + [length]


def checked_bounds(bounds: Sequence[int] | None, length: int, num_ranks: int) -> list[int]:
    """As a list; without any, `part_bounds`."""
    if bounds is None:
        return part_bounds(length, num_ranks)
    bounds = list(bounds)
    grows = all(start <= stop for start, stop in pairwise(bounds))
    if len(bounds) != num_ranks + 1 or not grows or bounds[0] != 0 or bounds[-1] != length:
        raise ConfigError(f"bounds {bounds} must be {num_ranks + 1} numbers that grow from 0 to {length}")
    return bounds


def sum_ranks_reference(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The definition, without a thought for speed."""
    total = parts[0].to(WIDE[parts[0].dtype])
    for part in parts[1:]:
        total = total + part.to(total.dtype)
    return total.to(parts[0].dtype)


def sum_ranks(parts: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Flat `parts` of equal length into `out`, which must not overlap any part after the second."""
    if len(parts) == 2:
        # torch computes a sum of two in fp32 and rounds once, so no temporary is needed.
        return torch.add(parts[0], parts[1], out=out)
    if out.dtype == WIDE[out.dtype]:
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)
        return out
    length = out.numel()
    total = torch.empty(min(length, BLOCK), dtype=torch.float32)
    other = torch.empty_like(total)
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        if stop - start < total.numel():
            total, other = total[: stop - start], other[: stop - start]
        total.copy_(parts[0][start:stop])
        for part in parts[1:]:
            other.copy_(part[start:stop])
            total.add_(other)
        out[start:stop].copy_(total)
    return out


def add_residual(parts: Sequence[torch.Tensor], residual: torch.Tensor) -> torch.Tensor:
    """h = round(residual + sum of the parts), added in that order of ranks, then the residual."""
    total = parts[0].to(WIDE[residual.dtype], copy=True)  # a part lies in memory that others still read
    for part in parts[1:]:
        total += part
    return (total + residual).to(residual.dtype)


def rms_norm(h: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = h.to(WIDE[h.dtype])
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(wide.dtype)).to(h.dtype)


@dataclass(frozen=True, kw_only=True)
class PeerSpace:
    """What the kernels of one rank need to know of the group; `comm/reduce/on_device` makes it."""

    table: torch.Tensor
    """[P] int64: the address of each rank's buffer, flags first."""
    counts: torch.Tensor
    """[max_blocks] int32: rounds done."""
    status: torch.Tensor
    """[1] int32 in pinned memory: 1 + a peer that did not arrive."""
    area_bytes: int
    head_bytes: int
    limit_us: int
    rank: int
    num_ranks: int
    max_blocks: int


SMALL, LARGE, HUGE = 8 << 10, 32 << 10, 64 << 10
"""Bytes that a block handles at a time."""
IN_FLIGHT = 256 << 10
"""Bytes of all ranks that a block can have under way: more do not fit into its registers."""


def tile_of(num_bytes: int, blocks: int, num_ranks: int) -> int:
    """For the bytes that a rank adds up: all in one stage, a part of them in two.

    Few bytes want many blocks with little to do; many want more loads under way, since each turn of a block
    waits for memory anew.
    """
    if num_bytes <= 2 * SMALL * blocks:
        return SMALL
    return HUGE if num_bytes > 4 * LARGE * blocks and HUGE * num_ranks <= IN_FLIGHT else LARGE


def one_size_for_each_tile(blocks: int) -> list[int]:
    """Bytes that a rank adds up, one for each tile that `tile_of` may choose, and few: whatever fits into an
    area has its tile here."""
    return [SMALL * blocks, 2 * SMALL * blocks + LARGE, 4 * LARGE * blocks + LARGE]


ONE, TWO, SCATTER, GATHER = 1, 2, 3, 4
"""What a kernel does: all-reduce in one stage or two; or the first stage alone; or the second."""


def name_of(*call: object) -> int:
    """A number for what is called, of 31 bits: ranks whose numbers differ make different calls."""
    return zlib.crc32(repr(call).encode()) >> 1


@dataclass(frozen=True)
class Launch:
    """How a call was launched, for whoever wants to repeat it."""

    launcher: Launcher
    blocks: int
    inputs: int
    length: int
    part: int
    what: int


class AllReduceKernel:
    """out = sum over ranks of x, on a device; `inputs` is a row of all ranks' addresses of x, if known, and
    `source` what all ranks call that row.

    Compiled kernels are kept and launched through the driver: Triton's own launch binds and checks arguments
    anew in every call, which takes longer than the kernel.
    """

    def __init__(self, space: PeerSpace, tile: Callable[[int, int, int], int] = tile_of) -> None:
        self._space, self._tile = space, tile
        self._launchers: dict[tuple[object, ...], Launcher] = {}
        self._sizes = (space.area_bytes, space.head_bytes, space.limit_us, space.rank, space.max_blocks)
        self.last: Launch | None = None

    def __call__(
        self, x: torch.Tensor, out: torch.Tensor, kind: int, inputs: torch.Tensor | None = None,
        source: object = None,
    ) -> None:  # fmt: skip
        """Flat or not, contiguous. With SCATTER `out` is this rank's part, with GATHER `x` is."""
        space, dtype = self._space, x.dtype
        length = out.numel() if kind == GATHER else x.numel()
        part = length // space.num_ranks // 16 * 16  # parts begin on whole vectors
        share = length if kind == ONE else part
        block = self._tile(share * dtype.itemsize, space.max_blocks, space.num_ranks) // dtype.itemsize
        blocks = max(1, min(space.max_blocks, -(-share // block)))
        from_x, to_out = x.data_ptr(), out.data_ptr()
        what = name_of(kind, dtype, length, source)
        # What Triton compiles anew for: see the arguments that differ between calls.
        key = (dtype, kind, inputs is None, block, from_x % 16, to_out % 16)
        launcher = self._launchers.get(key)
        if launcher is not None:
            row = 0 if inputs is None else inputs.data_ptr()
            self.last = Launch(launcher, blocks, row, length, part, what)
            launcher.prepare(self.last)
            launcher.launch(from_x, to_out)
            return
        from moeclipse.ops.triton import peer_reduce

        row_of = space.table if inputs is None else inputs
        values = (x, out, row_of, space.table, space.counts, space.status, length, part, what, *self._sizes)
        constants = (space.num_ranks, kind, inputs is not None, from_x % 16 == 0, block)
        compiled = peer_reduce.all_reduce[(blocks, 1, 1)](*values, *constants, num_warps=16)
        if compiled is not None:  # None: the interpreter compiles nothing
            plain = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values]
            # Where the driver's launch does not fit, Triton launches every call.
            with suppress(RuntimeError, ValueError, AttributeError, OSError):
                self._launchers[key] = Launcher(compiled, x.get_device(), plain, 6)


class Launcher:
    """One compiled kernel with its arguments in place; only those that differ between calls are written."""

    def __init__(self, compiled: Any, device: int, values: Sequence[int], num_pointers: int) -> None:
        """`values`: first pointers, then 32-bit numbers. Who owns the memory behind them keeps it."""
        self._compiled, self._given = compiled, (device, values, num_pointers)
        self._device = device
        slots = [
            ctypes.c_uint64(value) if place < num_pointers else ctypes.c_int32(value)
            for place, value in enumerate(values)
        ]
        wanted = _num_parameters(compiled.asm["ptx"])
        if not 0 <= wanted - len(slots) <= 2:  # Triton adds up to two scratch pointers
            raise RuntimeError(f"the kernel takes {wanted} arguments, expected {len(slots)}")
        self._slots = slots + [ctypes.c_uint64(0)] * (wanted - len(slots))
        self._arguments = (ctypes.c_void_p * wanted)(*[ctypes.addressof(slot) for slot in self._slots])
        self._x, self._out, self._inputs = self._slots[:3]
        self._length, self._part, self._what = self._slots[6:9]
        threads = 32 * compiled.metadata.num_warps
        self._config = LaunchConfig((1, 1, 1), (threads, 1, 1), compiled.metadata.shared, None, None, 0)
        driver = cuda_driver()
        self._call, self._failure = driver.launch, driver.failure
        function, config = ctypes.c_void_p(compiled.function), ctypes.byref(self._config)
        self._fixed = (config, function, self._arguments, None)
        self.launch = self._bound()

    def again(self, launch: Launch) -> Launcher:
        """A launcher of its own for such calls, which writes two pointers and nothing else."""
        same = Launcher(self._compiled, *self._given)
        same.prepare(launch)
        return same

    def prepare(self, launch: Launch) -> None:
        self._config.grid[0] = launch.blocks
        self._inputs.value, self._what.value = launch.inputs, launch.what
        self._length.value, self._part.value = launch.length, launch.part

    def _bound(self) -> Callable[[int, int], None]:
        """The launch, for addresses of an input and a result. All that it needs is at hand, since the host is
        what a small all-reduce waits for."""
        into_x, into_out, config, device = self._x, self._out, self._config, self._device
        call, failure = self._call, self._failure
        at, function, arguments, none = self._fixed
        stream_of = raw_stream_function()
        last = 0  # the stream that `config` has

        def launch(x: int, out: int, _kept: object = self._slots) -> None:  # `arguments` has their addresses
            nonlocal last
            into_x.value, into_out.value = x, out
            stream = stream_of(device)
            if stream != last:
                config.stream = last = stream
            code = call(at, function, arguments, none)
            if code:
                raise failure("the launch of the all-reduce kernel", code)

        return launch


def _num_parameters(ptx: str) -> int:
    """Of the kernel's entry point, as the driver sees it."""
    entry = ptx[ptx.index(".entry") :]
    return entry[: entry.index(")")].count(".param")


def all_reduce_rms_norm_kernel(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    out: tuple[torch.Tensor, torch.Tensor],
    space: PeerSpace,
) -> None:
    """out = (normed, h); see `add_residual` and `rms_norm`."""
    from moeclipse.ops.triton import peer_reduce

    T, D = x_TD.shape
    block = 1 << (D - 1).bit_length()
    peer_reduce.all_reduce_rms_norm[(min(space.max_blocks, T),)](
        x_TD, residual_TD, weight_D, *out, space.table, space.counts, space.status, T, D, eps,
        name_of("norm", x_TD.dtype, T, D),
        space.area_bytes, space.head_bytes, space.limit_us, space.rank, space.max_blocks,
        W=space.num_ranks, BLOCK=block, num_warps=max(1, min(16, block // 256)),
    )  # fmt: skip
