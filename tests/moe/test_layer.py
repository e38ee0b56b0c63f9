"""The MoE layer on one and many ranks: outputs and every raw gradient equal the one-process layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import moeclipse
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.moe.config import GateConfig
from moeclipse.moe.layer import MoE
from moeclipse.moe.tokens import Tokens
from moeclipse.ops.random import fill_normal
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks

D, FF = 12, 20
BOUND = 1e-12

GATES = {
    "softmax": GateConfig(kind="softmax", top_k=3, z_loss=0.1),
    "softmax-raw": GateConfig(kind="softmax", top_k=2, renormalise=False, scale=1.7),
    "softmax-groups": GateConfig(kind="softmax", top_k=2, num_groups=2, top_groups=1, group_score="max"),
    "sigmoid": GateConfig(kind="sigmoid", top_k=4, bias_rate=0.1, scale=2.5),
    "sigmoid-groups": GateConfig(kind="sigmoid", top_k=3, num_groups=4, top_groups=2, bias_rate=0.01),
    "switch": GateConfig(kind="switch", top_k=1, capacity_factor=1.0),
    "switch-pad": GateConfig(kind="switch", top_k=1, capacity_factor=0.7, overflow="pad"),
    "gshard": GateConfig(kind="gshard", top_k=2, capacity_factor=1.1),
    "gshard-dropless": GateConfig(kind="gshard", top_k=2),
    "noisy": GateConfig(kind="noisy", top_k=2),
    "all": GateConfig(kind="softmax", top_k=8),
    "capacity": GateConfig(kind="softmax", top_k=2, capacity_factor=0.6, z_loss=0.01),
}
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)]


def inputs(total: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    x = fill_normal(torch.empty(total, D, dtype=torch.float64), 1, 1.0)
    x[:, 0] = 1.0  # lets a gate weight act as a constant
    d_y = fill_normal(torch.empty(total, D, dtype=torch.float64), 2, 1.0)
    return x.to(dtype), d_y.to(dtype)


def make(gate: GateConfig, num_experts: int, shared: int, mesh: Mesh | None, **more: Any) -> MoE:
    settings: dict[str, Any] = {"mesh": mesh, "seed": 7, "init_std": 0.5, "dtype": torch.float64, **more}
    moe = MoE(D, FF, num_experts, gate=gate, num_shared_experts=shared, **settings)
    with torch.no_grad():
        if gate.kind == "noisy":
            fill_normal(moe.gate.noise_weight, 3, 0.3)
        moe.gate.weight[1] = 0.0
        moe.gate.weight[1, 0] = -20.0  # nobody wants expert 1
    return moe


def run(
    mesh: Mesh,
    gate: GateConfig,
    num_experts: int,
    shared: int,
    sizes: list[int],
    more: dict[str, Any] | None = None,
) -> dict:
    """Output and gradients of this rank's part; the loss is a sum over all tokens plus the aux loss."""
    moe = make(gate, num_experts, shared, mesh, **(more or {}))
    return gradients(moe, mesh, sizes)


def gradients(moe: MoE, mesh: Mesh, sizes: list[int]) -> dict:
    x, d_y = inputs(sum(sizes), moe.gate.weight.dtype)
    first = sum(sizes[: mesh.rank])
    x, d_y = x[first : first + sizes[mesh.rank]], d_y[first : first + sizes[mesh.rank]]
    x = x.clone().requires_grad_()
    tokens = Tokens(mesh=mesh, first=first, total=sum(sizes), step=5)
    y, report = moe.run(x, tokens)
    ((y * d_y).sum() + report.aux_loss).backward()
    grads = {name: p.grad for name, p in moe.named_parameters()}
    return {
        "y": y.detach(),
        "dx": x.grad,
        "aux": report.aux_loss.detach(),
        "load": report.load_E,
        "dropped": int(report.num_dropped),
        "ids": moe.experts.ids,
        **{k: v.clone() for k, v in grads.items() if v is not None},
    }


def compare(results: list[dict], reference: dict, dp: int, ep: int) -> None:
    """Join the ranks' parts as one process would see them; each must be within BOUND of the reference."""
    joined = {
        "y": torch.cat([r["y"] for r in results]),
        "dx": torch.cat([r["dx"] for r in results]),
        "aux": torch.stack([r["aux"] for r in results]).sum(),
        "load": torch.stack([r["load"] for r in results]).sum(0),
    }
    for key in reference:
        if key.startswith("experts."):
            rows = [sum(results[d * ep + e][key] for d in range(dp)) for e in range(ep)]
            joined[key] = torch.cat(rows)
        elif key.startswith(("gate.", "shared.")):
            joined[key] = sum(r[key] for r in results)
    assert sum(r["dropped"] for r in results) == reference["dropped"]
    worst = {key: difference(value, reference[key]) for key, value in joined.items()}
    assert set(worst) >= {"y", "dx", "gate.weight", "experts.up", "experts.down"}
    bad = {key: value for key, value in worst.items() if not value <= BOUND}
    assert not bad, bad


def parity(
    gate: GateConfig,
    dp: int,
    ep: int,
    *,
    num_experts: int = 8,
    shared: int = 0,
    sizes: list[int] | None = None,
    more: dict[str, Any] | None = None,
) -> dict:
    sizes = sizes or [5, 0, 9, 4][: dp * ep]
    reference = run_alone(run, gate, num_experts, shared, [sum(sizes)])
    results = run_ranks(dp * ep, run, gate, num_experts, shared, sizes, more, dp=dp)
    compare(results, reference, dp, ep)
    return reference


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


def count_rows(mesh: Mesh) -> tuple[list[int], int]:
    from moeclipse.moe.dispatch import plan_dispatch

    moe = make(GateConfig(top_k=8), 8, 0, mesh)
    ids = torch.arange(8).repeat(6, 1)
    plan = plan_dispatch(ids, moe.dispatcher, moe.schedule.shape(), "test")
    return plan.units[0, 0].send_rows, len(plan.pair_place_n)


def test_a_token_travels_once_to_each_rank() -> None:
    for rows, pairs in run_ranks(2, count_rows):
        assert rows == [6, 6], "six tokens, all of whose experts are wanted, are six rows for each rank"
        assert pairs == 48


@settings(max_examples=12, deadline=None)
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
