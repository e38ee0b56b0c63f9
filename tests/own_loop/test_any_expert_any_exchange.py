"""Every kind of expert in every exchange, through all calls in which it learns, against one process."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from own_models import KINDS, assert_alike, gradients, layer, often, tokens

from moeclipse.comm.mesh import Mesh
from moeclipse.ops.random import fill_normal
from moeclipse.testing.run_ranks import run_alone, run_ranks

CALLS, RANKS = 40, 3
EXCHANGES: dict[str, dict[str, Any]] = {
    "blocking": {},
    "smart": {"schedule": "smart"},
    "smart, some chunks": {"schedule": "smart", "chunks": 2},
    "smart, some groups": {"schedule": "smart", "group_size": 2},
    "shadow": {"shadow": "auto"},
    "smart shadow": {"schedule": "smart", "shadow": "auto"},
}


def counts(call: int) -> list[int]:
    """Tokens of each rank: in turn a rank has none, and once nobody has any."""
    return [0 if (call + rank) % RANKS == 0 or call == 7 else 3 + rank for rank in range(RANKS)]


def calls(mesh: Mesh, kind: str, exchange: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Gradients summed over all calls; most tokens want expert 4."""
    moe = layer(kind, mesh=mesh if mesh.num_ranks > 1 else None, exchange=exchange)
    with torch.no_grad():
        moe.gate.weight[4, 0] += 3.0
    outputs = []
    for call in range(CALLS):
        parts = [tokens(call, rank, count) for rank, count in enumerate(counts(call))]
        x = torch.cat(parts) if mesh.num_ranks == 1 else parts[mesh.rank]
        x[:, 0] = 2.0
        d_y = fill_normal(torch.empty_like(torch.cat(parts)), call, 1.0)
        first = sum(map(len, parts[: mesh.rank])) if mesh.num_ranks > 1 else 0
        y = moe(x)
        ((y * d_y[first : first + len(x)]).sum() + moe.last.aux_loss).backward()
        outputs.append(y.detach())
    names = [name for name, _ in moe.named_parameters()]
    found = gradients(moe)
    assert found.keys() == set(names)
    return found | {f"y{call}": y for call, y in enumerate(outputs)}


def joined(results: list[dict[str, torch.Tensor]], kind: str) -> dict[str, torch.Tensor]:
    found = {key: torch.cat([r[key] for r in results]) for key in results[0] if key.startswith("y")}
    found["gate.weight"] = sum(r["gate.weight"] for r in results)  # type: ignore[assignment]
    if kind == "modules":
        found |= {key: value for r in results for key, value in r.items() if key.startswith("experts.")}
    elif kind == "joint":  # a joint module counts its own from 0
        for rank, result in enumerate(results):
            for key, value in result.items():
                if ".each." in key:
                    number, _, rest = key.partition(".each.")[2].partition(".")
                    found[f"experts.parts.0.each.{2 * rank + int(number)}.{rest}"] = value
    else:
        for key in results[0]:
            if key.startswith("experts."):
                found[key] = torch.cat([r[key] for r in results])
    return found


@cache
def calls_alone(kind: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = run_alone(calls, kind, {})
    return found


@pytest.mark.parametrize(
    ("kind", "exchange"), often(product(KINDS, EXCHANGES), ("modules", "smart shadow"), ("joint", "smart"))
)
def test_forty_calls(kind: str, exchange: str) -> None:
    if kind == "joint" and "shadow" in exchange:
        pytest.skip("one module for all experts cannot shadow one: refused when the layer is made")
    expected = calls_alone(kind)
    results = run_ranks(RANKS, calls, kind, EXCHANGES[exchange], deadline_s=120)
    assert_alike(joined(results, kind), expected)
