"""The gradient of a lookup: rows of dh added to the rows of a table that they were read from.

    into[ids_t] += dh_t

Idea. Many tokens read one row, and adding them up one after the other is what takes long. A small table is
short of rows, not of work: its sums are one product, [ids = v]^T dh, exact in every term.

Contract. `into` may be wider than dh; an id outside of the table adds nothing where `outside` allows some.
Two runs give the same bits.
"""

from __future__ import annotations

import torch

from moeclipse.ops.grouped_gemm import KERNEL_DTYPES, dense_wgrad

SMALL_TABLE = 4096
"""Rows up to which the product is made."""


def embedding_grad_reference(
    ids_T: torch.Tensor, d_h_TD: torch.Tensor, into_VD: torch.Tensor, *, outside: bool = False
) -> None:
    if outside:
        inside_T = (ids_T >= 0) & (ids_T < len(into_VD))
        ids_T, d_h_TD = ids_T[inside_T], d_h_TD[inside_T]
    into_VD.index_put_((ids_T,), d_h_TD.to(into_VD.dtype), accumulate=True)


def embedding_grad(
    ids_T: torch.Tensor, d_h_TD: torch.Tensor, into_VD: torch.Tensor, *, outside: bool = False
) -> None:
    fits = d_h_TD.is_cuda and d_h_TD.dtype in KERNEL_DTYPES and 0 < len(into_VD) <= SMALL_TABLE
    (embedding_grad_product if fits else embedding_grad_reference)(ids_T, d_h_TD, into_VD, outside=outside)


def embedding_grad_product(
    ids_T: torch.Tensor, d_h_TD: torch.Tensor, into_VD: torch.Tensor, *, outside: bool = False
) -> None:
    del outside  # such an id is equal to no row
    row_V = torch.arange(len(into_VD), device=ids_T.device)
    dense_wgrad((ids_T[:, None] == row_V).to(d_h_TD.dtype), d_h_TD, into_VD)
