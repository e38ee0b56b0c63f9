"""Numbers picked by index: out_i = values[index_i], and 0 where the index is -1.

How a number of each (token, choice) pair gets to its row, and that of a row back to its pair.
"""

from __future__ import annotations

import torch

from moeclipse.ops.launch import launch

BLOCK = 1024


def pick_reference(
    values: torch.Tensor, index: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    if not len(values):  # then all are nobody
        return values.new_zeros(index.shape, dtype=dtype)
    return torch.where(index >= 0, values[index.clamp(min=0).long()], 0).to(dtype or values.dtype)


def pick(values: torch.Tensor, index: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """One number for each of `index`, whose shape it takes; `values` is a vector. `dtype`: of the result."""
    fits = values.is_cuda and index.numel() > 0 and not torch.compiler.is_compiling()
    return (pick_kernel if fits else pick_reference)(values, index, dtype)


def pick_kernel(values: torch.Tensor, index: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    from moeclipse.ops.triton import pick as kernels

    index, out = index.contiguous(), values.new_empty(index.shape, dtype=dtype)
    grid, numbers = (-(-index.numel() // BLOCK),), (index.numel(), values.stride(0))
    launch(kernels.pick, grid, values, index, out, *numbers, BLOCK=BLOCK)
    return out
