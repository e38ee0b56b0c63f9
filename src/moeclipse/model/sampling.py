"""The next token of each text, chosen from its logits.

    p = softmax(logits / temperature), of the best `top_k` tokens, of these the fewest that hold `top_p`

Idea. One random number decides: tokens stand in order of their probability, and the number falls on one of
them. It is a function of (seed, row, place) alone, so a text does not depend on its neighbours, on the number
of ranks, or on what was written before it in the same process.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeclipse.model.sampling_config import SamplingConfig
from moeclipse.ops.precision import WIDE
from moeclipse.ops.random import key_of, uniform


def choose_tokens(
    logits_BV: torch.Tensor, config: SamplingConfig, rows: Sequence[int], place: int
) -> torch.Tensor:
    """[B]; `rows` are the numbers of the texts among all of them, `place` counts what each has written."""
    wide_BV = logits_BV.to(WIDE[logits_BV.dtype])
    if config.temperature == 0:
        return wide_BV.argmax(-1)
    best_BV, order_BV = (wide_BV / config.temperature).sort(dim=-1, descending=True, stable=True)
    if config.top_k:
        best_BV, order_BV = best_BV[:, : config.top_k], order_BV[:, : config.top_k]
    share_BV = best_BV.to(torch.float64).softmax(-1)
    before_BV = share_BV.cumsum(-1) - share_BV
    share_BV = share_BV.masked_fill(before_BV >= config.top_p, 0)
    ends_BV = share_BV.cumsum(-1)
    row_B = torch.tensor(list(rows), dtype=torch.int64, device=logits_BV.device)
    drawn_B1 = uniform(key_of(config.seed, "written", place), row_B)[:, None] * ends_BV[:, -1:]
    # The last token with a share ends where the sum does; rounding must not go beyond it.
    kept_B1 = (share_BV > 0).sum(-1, keepdim=True)
    chosen_B1 = torch.searchsorted(ends_BV, drawn_B1).clamp(max=kept_B1 - 1)
    return order_BV.gather(1, chosen_B1)[:, 0]
