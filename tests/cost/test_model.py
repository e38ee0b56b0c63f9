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
    assert costs.seconds["MLP_F"] == pytest.approx(flops / (989e12 * 0.68))
    assert costs.seconds["ATTN_B"] > costs.seconds["ATTN_F"] > costs.seconds["ATTN_W"]
    assert costs.seconds["ATTN_B"] + costs.seconds["ATTN_W"] == pytest.approx(2 * costs.seconds["ATTN_F"])
    rows = work.tokens * work.top_k * work.d_model * 2 * 63 / 64
    assert costs.seconds["DISPATCH_F"] == pytest.approx(5e-6 + rows / (50e9 * 0.85))
    assert layer_costs(work, device("h100"), link("infiniband"), 1).seconds["COMBINE_B"] == 0.0
    assert layer_costs(work, device("cpu"), link("loopback"), 2).inline_compute


def test_a_causal_mask_leaves_half_of_attention() -> None:
    work = LayerWork(tokens=10, sequence=6, attn_width=4, d_model=8, attn_params=100)
    assert work.attn_core_flops() == 2 * (2 * 10 * 6 * 4) / 2
    costs = layer_costs(work, device("h100"), link("infiniband"), 2)
    rate = 989e12 * 0.68
    assert costs.seconds["ATTN_F"] == pytest.approx((2 * 10 * 100 + 480) / rate)
    assert costs.seconds["ATTN_B"] == pytest.approx((2 * 10 * 100 + 2 * 480) / rate)
    assert costs.seconds["ATTN_W"] == pytest.approx(2 * 10 * 100 / rate)


def test_every_chunk_of_an_exchange_pays_its_latency() -> None:
    costs = layer_costs(LayerWork(), device("h100"), link("infiniband"), 64)
    names = [f"{part}_{form}" for part in ("DISPATCH", "COMBINE") for form in "FBR"]
    assert costs.fixed == dict.fromkeys(names, 5e-6), "an exchange that is computed again, too"


def test_processors_that_communicate_compute_nothing() -> None:
    costs = layer_costs(LayerWork(), device("h100"), link("infiniband"), 64, comm_processors=33)
    assert costs.contention == {("compute", "a2a"): 0.75}
    for rate in (0.0, 1.5):
        with pytest.raises(ConfigError, match=rf"compute/a2a \({rate}\) must lie in \(0, 1\]: it is a rate"):
            Costs(seconds={}, contention={("compute", "a2a"): rate})
