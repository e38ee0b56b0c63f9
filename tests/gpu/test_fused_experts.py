"""The kernels inside the layer: no further from float64 than plain torch in the same type, and repeatable."""

from __future__ import annotations

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.moe.gate.routing import Routing
from moeclipse.moe.layer import MoE
from moeclipse.moe.tokens import Tokens
from moeclipse.ops.random import fill_normal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device"),
]
D, FF, EXPERTS, TOKENS = 256, 128, 16, 1000


def run(device: str, dtype: torch.dtype, top_k: int, fused: bool | None, deferred: bool = False) -> dict:
    """Output and gradients; the choice is the same everywhere because the gate reads float64 copies."""
    mesh = Mesh.single(device)
    moe = MoE(D, FF, EXPERTS, gate=GateConfig(top_k=top_k), mesh=mesh, seed=3, dtype=torch.float64)
    x = fill_normal(torch.empty(TOKENS, D, dtype=torch.float64), 1, 1.0)
    ids = (x @ moe.gate.weight.detach().cpu().T).topk(top_k).indices.to(device)
    scores = torch.softmax(fill_normal(torch.empty(TOKENS, top_k, dtype=torch.float64), 2, 1.0), -1).to(
        device
    )
    moe = moe.to(dtype)
    moe.fused = fused
    for parameter in moe.experts.parameters():
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        parameter.main_grad = torch.zeros_like(parameter, dtype=wide)
    x = x.to(device, dtype).requires_grad_()
    scores = scores.to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
    tokens = Tokens(mesh=mesh, first=0, total=TOKENS)
    routing = moe.gate(x, tokens)
    object.__setattr__(routing, "expert_ids_TK", ids)
    object.__setattr__(routing, "scores_TK", scores)
    wgrads = moe.experts.wgrads
    if deferred:
        with wgrads.deferred(microbatch=0):
            y = call(moe, routing, x, tokens)
            y.double().square().sum().backward()
        wgrads.run(microbatch=0)
    else:
        y = call(moe, routing, x, tokens)
        y.double().square().sum().backward()
    up, down = (parameter.main_grad for parameter in moe.experts.parameters())
    found = {"y": y.detach(), "dx": x.grad, "dscores": scores.grad, "up": up, "down": down}
    return {name: value.double().cpu() for name, value in found.items()}


def call(moe: MoE, routing: Routing, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    return moe.apply_experts(routing, x, tokens)


def errors(found: dict, expected: dict) -> dict[str, float]:
    return {k: float((found[k] - expected[k]).norm() / expected[k].norm()) for k in expected}


@pytest.mark.parametrize("deferred", [False, True], ids=["one-rank", "dispatched"])
@pytest.mark.parametrize("top_k", [1, 4, 16])
def test_as_near_to_float64_as_plain_torch(top_k: int, deferred: bool) -> None:
    expected = run("cpu", torch.float64, top_k, False)
    plain = errors(run("cuda", torch.bfloat16, top_k, False), expected)
    fused = errors(run("cuda", torch.bfloat16, top_k, True, deferred), expected)
    for name, error in fused.items():
        assert error <= 1.1 * plain[name] + 1e-4, (name, error, plain[name])


def test_two_runs_give_the_same_bits() -> None:
    first, second = (run("cuda", torch.bfloat16, 4, None) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
