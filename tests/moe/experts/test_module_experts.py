"""Any module as an expert, several tensors for a token, and widths that differ."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.moe.config import GateConfig
from moeclipse.moe.experts.module_experts import joint
from moeclipse.moe.layer import MoE
from moeclipse.moe.tokens import Tokens
from moeclipse.ops.random import fill_normal, key_of
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks

D, OUT, EXPERTS = 6, 9, 5
SIZES = [7, 0, 5, 4]


class Small(nn.Module):
    """Another width out than in, a bias, and a parameter that is never used."""

    def __init__(self, expert: int) -> None:
        super().__init__()
        self.first = nn.Linear(D, 8, dtype=torch.float64)
        self.second = nn.Linear(8, OUT, dtype=torch.float64)
        self.unused = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        for name, parameter in self.named_parameters():
            fill_normal(parameter.data, key_of(expert, name), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Together(nn.Module):
    """All experts of a rank in one module that is told how many rows each has."""

    def __init__(self, ids: Sequence[int]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Small(expert) for expert in ids)

    def forward(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        parts = x.split(counts)
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])


class Rich(nn.Module):
    """Takes a dict: a vector, a second vector, a position and a flag."""

    def __init__(self, expert: int) -> None:
        super().__init__()
        self.inner = Small(expert)

    def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        assert x["flag"].dtype == torch.bool
        scale = 1 + x["position"].double()[:, None] / 10
        sign = torch.where(x["flag"], 1.0, -1.0)[:, None]
        return sign * scale * self.inner(x["h"] + x["extra"].sum(-1))


FACTORIES = {"each": Small, "joint": joint(Together)}


def tensors(first: int, count: int, total: int) -> dict[str, torch.Tensor]:
    part = slice(first, first + count)
    h = fill_normal(torch.empty(total, D, dtype=torch.float64), 1, 1.0)[part]
    extra = fill_normal(torch.empty(total, D, 2, dtype=torch.float64), 2, 1.0)[part]
    position = torch.arange(total)[part]
    return {"h": h, "extra": extra, "position": position, "flag": position % 3 == 0}


def run(mesh: Mesh, kind: str, exchange: dict[str, Any], sizes: list[int]) -> dict[str, Any]:
    factory: Any = Rich if kind == "dict" else FACTORIES[kind]
    settings: dict[str, Any] = {"mesh": mesh, "init_std": 0.7, "dtype": torch.float64, "d_out": OUT}
    moe = MoE(D, 1, EXPERTS, gate=GateConfig(top_k=2), experts=factory, exchange=exchange, **settings)
    first, count = sum(sizes[: mesh.rank]), sizes[mesh.rank]
    given = {name: t.clone() for name, t in tensors(first, count, sum(sizes)).items()}
    leaves = [given[name].requires_grad_() for name in ("h", "extra")]
    tokens = Tokens(mesh=mesh, first=first, total=sum(sizes))
    y, report = moe.run(given if kind == "dict" else given["h"], tokens)
    d_y = fill_normal(torch.empty(sum(sizes), OUT, dtype=torch.float64), 3, 1.0)[first : first + count]
    ((y * d_y).sum() + report.aux_loss).backward()
    names = [name for name, _ in moe.experts.named_parameters()]
    grads = [p.grad for p in moe.experts.parameters()]
    assert all(grad is not None for grad in grads), "an idle weight has a zero gradient, not None"
    return {
        "y": y.detach(),
        "dx": leaves[0].grad,
        "extra": leaves[1].grad if kind == "dict" else torch.zeros(count),
        "gate": moe.gate.weight.grad,
        "experts": dict(zip(names, grads, strict=True)),
        "ids": moe.experts.ids,
    }


def by_expert(result: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Gradients named by the logical expert, whatever the module calls it."""
    pattern = re.compile(r"parts\.(\w+)\.(?:experts\.(\d+)\.)?(?:inner\.)?(.*)")
    found = {}
    for name, grad in result["experts"].items():
        expert, slot, rest = pattern.fullmatch(name).groups()  # a joint module counts its own from 0
        found[f"{expert if slot is None else result['ids'][int(slot)]}.{rest}"] = grad
    return found


@pytest.mark.parametrize(
    ("kind", "exchange"),
    [
        ("each", {}),
        ("each", {"schedule": "smart", "chunks": 2}),
        ("each", {"schedule": "smart", "chunks": 2, "shadow": (0, 3)}),
        ("joint", {"schedule": "smart", "chunks": 3, "group_size": 2}),
        ("dict", {}),
        ("dict", {"schedule": "smart", "chunks": 2, "shadow": (1, 2, 4)}),
    ],
)
def test_modules_as_experts(kind: str, exchange: dict[str, Any]) -> None:
    expected = run_alone(run, kind, {}, [sum(SIZES)])
    results = run_ranks(4, run, kind, exchange, SIZES)
    for name in ("y", "dx", "extra"):
        assert difference(torch.cat([r[name] for r in results]), expected[name]) <= 1e-12, name
    assert difference(sum(r["gate"] for r in results), expected["gate"]) <= 1e-12
    found = {name: grad for result in results for name, grad in by_expert(result).items()}
    reference = by_expert(expected)
    assert found.keys() == reference.keys()
    for name, grad in reference.items():
        assert difference(found[name], grad) <= 1e-12, name
    assert expected["y"].shape == (16, OUT)


def chosen(mesh: Mesh, kind: str) -> list[float]:
    """Four training steps, of which the second measures what the experts and the wire cost."""
    options: dict[str, Any] = {"schedule": "smart"} | ({} if kind == "joint" else {"shadow": "auto"})
    made = {"experts": FACTORIES[kind], "d_out": OUT, "dtype": torch.float64}
    moe = MoE(D, 1, 4, **made, exchange=options, mesh=mesh)
    for _ in range(4):
        moe(torch.ones(6, D, dtype=torch.float64)).sum().backward()
    assert moe.schedule.probe is not None
    return [moe.schedule.probe.row_forward, moe.schedule.probe.parameter_bytes]


@pytest.mark.parametrize("kind", ["each", "joint"])
def test_costs_of_modules_are_measured_as_those_of_our_own(kind: str) -> None:
    """ "auto" must not depend on what the experts are made of."""
    first, second = run_ranks(2, chosen, kind)
    assert first == second, "ranks decide from the same numbers"
    assert first[1] > 0


def told(mesh: Mesh) -> str:
    try:
        MoE(D, 1, 4, experts=joint(Together), d_out=OUT, exchange={"shadow": "auto"}, mesh=mesh)
    except ConfigError as error:
        return str(error)
    return ""


def test_one_module_for_all_experts_shadows_nothing() -> None:
    """Refused when the layer is made, not in the step that would need it; alone nobody has shadows anyway."""
    assert told(Mesh.single()) == ""
    for text in run_ranks(2, told):
        assert "moe.shadow ('auto') cannot go with one module for all experts" in text


def test_one_expert_by_hand() -> None:
    moe = MoE(D, 1, 1, top_k=1, experts=Small, d_out=OUT, dtype=torch.float64)
    x = torch.randn(3, 2, D, dtype=torch.float64)
    assert difference(moe(x), Small(0)(x)) < 1e-14
    assert moe(x).shape == (3, 2, OUT)


class Either(nn.Module):
    """Takes a tensor, or a dict with it and a weight."""

    def __init__(self, expert: int) -> None:
        super().__init__()
        self.inner = Small(expert)

    def forward(self, x: torch.Tensor | dict[str, torch.Tensor]) -> torch.Tensor:
        return self.inner(x) if isinstance(x, torch.Tensor) else self.inner(x["h"]) * x["w"][:, None]


def given_otherwise(_mesh: Mesh) -> list[float]:
    """How far gradients of two calls are from those of each call alone."""
    h, w, a = (torch.randn(*shape, dtype=torch.float64) for shape in ((5, D), (5,), (3, D)))
    leaves = [tensor.requires_grad_() for tensor in (h, w, a)]
    moe = MoE(D, 1, 3, experts=Either, d_out=OUT, dtype=torch.float64).eval()
    apart = [
        torch.autograd.grad(moe({"h": h, "w": w}).pow(2).sum(), (h, w)),
        torch.autograd.grad(moe(a).pow(2).sum(), (a,)),
    ]
    y1, y2 = moe({"h": h, "w": w}), moe(a)
    together = torch.autograd.grad(y1.pow(2).sum() + y2.pow(2).sum(), leaves)
    return [difference(*pair) for pair in zip(together, [*apart[0], *apart[1]], strict=True)]


def test_calls_that_are_given_otherwise_wait_for_one_backward() -> None:
    """What belongs to a call is kept with that call: a second one before backward changes nothing of it."""
    assert run_alone(given_otherwise) == [0.0, 0.0, 0.0]


def test_a_wrong_width_is_named() -> None:
    moe = MoE(D, 1, 2, top_k=1, experts=Small, dtype=torch.float64)
    with pytest.raises(ConfigError, match=r"an expert returned shape .* expected \[\d+, 6\]; give d_out"):
        moe(torch.randn(4, D, dtype=torch.float64))


def test_tensors_of_different_length_are_refused() -> None:
    moe = MoE(D, 1, 2, top_k=1, experts=Small, d_out=OUT, dtype=torch.float64)
    with pytest.raises(ConfigError, match="same leading size"):
        moe((torch.randn(4, D, dtype=torch.float64), torch.arange(5)))
