"""What is refused of the optimizer's types, and with which advice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moeclipse.core.config import problems_of, with_values
from moeclipse.train.config import TrainConfig
from moeclipse.train.optim.optim_config import OptimConfig, type_problems


def test_a_second_moment_that_cannot_fall_is_refused() -> None:
    (problem,) = OptimConfig(state="bf16", beta2=0.999).problems()
    assert "lower optim.beta2 (0.95 is usual), or set optim.state = 'fp32'" in problem
    stuck = torch.tensor(1.0).bfloat16()
    assert torch.equal(stuck * 0.999, stuck), "the reason"
    assert not list(OptimConfig(state="bf16", beta2=0.95).problems())
    assert not list(OptimConfig(beta2=0.999).problems())


@pytest.mark.parametrize("dtype", ["auto", "float32", "float16", "float64"])
@pytest.mark.parametrize("change", [{"master": "none"}, {"master": "low-bits"}, {"main_grad": "bf16"}])
def test_what_only_bfloat16_can_have(change: dict[str, Any], dtype: str) -> None:
    (problem,) = type_problems(OptimConfig(**change), dtype)
    (key,) = change
    assert problem.startswith(f"optim.{key} = ")
    assert f"set model.dtype ({dtype}) to 'bfloat16'" in problem
    assert not list(type_problems(OptimConfig(**change), "bfloat16"))


def test_float64_keeps_its_moments() -> None:
    (problem,) = type_problems(OptimConfig(state="bf16"), "float64")
    assert problem.endswith("set it to 'fp32'")
    assert not list(type_problems(OptimConfig(state="bf16"), "float32"))
    assert list(type_problems(OptimConfig(state="8bit"), "float64"))
    assert not list(type_problems(OptimConfig(state="8bit"), "float32"))


def test_columns_of_8_bit_moments_are_cut_between_blocks() -> None:
    """Rows of 512 have blocks of 256: two ranks may share them, four may not."""
    wide = {"optim.state": "8bit", "model.num_heads": 4, "model.num_kv_heads": 4, "model.head_dim": 128}
    wide |= {"model.num_dense_layers": 1, "model.d_ff": 512, "model.num_layers": 2, "moe.d_ff": 24}
    assert not list(problems_of(with_values(TrainConfig(), {**wide, "parallel.tp": 2})))
    attention, dense = problems_of(with_values(TrainConfig(), {**wide, "parallel.tp": 4}))
    assert attention.startswith("optim.state = '8bit' needs rows that are cut between blocks: attention")
    assert "model.d_ff (512) has blocks of 256, and parallel.tp gives columns 0 to 128" in dense
    assert dense.endswith("lower parallel.tp, or set optim.state = 'bf16'")
    folded = {**wide, "parallel.tp": 2, "moe.d_ff": 32}
    assert not list(problems_of(with_values(TrainConfig(), folded)))
    (experts,) = problems_of(with_values(TrainConfig(), {**folded, "moe.expert_tp": "sharded"}))
    assert "moe.d_ff (32) has blocks of 32" in experts


def test_a_run_is_told_before_it_begins() -> None:
    (problem,) = with_values(TrainConfig(), {"optim.master": "none"}).problems()
    assert "needs a bfloat16 model" in problem


def test_a_share_of_decay_needs_a_schedule_that_has_one() -> None:
    assert not list(OptimConfig(schedule="wsd", decay_share=0.5).problems())
    (problem,) = OptimConfig(schedule="linear", decay_share=0.5).problems()
    assert problem.endswith("leave it out, or choose wsd")
    (problem,) = OptimConfig(schedule="wsd", decay_share=0.0).problems()
    assert problem == "optim.decay_share (0.0) must be above 0 and at most 1"
    (problem,) = problems_of(with_values(TrainConfig(), {"optim.schedule": "wsd", "optim.decay_share": 1.5}))
    assert "decay_share (1.5)" in problem
