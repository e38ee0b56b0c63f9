"""Latent attention with a cache reads the latent itself; what it computes is `test_attention.py`'s."""

from __future__ import annotations

import torch
from small_model import MLA, SETTINGS, positions

from moeclipse.model.latent_attention import LatentAttention
from moeclipse.testing.compare import difference


def test_no_token_hears_of_those_behind_it() -> None:
    attention = LatentAttention(MLA, SETTINGS)
    x = torch.randn(6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    whole = attention(x, positions(MLA, 6))
    assert difference(attention(x[:4], positions(MLA, 4)), whole[:4]) < 1e-13
