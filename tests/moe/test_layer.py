"""The MoE layer on one and many ranks: outputs and every raw gradient equal the one-process layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_parity import FF, GATES, D, inputs, make, parity, run

import moeclipse
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.moe.config import GateConfig
from moeclipse.moe.layer import MoE
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)]


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize(("dp", "ep"), LAYOUTS)
def test_every_gate_in_every_layout(name: str, dp: int, ep: int) -> None:
    parity(GATES[name], dp, ep, shared=1)


@pytest.mark.parametrize(("dp", "ep"), [(1, 3), (1, 4), (2, 2)])
def test_experts_need_not_divide_ranks(dp: int, ep: int) -> None:
    parity(GateConfig(top_k=3), dp, ep, num_experts=7, sizes=[6, 3, 1, 8][: dp * ep])


def test_an_expert_without_rows_has_a_zero_gradient() -> None:
    sizes = [7, 6]
    for result in run_ranks(2, run, GateConfig(top_k=1), 8, 0, sizes):
        for slot, expert in enumerate(result["ids"]):
            if expert == 1:
                assert torch.count_nonzero(result["experts.up"][slot]) == 0
                assert torch.count_nonzero(result["experts.down"][slot]) == 0
    reference = run_alone(run, GateConfig(top_k=1), 8, 0, [13])
    assert reference["load"][1] == 0


def test_ranks_without_any_token() -> None:
    parity(GateConfig(top_k=2), 1, 4, sizes=[0, 0, 3, 0])
    results = run_ranks(2, run, GateConfig(top_k=2), 4, 1, [0, 0])
    assert all(torch.count_nonzero(r["experts.up"]) == 0 for r in results)


def test_capacity_drops_the_same_tokens_everywhere() -> None:
    reference = parity(GATES["capacity"], 2, 2, sizes=[8, 8, 8, 8])
    assert reference["dropped"] > 0


def naive(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    """The layer from its definition: softmax, top-k, renormalise, one token and one expert at a time."""
    out = torch.zeros_like(x)
    for t, row in enumerate(x):
        probs = (moe.gate.weight @ row).softmax(-1)
        scores, ids = probs.topk(moe.gate.config.top_k)
        for score, e in zip(scores / scores.sum(), ids.tolist(), strict=True):
            gate, up = (moe.experts.up[e] @ row).chunk(2)
            out[t] += score * (moe.experts.down[e] @ (F.silu(gate) * up))
    return out


def test_one_rank_equals_the_definition() -> None:
    run_alone(compare_with_definition)


def compare_with_definition(_: Mesh) -> None:
    moe = make(GateConfig(top_k=3), 8, 0, None)
    x, d_y = inputs(11)
    x.requires_grad_()
    parameters = [x, *moe.parameters()]
    reference = torch.autograd.grad((naive(moe, x) * d_y).sum(), parameters)
    y = moe(x)
    assert difference(y, naive(moe, x)) < 1e-14
    for value, expected in zip(torch.autograd.grad((y * d_y).sum(), parameters), reference, strict=True):
        assert difference(value, expected) < 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_stays_near_float64(dtype: torch.dtype) -> None:
    gate = GateConfig(top_k=8)  # all experts: rounding cannot change the choice
    reference = run_alone(run, gate, 8, 1, [12])
    results = run_ranks(2, run, gate, 8, 1, [5, 7], {"dtype": dtype})
    y = torch.cat([r["y"] for r in results])
    assert y.dtype == dtype
    bound = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]
    assert difference(y, reference["y"]) < bound
    assert difference(torch.cat([r["experts.up"] for r in results]), reference["experts.up"]) < bound


@settings(max_examples=settings.default.max_examples // 10, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 6), min_size=3, max_size=3),
    num_experts=st.integers(3, 9),
    data=st.data(),
)
def test_random_shapes(sizes: list[int], num_experts: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    parity(GateConfig(top_k=top_k), 1, 3, num_experts=num_experts, sizes=sizes)


def test_bad_shapes_are_all_named() -> None:
    with pytest.raises(ConfigError, match=r"gate.top_k \(9\) must be at most moe.num_experts \(8\)"):
        MoE(D, FF, 8, 9)
    with pytest.raises(ConfigError, match="2 problems"):
        MoE(D, 0, 8, 9)


def test_how_rows_travel_is_typed_or_a_mapping_that_is_checked() -> None:
    typed = MoE(D, FF, 8, exchange=moeclipse.ExchangeConfig(schedule="smart", chunks=2))
    mapped = MoE(D, FF, 8, exchange={"schedule": "smart", "chunks": 2})
    assert typed.schedule.config == mapped.schedule.config
    with pytest.raises(ConfigError, match=r"schedul: unknown key; did you mean schedule\?"):
        MoE(D, FF, 8, exchange={"schedul": "smart"})
    with pytest.raises(ConfigError, match="chunks"):
        MoE(D, FF, 8, exchange={"chunks": "many"})
