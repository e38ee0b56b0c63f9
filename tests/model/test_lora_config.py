"""What `[lora]` refuses, and what it says of names."""

from __future__ import annotations

from moeclipse.core.config import problems_of, with_values
from moeclipse.model.lora_config import LoraConfig, is_adapter
from moeclipse.train.config import TrainConfig


def told(**values: object) -> str:
    return "\n".join(problems_of(LoraConfig(**values), "lora."))  # type: ignore[arg-type]


def test_problems() -> None:
    assert told(rank=8) == ""
    assert "lora.rank (-1) must not be negative" in told(rank=-1)
    assert "lora.alpha (0.0) must be positive" in told(alpha=0.0)
    assert "must be some of q, k, v, o, experts" in told(targets=("q", "gate"))
    assert "must be some of" in told(targets=())
    assert "needs lora.rank" in told(adapter="somewhere")


def test_problems_with_the_rest() -> None:
    def problems(**values: object) -> str:
        given = {key.replace("__", "."): value for key, value in values.items()}
        return "\n".join(problems_of(with_values(TrainConfig(), {"lora.rank": 4, **given})))

    assert problems() == ""
    assert problems(model__attention="mla") == ""
    assert problems(model__attention="mla", lora__targets=("kv_up", "experts")) == ""
    assert "lora.targets names kv_up, which latent attention has alone" in problems(lora__targets=("kv_up",))
    assert "cannot go with model.memory" in problems(model__memory=4, data__order="stream")
    assert problems(parallel__tp=2, moe__expert_tp="sharded") == ""
    told = problems(parallel__tp=2, moe__expert_tp="sharded", placement__planner="incremental")
    assert "placement.planner ('incremental'), placement.slots and slots_per_rank cannot go with" in told


def test_scale_and_names() -> None:
    assert LoraConfig(rank=4, alpha=8.0).scale == 2.0
    assert LoraConfig(rank=4, alpha=8.0, rslora=True).scale == 4.0
    assert LoraConfig(rank=4, alpha=8.0, rslora=True).fingerprint()["lora"]["rslora"]
    assert LoraConfig(rank=4).projections == ("up", "down")
    down = LoraConfig(rank=4, targets=("q", "down"))
    assert [down.has(name) for name in ("q", "v", "experts", "up", "down")] == [
        True,
        False,
        True,
        False,
        True,
    ]
    latent = LoraConfig(rank=4, targets=("q", "kv_up"))
    assert [latent.has(name) for name in ("q_down", "q_up", "kv_down", "kv_up")] == [True, True, False, True]
    assert LoraConfig(rank=4, targets=("v",)).has("kv_down")
    assert LoraConfig(targets=("up",)).projections == ()
    assert not LoraConfig().has("q")
    assert LoraConfig(rank=1).has("experts")
    assert is_adapter("layers.0.moe.experts.lora_up_a")
    assert not is_adapter("layers.0.attention.q_lora.weight")
