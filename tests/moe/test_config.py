"""What a layer may be made of: each mistake is named, with the value and what would do."""

from __future__ import annotations

import math

import pytest

from moeclipse.moe.config import ExchangeConfig, GateConfig, MoEConfig, gate_problems, layer_problems

E = 8


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GateConfig(top_k=0), "gate.top_k (0) must be at least 1"),
        (GateConfig(kind="switch", top_k=2), "gate.top_k (2) must be 1 for gate.kind = 'switch'"),
        (GateConfig(kind="noisy", bias_rate=0.1), "gate.bias_rate (0.1) needs gate.kind softmax or sigmoid"),
        (GateConfig(overflow="pad"), "gate.overflow = 'pad' needs gate.capacity_factor > 0"),
        (
            GateConfig(num_groups=4, top_groups=5),
            "gate.top_groups (5) must be between 1 and gate.num_groups (4)",
        ),
        (GateConfig(top_k=9), "gate.top_k (9) must be at most moe.num_experts (8)"),
        (GateConfig(num_groups=3), "gate.num_groups (3) must divide moe.num_experts (8)"),
        (GateConfig(top_k=3, num_groups=4), "must be at most the 2 experts of gate.top_groups (1) groups"),
        (GateConfig(z_loss=-1.0), "gate.z_loss (-1.0) must not be negative"),
    ],
)
def test_gates_that_cannot_be(config: GateConfig, message: str) -> None:
    assert any(message in problem for problem in [*config.problems(), *gate_problems(config, E)])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GateConfig(choose="gap", kind="noisy"), "gate.choose = 'gap' needs gate.kind softmax or sigmoid"),
        (GateConfig(choose="top_p", top_k=1), "needs gate.top_k (the most experts of a token) of at least 2"),
        (GateConfig(mean_experts=1.5), "gate.mean_experts (1.5) needs gate.choose = 'top_p'"),
        (GateConfig(choose="gap", mean_experts=1.5), "needs gate.choose = 'top_p', not 'gap'"),
        (GateConfig(choose="top_p", mean_experts=2.0), "must lie between 1 and gate.top_k (2)"),
        (GateConfig(choose="top_p", top_p=1.0), "gate.top_p (1.0) must lie between 0 and 1"),
        (GateConfig(choose="threshold", threshold=-0.1), "gate.threshold (-0.1) must be between 0 and 1"),
        (GateConfig(choose="threshold", threshold=0.13), "must be at most 1 / moe.num_experts (0.125) with"),
        (GateConfig(choose="gap", gap_rate=2.0), "gate.gap_rate (2.0) must be between 0 and 1"),
        (GateConfig(choose="gap", gap_factor=-1.0), "gate.gap_factor (-1.0) must not be negative"),
        (GateConfig(choose="top_p", mean_rate=0.0), "gate.mean_rate (0.0) must be positive"),
    ],
)
def test_dynamic_gates_that_cannot_be(config: GateConfig, message: str) -> None:
    assert any(message in problem for problem in [*config.problems(), *gate_problems(config, E)])


@pytest.mark.parametrize("share", [-0.1, 1.01, math.nan])
def test_shares_that_cannot_be(share: float) -> None:
    problems = list(GateConfig(max_leaving=share).problems())
    assert problems == [f"gate.max_leaving ({share}) must be between 0 and 1; 1 is no limit"]
    assert not list(GateConfig(max_leaving=0.0).problems())


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (MoEConfig(num_experts=0), "moe.num_experts (0) must be at least 1"),
        (MoEConfig(d_ff=0), "moe.d_ff (0) must be at least 1"),
        (MoEConfig(num_shared_experts=-1), "moe.num_shared_experts (-1) must not be negative"),
        (MoEConfig(group_size=0), 'moe.group_size (0) must be at least 1, or "auto"'),
        (MoEConfig(chunks=-2), 'moe.chunks (-2) must be at least 1, or "auto"'),
        (MoEConfig(num_experts=4, shadow=(1, 4)), "moe.shadow names expert 4; experts are 0 to 3"),
    ],
)
def test_experts_that_cannot_be(config: MoEConfig, problem: str) -> None:
    assert list(config.problems()) == [problem]


def test_what_does_not_fit_together() -> None:
    padded = GateConfig(capacity_factor=1.0, overflow="pad")
    (told,) = layer_problems(MoEConfig(schedule="smart"), padded)
    assert told.startswith("gate.overflow = 'pad' needs moe.schedule = 'blocking'")
    sharded = MoEConfig(expert_tp="sharded", expert_bias=True)
    (told,) = layer_problems(sharded, GateConfig(), tp=2)
    assert "moe.expert_bias needs moe.expert_tp = 'folded' with parallel.tp (2)" in told
    assert not list(layer_problems(sharded, GateConfig(), tp=1))


def test_as_it_comes_nothing_is_wrong() -> None:
    assert not [*GateConfig().problems(), *MoEConfig().problems()]
    assert not list(layer_problems(MoEConfig(), GateConfig(), tp=4))


def test_the_exchange_is_what_does_not_change_the_model() -> None:
    given = {"schedule": "smart", "chunks": 2, "shadow": (0,)}
    assert MoEConfig(num_experts=4, **given).exchange == ExchangeConfig(**{"transport": "auto", **given})


def test_room_is_made_for_the_mean_number_of_experts() -> None:
    assert GateConfig(top_k=4).expected_experts == 4
    assert GateConfig(choose="top_p", top_k=4, mean_experts=2.5).expected_experts == 2.5
