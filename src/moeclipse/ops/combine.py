"""Sum rows that belong together, with weights, in a wider type.

    out_r = sum over i with index_i = r of weight_i * rows_i

Rows are added in the order they stand in, in fp32 (fp64 for fp64 rows), and rounded once.
"""

from __future__ import annotations

import torch


def sum_rows(
    rows_MD: torch.Tensor, index_M: torch.Tensor, num_rows: int, weight_M: torch.Tensor | None = None
) -> torch.Tensor:
    """out [num_rows, D] in the dtype of `rows_MD`; a row that nothing points at is zero."""
    wide = torch.float64 if rows_MD.dtype == torch.float64 else torch.float32
    values_MD = rows_MD.to(wide)
    if weight_M is not None:
        values_MD = values_MD * weight_M.to(wide)[:, None]
    out = torch.zeros(num_rows, rows_MD.shape[1], dtype=wide, device=rows_MD.device)
    out.index_add_(0, index_M, values_MD)
    return out.to(rows_MD.dtype)
