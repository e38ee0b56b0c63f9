"""States that tokens write to, by hand and in documents.

Over ranks: `test_attention.py`; with a cache: `test_decode.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from small_model import MODEL, SETTINGS, positions

from moeclipse.model.config import ModelConfig
from moeclipse.model.delta_mixers import GatedDelta, KimiDelta
from moeclipse.model.layer import mixer_of
from moeclipse.model.lora_config import NO_LORA
from moeclipse.model.rotary import Positions, Rotary
from moeclipse.testing.compare import difference

SIZES = {"delta_key_dim": 3, "delta_value_dim": 5, "conv_width": 3}
X = torch.randn(7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
KINDS = {
    kind: replace(MODEL, mixers=(kind,), **SIZES) for kind in ("gated_delta", "kimi_delta", "short_conv")
}


def convolved(x_TC: torch.Tensor, weight_CJ: torch.Tensor) -> torch.Tensor:
    padded = torch.cat([x_TC.new_zeros(weight_CJ.shape[1] - 1, x_TC.shape[1]), x_TC])
    taps = [padded[j : j + len(x_TC)] * weight_CJ[:, j] for j in range(weight_CJ.shape[1])]
    return torch.stack(taps).sum(0)


def by_hand(mixer: GatedDelta | KimiDelta, kimi: bool) -> torch.Tensor:
    """Token by token, head by head, from what the module's docstring says."""
    weights = dict(mixer.named_parameters())

    def made(name: str, width: int) -> torch.Tensor:
        x = F.linear(X, weights[f"{name}.weight"])
        return F.silu(convolved(x, weights[f"conv_{name}.weight"])).unflatten(1, (-1, width))

    q, k, v = made("query", 3), made("key", 3), made("value", 3 if kimi else 5)
    beta = F.linear(X, weights["write.weight"]).sigmoid()
    heads = v.shape[1]
    narrow = {name: F.linear(X, weights[f"{name}_down.weight"]) if kimi else X for name in ("gate", "decay")}
    gate = F.linear(narrow["gate"], weights["gate.weight"]).unflatten(1, (heads, -1))
    decay = F.softplus(F.linear(narrow["decay"], weights["decay.weight"]) + weights["shift"])
    decay = (weights["rate"].exp()[:, None] * decay.unflatten(1, (heads, -1))).neg().exp()
    out = torch.zeros_like(v)
    for head in range(heads):
        state = torch.zeros(3, v.shape[2], dtype=torch.float64)
        of_key = head * k.shape[1] // heads
        for t in range(len(X)):
            key = k[t, of_key] / (k[t, of_key].square().sum() + 1e-6).sqrt()
            query = q[t, of_key] / (q[t, of_key].square().sum() + 1e-6).sqrt() / 3**0.5
            state = decay[t, head, :, None] * state
            state = state + beta[t, head] * torch.outer(key, v[t, head] - key @ state)
            out[t, head] = query @ state
    opened = gate.sigmoid() if kimi else F.silu(gate)
    normed = F.rms_norm(out, out.shape[-1:], weights["norm.weight"], 1e-5) * opened
    return F.linear(normed.flatten(1), weights["out.weight"])


@pytest.mark.parametrize("kind", ["gated_delta", "kimi_delta"])
def test_by_hand(kind: str) -> None:
    config = KINDS[kind]
    mixer = mixer_of(config, SETTINGS, NO_LORA)
    assert isinstance(mixer, GatedDelta | KimiDelta)
    mixer.norm.weight.data.normal_(generator=torch.Generator().manual_seed(3))
    assert mixer.rate.exp().max() < 16
    assert difference(mixer(X, positions(config, 7)), by_hand(mixer, kind == "kimi_delta")) < 1e-13


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_documents_in_a_sample_are_samples_of_their_own(config: ModelConfig) -> None:
    mixer = mixer_of(config, SETTINGS, NO_LORA)
    documents = torch.tensor([[5, 5, 5, 5, 9, 9, 9]])
    packed = mixer(X, Positions.of(Rotary.of(config), 7, X.device, documents_BS=documents))
    apart = torch.cat([mixer(X[:4], positions(config, 4)), mixer(X[4:], positions(config, 3))])
    assert difference(packed, apart) < 1e-13
    assert difference(mixer(X, positions(config, 7)), apart) > 1e-3
