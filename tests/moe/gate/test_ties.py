"""One rule for equal numbers: of a token the lower number first, of several tokens the earlier one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeclipse.moe.config import GateConfig
from moeclipse.moe.experts.weight_init import WeightInit
from moeclipse.moe.gate.capacity import drop_low_scores
from moeclipse.moe.gate.gates import Gate
from moeclipse.moe.gate.node_limit import limit_leaving
from moeclipse.moe.gate.routing import _best_by_key, _best_by_sort, best_of, half_of_bits, order_of
from moeclipse.moe.tokens import Tokens
from moeclipse.moe.validate import alone
from moeclipse.ops.gate import GateKind, gate_reference
from moeclipse.ops.topk_softmax import topk_softmax_reference

E, D, T = 8, 4, 5
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@given(st.data())
def test_all_ways_to_the_best_are_one(data: st.DataObject) -> None:
    values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, float("inf"), float("-inf"), 1e-40, -3.25])
    rows = data.draw(st.lists(st.lists(values, min_size=E, max_size=E), min_size=1, max_size=4))
    k = data.draw(st.integers(1, E))
    for dtype in (torch.float32, torch.float64):
        values_TE = torch.tensor(rows, dtype=dtype)
        expected = [sorted(range(E), key=lambda e: (-row[e], e))[:k] for row in values_TE.tolist()]
        ways = (best_of, _best_by_sort, *((_best_by_key,) if dtype == torch.float32 else ()))
        for way in ways:
            assert way(values_TE, k).tolist() == expected


@TYPES
def test_half_of_bits(dtype: torch.dtype) -> None:
    values = torch.rand(1000, dtype=dtype) - 0.3
    rounded = half_of_bits(values)
    order = values.argsort()
    assert (rounded[order].diff() >= 0).all()
    assert ((rounded - values) / values).abs().max() < torch.finfo(dtype).eps ** 0.5
    assert half_of_bits(torch.tensor([-torch.inf, 0.0], dtype=dtype)).tolist() == [-torch.inf, 0.0]


def route(config: GateConfig, dtype: torch.dtype, x: torch.Tensor | None = None) -> Any:
    """Of tokens to which all experts are alike."""
    gate = Gate(config, d_model=D, num_experts=E, init=WeightInit(dtype=dtype))
    torch.nn.init.zeros_(gate.weight)
    gate.near_E = torch.arange(E) < 4 if config.max_leaving < 1 else None
    x = torch.rand(T, D, dtype=dtype) if x is None else x
    mesh = alone(torch.device("cpu"))
    return gate(x, Tokens(mesh=mesh, first=0, total=len(x))).expert_ids_TK


@TYPES
def test_equal_logits_choose_the_first_experts_as_kernels_do(dtype: torch.dtype) -> None:
    for kind in ("softmax", "sigmoid"):
        found = route(GateConfig(kind=kind, top_k=3), dtype)
        assert found.tolist() == [[0, 1, 2]] * T
        zeros = torch.zeros(E, D, dtype=dtype)
        kernels = gate_reference(
            torch.rand(T, D, dtype=dtype), zeros, zeros[:, 0], GateKind(k=3, sigmoid=True)
        )
        assert torch.equal(found, kernels.ids_TK)
    assert topk_softmax_reference(torch.zeros(T, E), 3)[1].tolist() == found.tolist()


@TYPES
def test_equal_groups_open_the_first(dtype: torch.dtype) -> None:
    config = GateConfig(kind="sigmoid", top_k=3, num_groups=4, top_groups=2)
    assert route(config, dtype).tolist() == [[0, 1, 2]] * T


@TYPES
def test_rows_that_stay_go_to_the_first_near_expert(dtype: torch.dtype) -> None:
    ids = torch.tensor([[4, 5]] * 2)
    near, even = torch.arange(E) < 4, torch.full((2, E), 0.125, dtype=dtype)
    kept = limit_leaving(ids, even[:, :2], even, near, share=0.25, reroute=True)
    assert kept.tolist() == [[4, 0], [0, 1]]


@pytest.mark.parametrize("nudge", [-1, 0, 1])
@TYPES
def test_last_bits_of_scores_do_not_decide_who_finds_room(dtype: torch.dtype, nudge: int) -> None:
    """Equal tokens differ in last bits from schedule to schedule: the first of them stay in every one."""
    ids = torch.ones(5, 1, dtype=torch.int64)
    scores = torch.tensor([[0.2], [0.7], [0.7], [0.7], [0.9]], dtype=dtype)
    scores[2:4] *= 1 + 4 * nudge * torch.finfo(dtype).eps
    assert drop_low_scores(ids, scores, 3).flatten().tolist() == [-1, 1, 1, -1, 1]
    assert order_of(scores).tolist() == [4, 1, 2, 3, 0]


def test_scores_that_are_all_one_have_no_order() -> None:
    bounded: dict[str, Any] = {"capacity_factor": 1.0, "capacity_over": "rank", "drop_policy": "score"}
    for more in ({}, {"kind": "sigmoid"}, {"kind": "noisy", "renormalise": False}):
        (problem,) = GateConfig(top_k=1, **bounded, **more).problems()
        assert "all scores are 1" in problem
    for more in ({"renormalise": False}, {"kind": "switch"}, {"top_k": 2}, {"capacity_factor": 0.0}):
        assert not list(GateConfig(**{"top_k": 1, **bounded, **more}).problems())
