"""Second derivatives: refused in every form that torch has for them, where plain torch has a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from own_models import EXPERTS, KINDS, layer, often, tokens
from torch import nn
from torch.autograd import functional, grad

from apart import apart
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_ranks

EVERYWHERE = GateConfig(top_k=EXPERTS)
"""All experts, so that no choice can jump."""


def plain(moe: Any, x: torch.Tensor) -> torch.Tensor:
    """The layer in plain torch, from its weights."""
    up, down, probs = moe.experts.up, moe.experts.down, (x @ moe.gate.weight.T).softmax(-1)
    gate, value = torch.einsum("td,ehd->teh", x, up).chunk(2, -1)
    hidden = torch.nn.functional.silu(gate) * value
    return torch.einsum("te,teh,edh->td", probs, hidden, down)


Forward = Callable[[torch.Tensor], torch.Tensor]


def penalty(run: Forward, x: torch.Tensor) -> torch.Tensor:
    loss = run(x).sum()  # what comes in is a constant: torch's own guard would pass it
    (slope,) = grad(loss, x, create_graph=True)
    return loss + slope.square().sum()


def by_backward(run: Forward, x: torch.Tensor, weights: list[nn.Parameter], inputs: bool) -> Any:
    penalty(run, x).backward(inputs=weights if inputs else None)
    return [weight.grad.clone() for weight in weights]


def forms(run: Forward, x: torch.Tensor, weights: list[nn.Parameter]) -> dict[str, Callable[[], Any]]:
    def summed(x: torch.Tensor) -> torch.Tensor:
        return run(x).sum()

    def slopes(x: torch.Tensor) -> torch.Tensor:
        return functional.jacobian(summed, x, create_graph=True)

    at = x.detach()
    return {
        "grad": lambda: grad(penalty(run, x), weights),
        "grad, once more": lambda: grad(penalty(run, x), weights, create_graph=True),
        "backward": lambda: by_backward(run, x, weights, False),
        "backward(inputs=)": lambda: by_backward(run, x, weights, True),
        "hvp": lambda: functional.hvp(summed, at, at)[1:],
        "vhp": lambda: functional.vhp(summed, at, at)[1:],
        "hessian": lambda: [functional.hessian(summed, at)],
        "jacobian of one": lambda: [functional.jacobian(slopes, at)],
        "jvp": lambda: functional.jvp(summed, at, at)[1:],
        "func.grad": lambda: [torch.func.grad(lambda x: torch.func.grad(summed)(x).sum())(at)],
        "func.hessian": lambda: [torch.func.hessian(summed)(at)],
        "func.jvp": lambda: torch.func.jvp(torch.func.grad(summed), (at,), (at,))[1:],
        "func.jacrev": lambda: [torch.func.jacrev(torch.func.grad(summed))(at)],
    }


def answers(mesh: Mesh, kind: str) -> dict[str, str]:
    """What each form says of a layer."""
    moe = layer(kind, EVERYWHERE, mesh=mesh if mesh.num_ranks > 1 else None)
    x = tokens(rank=mesh.rank, count=3).requires_grad_()
    found = {}
    for name, form in forms(moe, x, list(moe.experts.parameters())).items():
        try:
            form()
            found[name] = "no error"
        except RuntimeError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("kind", often(KINDS, "built-in", "modules"))
def test_every_form_is_refused(kind: str) -> None:
    for ranks in (1, 2) if kind == "built-in" else (1,):
        for found in run_ranks(ranks, answers, kind):
            for name, text in found.items():
                refused = "torch.func" if name.startswith("func.") else "backward is once_differentiable"
                assert refused in text, (name, text)


@apart
def test_plain_torch_has_a_number_for_each_of_them() -> None:
    """So that what is refused is the layer, not the question; and the first derivatives agree."""
    moe, x = layer("built-in", EVERYWHERE), tokens(count=3).requires_grad_()
    weights = list(moe.experts.parameters())
    for name, form in forms(lambda x: plain(moe, x), x, weights).items():
        moe.zero_grad()
        assert all(bool(found.abs().sum() > 0) for found in form()), name
    ours, theirs = (grad(run(x).square().sum(), [x, *weights]) for run in (moe, lambda x: plain(moe, x)))
    assert all(difference(a, b) <= 1e-12 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@apart
def test_a_compiled_layer_is_refused_too(backend: str) -> None:
    moe, x = layer("built-in", EVERYWHERE), tokens(count=3).requires_grad_()
    compiled, weights = torch.compile(moe, backend=backend), list(moe.experts.parameters())
    found = forms(compiled, x, weights)
    for name in ("grad", "backward(inputs=)", "backward"):
        with pytest.raises(RuntimeError, match=r"double backward|no autograd formula"):
            found[name]()
