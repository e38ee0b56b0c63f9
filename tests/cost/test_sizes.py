"""Parameters and work of a model, beside what they are known to be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moeclipse.cost.cluster import ExpertChoice
from moeclipse.cost.sizes import ModelSizes

SMALL = ModelSizes(
    vocab=100,
    d_model=8,
    num_heads=4,
    kv_heads=2,
    d_qk=4,
    d_v=4,
    moe_layers=(False, True),
    windows=(0, 2),
    dense_width=12,
    expert_width=6,
    experts=ExpertChoice(num_experts=5, top_k=2),
    shared_width=7,
)


def test_parameters_are_those_of_its_matrices() -> None:
    attention = 8 * (16 + 2 * 8) + 16 * 8
    assert SMALL.attention_parameters == attention
    assert SMALL.expert_parameters == 3 * 8 * 6
    assert SMALL.dense_parameters(0) == attention + 16 + 3 * 8 * 12
    assert SMALL.dense_parameters(1) == attention + 16 + 8 * 5 + 3 * 8 * 7
    layers = SMALL.dense_parameters(0) + SMALL.dense_parameters(1) + 5 * 3 * 8 * 6
    assert SMALL.parameters == layers + 2 * 800 + 8
    assert replace(SMALL, tied=True).parameters == layers + 800 + 8
    assert replace(SMALL, gated=False).expert_parameters == 2 * 8 * 6


def test_latent_attention_has_four_or_five_projections() -> None:
    latent = replace(SMALL, d_qk=6, d_v=5, kv_heads=4, kv_rank=3, d_rope=2, q_rank=7)
    assert latent.projections() == [
        (7, 8, False),
        (24, 7, True),
        (5, 8, False),
        (36, 3, True),
        (8, 20, True),
    ]
    assert replace(latent, q_rank=0).projections()[0] == (24, 8, True)


def test_flops_count_weights_met_and_keys_seen() -> None:
    met = SMALL.parameters - 800 - 8 - 2 * 16 - 3 * SMALL.expert_parameters
    keys = (10 + 1) / 2 + (1 + 9 * 2) / 10
    assert SMALL.flops_per_token(10) == pytest.approx(6 * met + 6 * keys * 4 * 8)
    more = replace(SMALL, losses=2).flops_per_token(10) - SMALL.flops_per_token(10)
    assert more == 6 * 800
