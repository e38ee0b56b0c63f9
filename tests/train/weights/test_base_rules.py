"""What a base in few bits cannot go with is refused in one sentence, before ranks start."""

from __future__ import annotations

from typing import Any

import pytest

from moeclipse.core.config import problems_of, with_values
from moeclipse.train.config import TrainConfig
from moeclipse.train.placement.may_move import as_far_as_it_goes
from moeclipse.train.weights.base_rules import few_bits_problems

NF4: dict[str, Any] = {"lora.rank": 4, "model.base": "nf4", "model.dense_base": "nf4"}


def configuration(**values: Any) -> TrainConfig:
    return with_values(TrainConfig(), {**NF4, **values})


def test_it_needs_adapters_and_little_else() -> None:
    assert not list(problems_of(configuration()))
    config = with_values(TrainConfig(), {"model.base": "fp8"})
    given = (config.model, config.moe, config.lora, config.placement, 1, "off")
    (text,) = few_bits_problems(*given)
    assert (
        text
        == "model.base ('fp8') needs lora.rank: what is kept in few bits is not trained, its adapters are"
    )


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"lora.rank": 0}, "model.dense_base ('nf4') needs lora.rank"),
        ({"model.num_dense_layers": 4}, "model.base ('nf4') needs layers with experts; leave it empty"),
        (
            {"moe.d_ff": 3, "model.d_model": 9},
            "cannot keep up of an expert, 6 x 9: columns (9) is no multiple of 2",
        ),
        ({"moe.d_ff": 3, "model.d_model": 10}, "down of an expert, 10 x 3: columns (3) is no multiple of 2"),
        (
            {"model.base": "mxfp4", "moe.d_ff": 40},
            "down of an expert, 128 x 40: columns (40) is no multiple of 32",
        ),
        (
            {"model.head_dim": 2, "model.num_kv_heads": 1, "model.d_model": 6},
            "cannot keep k of attention, 2 x 6",
        ),
        ({"model.attention": "mla", "model.kv_lora_rank": 9}, "cannot keep kv_up of attention, 256 x 9"),
        ({"moe.num_shared_experts": 1, "moe.shared_d_ff": 5}, "cannot keep down of a shared expert, 128 x 5"),
        ({"model.num_dense_layers": 1, "model.d_ff": 7}, "cannot keep down of a dense layer, 128 x 7"),
        ({"parallel.tp": 2}, "model.dense_base ('nf4') needs parallel.tp = 1, not 2"),
        ({"parallel.tp": 2, "moe.expert_tp": "sharded"}, "cannot go with moe.expert_tp = 'sharded'"),
        ({"placement.planner": "incremental"}, "experts in few bits stay where they are"),
        ({"placement.slots_per_rank": 6}, "experts in few bits stay where they are"),
        ({"moe.shadow": (0,)}, "experts in few bits are not lent; set it to 'off'"),
        ({"init.upcycle": "copy"}, "cannot go with init.upcycle ('copy')"),
    ],
)
def test_what_is_refused(values: dict[str, Any], text: str) -> None:
    found = [problem for problem in problems_of(configuration(**values)) if text in problem]
    assert found
    assert all("\n" not in problem for problem in found)


def test_what_is_left_to_us_gives_way() -> None:
    config = configuration(**{"placement.planner": "auto", "moe.shadow": "auto", "gate.top_k": 1})
    settled, (told,) = as_far_as_it_goes(config, 2)
    assert (settled.placement.planner, settled.moe.shadow) == ("static", "off")
    assert "experts in few bits stay where they are" in told
    assert "experts in few bits are not lent" in told
