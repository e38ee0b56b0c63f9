"""Tables of costs, and those that follow from the shape of a layer and the hardware under it."""

from __future__ import annotations

import pytest

from moeclipse.core.errors import ConfigError
from moeclipse.cost.hardware import device, link
from moeclipse.cost.model import Costs, LayerWork, layer_costs


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Costs(
            seconds={"F": -1.0},
            launch=-2.0,
            contention={("compute", "gpu"): 1.5},
            rank_speed=(0.0,),
            stage_scale=(-1.0,),
        )
    assert len(caught.value.problems) == 6


def test_layer_costs_follow_the_shape() -> None:
    work = LayerWork()
    costs = layer_costs(work, device("h100"), link("infiniband"), 64)
    flops = 6 * work.tokens * work.top_k * work.d_model * work.d_ff
    assert costs.seconds["MLP_F"] == pytest.approx(flops / (989e12 * 0.75))
    assert costs.seconds["ATTN_B"] > costs.seconds["ATTN_F"] > costs.seconds["ATTN_W"]
    assert costs.seconds["ATTN_B"] + costs.seconds["ATTN_W"] == pytest.approx(2 * costs.seconds["ATTN_F"])
    rows = work.tokens * work.top_k * work.d_model * 2 * 63 / 64
    assert costs.seconds["DISPATCH_F"] == pytest.approx(5e-6 + rows / (50e9 * 0.85))
    assert layer_costs(work, device("h100"), link("infiniband"), 1).seconds["COMBINE_B"] == 0.0
    assert layer_costs(work, device("cpu"), link("loopback"), 2).inline_compute
