"""Norms of queries and keys; that heads may be cut over ranks, `test_attention.py` sees."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from small_model import SETTINGS

from moeclipse.model.qk_norm import HeadNorm, WholeNorm
from moeclipse.tensor.cut import cut_of, share_of
from moeclipse.testing.compare import difference


def test_by_head_and_whole() -> None:
    x = torch.randn(5, 24, dtype=torch.float64)
    head, whole = HeadNorm(6, SETTINGS, 1e-5), WholeNorm(24, 6, SETTINGS, 1e-5, "queries")
    head.weight.data.normal_()
    whole.weight.data.normal_()
    by_head = F.rms_norm(x.view(5, 4, 6), (6,), head.weight, 1e-5)
    assert difference(head(x.view(5, 4, 6)), by_head) < 1e-14
    assert difference(whole(x), F.rms_norm(x, (24,), whole.weight, 1e-5)) < 1e-14
    assert whole(x[:0]).shape == (0, 24)


def test_their_gradients_are_shares_and_cuts() -> None:
    assert share_of(HeadNorm(6, SETTINGS, 1e-5).weight) == "sum"
    cut = cut_of(WholeNorm(24, 6, SETTINGS, 1e-5, "queries").weight)
    assert cut is not None
    assert cut.shape == (24,)


def test_low_precision_is_normed_in_fp32() -> None:
    whole = WholeNorm(24, 6, SETTINGS, 1e-5, "queries")
    x = torch.randn(5, 24)
    whole.weight.data = torch.ones(24, dtype=torch.bfloat16)
    exact = F.rms_norm(x.bfloat16().double(), (24,), None, 1e-5)
    assert difference(whole(x.bfloat16()), exact) < 2**-8
