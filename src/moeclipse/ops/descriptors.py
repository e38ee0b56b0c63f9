"""Descriptors: what the copy engine is told of a tensor, whose blocks a kernel loads and stores.

    blocks(weight, [1, 64, 128])       blocks of a tensor
    ragged(rows, [128, 64])            blocks of rows that end where a group does (`tiles.load_clipped`)

Triton checks each one when it is made, 3 to 6 microseconds. All but the address depends on shape, strides and
type, so a checked one is kept for each of these, and copied. `kind` says which kernel it asks for (`launch`).

Hazard: the driver makes descriptors in the context of the calling thread, and a thread of autograd has none
before its first launch: whoever makes a descriptor here gets the context of the thread's device.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

from moeclipse.ops.cuda_driver import cuda_driver

Operand = Any
"""A tensor, or Triton's descriptor of one, whose class is imported where it is made."""
Layout = tuple[int, int]
"""Of Gluon's kernels: bytes that are swizzled together, bits of an element."""


def blocks(operand: torch.Tensor, block: list[int], layout: Layout | None = None) -> Operand:
    return _copy(_blocks(operand.shape, operand.stride(), operand.dtype, tuple(block), layout), operand)


def ragged(rows: torch.Tensor, block: list[int], layout: Layout | None = None) -> Operand:
    """What lies past a group's last row reads as zero and is not written; how many rows there are is open."""
    return _copy(_ragged(rows.shape[1], rows.stride(), rows.dtype, tuple(block), layout), rows)


def _copy(form: Operand, base: torch.Tensor) -> Operand:
    """The same of a tensor, whose shape and strides were checked."""
    if base.data_ptr() & 15:
        raise ValueError(
            f"the copy engine takes addresses that are multiples of 16, not {base.data_ptr():#x}"
        )
    if base.is_cuda and not getattr(_threads(), "has_context", False):
        cuda_driver().enter(torch.cuda.current_device())
        _threads().has_context = True
    made = object.__new__(type(form))
    made.__dict__.update(form.__dict__, base=base)
    return made


@functools.cache
def _threads() -> threading.local:
    return threading.local()


@functools.lru_cache(maxsize=1 << 12)
def _blocks(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    block: tuple[int, ...],
    layout: Layout | None,
) -> Operand:
    from triton.tools.tensor_descriptor import TensorDescriptor

    like = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return _of_kind(TensorDescriptor.from_tensor(like, list(block)), layout)


@functools.lru_cache(maxsize=1 << 12)
def _ragged(
    columns: int, strides: tuple[int, ...], dtype: torch.dtype, block: tuple[int, ...], layout: Layout | None
) -> Operand:
    from triton.tools.ragged_tma import create_ragged_descriptor

    like = torch.empty_strided((1, columns), strides, dtype=dtype, device="meta")
    return _of_kind(create_ragged_descriptor(like, list(block)), layout)


def _of_kind(plain: Operand, layout: Layout | None) -> Operand:
    made = plain
    if layout is not None:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        found = gluon_layout(*layout, len(plain.shape))
        made = TensorDescriptor(plain.base, plain.shape, plain.strides, plain.block_shape, found)
    made.kind = (type(made), plain.base.dtype, *made.block_shape, layout)
    return made


@functools.cache
def gluon_layout(swizzle: int, bits: int, rank: int) -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(swizzle, bits, rank=rank)
