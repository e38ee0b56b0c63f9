"""A gate in kernels on a CUDA device: values, gradients, the same bits twice, and what is hostile."""

from __future__ import annotations

import pytest
import torch

from moeclipse.ops.gate import GateKind, gate, gate_reference
from moeclipse.tensor.weight_grad import attach, place_of
from moeclipse.testing.compare import difference

HAS_GPU = torch.cuda.device_count() > 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]
KINDS = [
    GateKind(k=8),
    GateKind(k=2, renormalise=False, scale=2.5),
    GateKind(k=6, sigmoid=True, scale=2.5),
    GateKind(k=1, renormalise=False),
]


def given(tokens: int, experts: int) -> list[torch.Tensor]:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, 256, device="cuda").bfloat16()
    weight = (0.1 * torch.randn(experts, 256, device="cuda")).bfloat16()
    return [x, weight, 0.01 * torch.randn(experts, device="cuda")]


def loss(chosen: tuple[torch.Tensor, ...], weights: torch.Tensor) -> torch.Tensor:
    scores, ids, load, prob, squares = chosen
    listened = (scores * weights.to(scores.dtype)[ids]).sum()
    return listened + (prob * load.to(prob.dtype)).sum() / len(load) + 0.01 * squares


def gradients(
    run: object, kind: GateKind, dtype: torch.dtype, tokens: int, experts: int
) -> list[torch.Tensor]:
    x, weight, bias = given(tokens, experts)
    x, weight = (tensor.to(dtype).requires_grad_() for tensor in (x, weight))
    bias = bias.to(torch.float64 if dtype == torch.float64 else torch.float32)
    value = torch.linspace(-1, 1, experts, device="cuda")
    loss(run(x, weight, bias, kind), value).backward()  # type: ignore[operator]
    assert x.grad is not None
    assert weight.grad is not None
    return [x.grad, weight.grad]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("tokens", "experts"), [(1, 8), (1000, 128), (777, 60)])
def test_as_exact_as_plain_torch(kind: GateKind, tokens: int, experts: int) -> None:
    x, weight, bias = given(tokens, experts)
    found, right = (
        gate(x, weight, bias, kind),
        gate_reference(x.double(), weight.double(), bias.double(), kind),
    )
    assert torch.equal(found.ids_TK, right.ids_TK)
    assert torch.equal(found.load_E, right.load_E)
    for name in ("scores_TK", "prob_E", "squares"):
        assert difference(getattr(found, name), getattr(right, name)) < 1e-5
    exact = gradients(gate_reference, kind, torch.float64, tokens, experts)
    plain = gradients(gate_reference, kind, torch.bfloat16, tokens, experts)
    ours = gradients(gate, kind, torch.bfloat16, tokens, experts)
    for mine, theirs, truth in zip(ours, plain, exact, strict=True):
        assert difference(mine, truth) <= 1.1 * difference(theirs, truth) + 1e-6


def test_a_router_with_a_bias_is_as_exact() -> None:
    """gpt-oss' router: the gradients of x, weight and bias, and what is chosen."""
    errors: dict[str, list[float]] = {}
    truth: list[torch.Tensor] = []
    cases = (("truth", gate_reference, torch.float64), ("plain", gate_reference, torch.bfloat16))
    for name, run, dtype in (*cases, ("ours", gate, torch.bfloat16)):
        x, weight, bias = given(500, 128)
        more = 0.1 * torch.linspace(-1, 1, 128, device="cuda").bfloat16()
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (x, weight, more)]
        steer = bias.to(torch.float64 if dtype == torch.float64 else torch.float32)
        rest = (None, leaves[2]) if run is gate else (leaves[2],)
        chosen = run(leaves[0], leaves[1], steer, GateKind(k=4), *rest)  # type: ignore[operator]
        grads = torch.autograd.grad(loss(chosen, torch.linspace(-1, 1, 128, device="cuda")), leaves)
        truth = list(grads) if name == "truth" else truth
        errors[name] = [difference(mine, right) for mine, right in zip(grads, truth, strict=True)]
    for mine, theirs in zip(errors["ours"], errors["plain"], strict=True):
        assert mine <= 1.1 * theirs + 1e-6


def test_the_weight_adds_into_its_main_grad_and_two_runs_give_the_same_bits() -> None:
    x, weight, bias = given(1000, 64)
    exact = gradients(gate_reference, GateKind(k=4), torch.float64, 1000, 64)[1]
    found = []
    for _ in range(2):
        parameter = torch.nn.Parameter(weight.clone())
        told: list[int] = []
        state = attach(
            parameter, torch.full_like(weight, 7, dtype=torch.float32), lambda told=told: told.append(1)
        )
        state.empty = True
        for _ in range(2):
            chosen = gate(x, parameter, bias, GateKind(k=4), place_of(parameter))
            loss(chosen, torch.linspace(-1, 1, 64, device="cuda")).backward()
        assert parameter.grad is None
        assert told
        found.append(state.main_grad)
    assert torch.equal(*found)
    assert difference(found[0], 2 * exact) < 1e-5


def test_nothing_is_chosen_outside_where_logits_are_not_finite() -> None:
    x, weight, bias = given(64, 24)
    x[3], x[5] = torch.nan, torch.inf
    chosen = gate(x, weight, bias, GateKind(k=4))
    assert int(chosen.ids_TK.min()) >= 0
    assert int(chosen.ids_TK.max()) < 24
    assert chosen.scores_TK[3].isnan().all()
    assert chosen.scores_TK[7].isfinite().all()


def test_nothing_at_all() -> None:
    _, weight, bias = given(4, 8)
    chosen = gate(weight.new_empty(0, 256), weight, bias, GateKind(k=2))
    assert chosen.ids_TK.shape == (0, 2)
    assert not chosen.load_E.any()
