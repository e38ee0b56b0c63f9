"""A layer on ranks against the same layer in one process: outputs and every raw gradient, joined."""

from __future__ import annotations

from typing import Any

import torch

from moeclipse.comm.mesh import Mesh
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
    tokens = Tokens(mesh=mesh, first=first, total=sum(sizes), step=5, largest=max(sizes))
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
