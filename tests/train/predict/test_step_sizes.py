"""Sizes of a run's step, for the simulator."""

from __future__ import annotations

from moeclipse.core.config import with_values
from moeclipse.cost.hardware import device
from moeclipse.model.config import ModelConfig
from moeclipse.train.config import TrainConfig
from moeclipse.train.predict.step_sizes import attention_sizes, step_work, value_bytes


def test_sizes_of_attention() -> None:
    assert attention_sizes(ModelConfig(d_model=8, num_heads=2, num_kv_heads=1, head_dim=4)) == (
        8 * 8 + 2 * 8 * 4 + 8 * 8,
        8,
    )
    latent = ModelConfig(
        d_model=8,
        attention="mla",
        num_heads=2,
        kv_lora_rank=3,
        qk_nope_head_dim=4,
        qk_rope_head_dim=2,
        v_head_dim=5,
    )
    assert attention_sizes(latent) == (8 * 12 + 8 * (3 + 2) + 3 * 2 * (4 + 5) + 2 * 5 * 8, 12)


def test_work_is_that_of_a_microbatch_on_a_rank() -> None:
    values = {"data.batch_size": 16, "data.seq_len": 128, "optim.accumulate": 4, "moe.num_experts": 8}
    config = with_values(
        TrainConfig(), {**values, "moe.num_shared_experts": 2, "moe.d_ff": 24, "gate.top_k": 2}
    )
    work = step_work(config, dp=2, ep=2, row_value_bytes=2.0)
    assert work.layer.tokens == 16 * 128 // (4 * 4)
    assert (work.layer.num_experts, work.layer.top_k, work.layer.shared_width) == (8, 2, 48)
    assert (work.dp, work.ep, work.tp) == (2, 2, 1)
    wide = with_values(config, {"moe.shared_d_ff": 40})
    assert step_work(wide, dp=2, ep=2, row_value_bytes=2.0).layer.shared_width == 40


def test_auto_is_what_a_run_takes_there() -> None:
    assert value_bytes("auto", device("cpu")) == 4.0
    assert value_bytes("auto", device("h200")) == 2.0
    assert value_bytes("float64", device("h200")) == 8.0
