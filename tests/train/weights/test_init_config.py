"""What `[init]` refuses."""

from __future__ import annotations

from moeclipse.core.config import problems_of, with_values
from moeclipse.train.config import TrainConfig
from moeclipse.train.weights.init_config import InitConfig, is_kept


def test_noise_needs_experts_that_are_made() -> None:
    assert not list(problems_of(InitConfig(upcycle="copy", noise=0.5), "init."))
    assert "init.noise (0.5) needs init.upcycle" in next(problems_of(InitConfig(noise=0.5), "init."))
    assert "must not be negative" in next(problems_of(InitConfig(upcycle="split", noise=-1.0), "init."))


def test_upcycling_needs_a_model_and_plain_experts() -> None:
    values = {"init.upcycle": "copy", "moe.num_shared_experts": 1, "moe.activation": "gelu"}
    told = list(problems_of(with_values(TrainConfig(), values)))
    assert any("needs run.init_from" in text for text in told)
    assert any("moe.num_shared_experts (1) cannot go with init.upcycle" in text for text in told)
    assert any("moe.activation ('gelu') cannot go with init.upcycle" in text for text in told)
    sound = {"init.upcycle": "copy", "run.init_from": "dense"}
    assert not list(problems_of(with_values(TrainConfig(), sound)))


def test_what_a_dense_model_says_of_the_new_one() -> None:
    assert is_kept("model.d_model")
    assert not is_kept("model.d_ff")
    assert not is_kept("moe.d_ff")
