"""A descriptor that was kept says what Triton's own would say, and of the tensor that is given now."""

from __future__ import annotations

import gc
import weakref
from dataclasses import fields
from typing import Any

import pytest
import torch
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from moeclipse.ops import descriptors
from moeclipse.ops.descriptors import blocks, ragged


def told(descriptor: Any) -> dict[str, Any]:
    found = {each.name: getattr(descriptor, each.name) for each in fields(descriptor)}
    lists = {name: list(found[name]) for name in ("shape", "strides", "block_shape")}
    return found | lists | {"base": descriptor.base.data_ptr()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kept_ones_are_tritons(dtype: torch.dtype) -> None:
    for rows, columns in ((5, 64), (7, 64), (5, 128), (5, 64)):
        both = torch.zeros(rows, 2 * columns, dtype=dtype)
        for x in (both, both[:, columns:], torch.zeros(rows, columns, dtype=dtype)):
            assert told(blocks(x, [16, 32])) == told(TensorDescriptor.from_tensor(x, [16, 32]))
            assert told(ragged(x, [16, 32])) == told(create_ragged_descriptor(x, [16, 32]))


def test_numbers_of_rows_share_one() -> None:
    ragged(torch.zeros(1, 64), [16, 32])
    before = descriptors._ragged.cache_info().currsize
    for rows in range(1, 20):
        ragged(torch.zeros(rows, 64), [16, 32])
    assert descriptors._ragged.cache_info().currsize == before


def test_what_asks_for_another_kernel_is_another_kind() -> None:
    x = torch.zeros(16, 64)
    kinds = [
        blocks(x, [16, 32]).kind,
        blocks(x, [16, 64]).kind,
        blocks(x.bfloat16(), [16, 32]).kind,
        ragged(x, [16, 32]).kind,
        blocks(x, [16, 32], (128, 32)).kind,
        blocks(x, [16, 32], (64, 32)).kind,
    ]
    assert len(set(kinds)) == len(kinds)
    assert blocks(torch.zeros(32, 64), [16, 32]).kind == kinds[0]


def test_layouts_are_those_of_gluon() -> None:
    x = torch.zeros(16, 64, dtype=torch.bfloat16)
    for _ in range(2):
        assert blocks(x, [16, 64], (128, 16)).layout == descriptors.gluon_layout(128, 16, 2)
        assert ragged(x, [16, 64], (128, 16)).layout == descriptors.gluon_layout(128, 16, 4)


def test_no_tensor_is_kept_alive() -> None:
    x = torch.zeros(16, 64)
    gone = weakref.ref(x)
    blocks(x, [16, 32])
    del x
    gc.collect()
    assert gone() is None


def test_an_address_that_the_copy_engine_cannot_take_is_refused() -> None:
    whole = torch.zeros(16 * 64 + 1)
    aligned, shifted = whole[:-1].view(16, 64), whole[1:].view(16, 64)
    blocks(aligned, [16, 32])
    with pytest.raises(ValueError, match="multiples of 16"):
        blocks(shifted, [16, 32])
