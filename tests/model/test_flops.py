"""Work of a step, by hand."""

from __future__ import annotations

import pytest

from moeclipse.cost.hardware import DEVICES
from moeclipse.model.config import ModelConfig
from moeclipse.model.flops import LeastWork, device_of
from moeclipse.moe.config import GateConfig, MoEConfig


def test_by_hand() -> None:
    model = ModelConfig(vocab_size=10, num_layers=2, d_model=8, num_heads=2, num_kv_heads=1, head_dim=4)
    work = LeastWork.of(model, MoEConfig(num_experts=4, d_ff=16), GateConfig(top_k=2), tokens=6, seq_len=3)
    attention = 8 * 8 + 2 * 8 * 4 + 8 * 8
    layer = attention + 4 * 8 + 2 * 3 * 8 * 16
    assert work.flops == 6 * (6 * (2 * layer + 10 * 8) + 6 * 2 * 2 * (4 + 4) * 3)
    everything = 2 * (attention + 4 * 8 + 4 * 3 * 8 * 16 + 2 * 8) + 2 * 10 * 8 + 8
    assert work.update_bytes == 34 * everything


def test_a_tied_embedding_is_a_product_too() -> None:
    apart, tied = (
        LeastWork.of(ModelConfig(tie_embeddings=tie), MoEConfig(), GateConfig(), tokens=1, seq_len=1)
        for tie in (False, True)
    )
    assert apart.flops == tied.flops


def test_speed_is_of_all_ranks() -> None:
    work = LeastWork(flops=989e12 * 0.78, update_bytes=4.8e12)
    assert work.limit_s(DEVICES["h200"], 1) == pytest.approx(2.0)
    found = work.speed(2.0, DEVICES["h200"], 2)
    assert found == pytest.approx({"mfu": 0.78 / 4, "of_limit": 0.5})


@pytest.mark.parametrize(("name", "known"), [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100")])
def test_devices_by_their_names(name: str, known: str) -> None:
    assert device_of(name) is DEVICES[known]
    assert device_of("NVIDIA T4") is None
