"""In which order equal numbers go, and which ones count as equal.

    of a token    experts and groups are compared with all bits; of equal ones the lower number comes first
    of several    scores are compared with half of their bits; equal ones go by token, then by choice

Equal tokens have equal scores but for the last bits. These depend on the order of sums, so on the schedule
of an exchange, which must not change the model: it must not decide which token finds room. Experts of one
token are compared within one product; half of its bits would choose others than the weights were trained
with wherever two experts are close.

Planners have the rule of several for averages (`balance/ties`); shadows count whole rows, which tie exactly.
Hazard: `torch.topk` does not say which of two equal ones it takes, and kernels take another one.
"""

from __future__ import annotations

import torch

_DROPPED = {torch.float64: (torch.int64, 26), torch.float32: (torch.int32, 12)}
"""The whole numbers of a type's size, and how many of its last bits nobody compares."""


def best_of(values_TE: torch.Tensor, k: int) -> torch.Tensor:
    """The numbers of each row's k largest, the largest first; of equal ones the first. Nobody waits."""
    return _best_by_sort(values_TE, k) if values_TE.dtype != torch.float32 else _best_by_key(values_TE, k)


def _best_by_sort(values_TE: torch.Tensor, k: int) -> torch.Tensor:
    return values_TE.sort(dim=1, descending=True, stable=True).indices[:, :k]


def _best_by_key(values_TE: torch.Tensor, k: int) -> torch.Tensor:
    """A number and its place in one whole number, so that no two are equal: sorting all takes longer."""
    values_TE = torch.where(values_TE.isnan(), torch.inf, values_TE) + 0.0  # -0.0 is 0.0
    bits_TE = values_TE.view(torch.int32).long()
    ordered_TE = torch.where(bits_TE < 0, bits_TE ^ 0x7FFFFFFF, bits_TE)
    place_E = torch.arange(values_TE.shape[1] - 1, -1, -1, device=values_TE.device)
    return (ordered_TE * 2**32 + place_E).topk(k, dim=1).indices


def half_of_bits(values: torch.Tensor) -> torch.Tensor:
    """Rounded to half of the digits that the type has; no order is turned round."""
    whole, dropped = _DROPPED[values.dtype]
    bits = values.detach().contiguous().view(whole)
    rounded: torch.Tensor = (bits + 2 ** (dropped - 1)) & -(2**dropped)
    return rounded.view(values.dtype)


def order_of(scores_TK: torch.Tensor) -> torch.Tensor:
    """The places of all scores of several tokens, [T * K]: high ones first, equal ones as they stand."""
    return half_of_bits(scores_TK).flatten().argsort(descending=True, stable=True)
