"""The experiment of the document that placement goes back to: a segment-recurrent model with moving experts.

    .venv/bin/python bench/placement.py --part memory

Four ranks of this machine train a model whose attention also sees the 128 tokens before its segment
(`model.memory`), with experts that stay, with a random placement every 5 steps, and with planned ones. The
gate is the model's own. The three runs take turns, step by step, and must have the same losses: where an
expert lives changes nothing but the order in which numbers are added.
"""

from __future__ import annotations

from typing import Any

from _placement_steps import RANKS, Bed, in_turn, make

from moeclipse.comm.mesh import Mesh
from moeclipse.testing.run_ranks import run_ranks

MODEL: dict[str, Any] = {
    "model.num_layers": 3,
    "model.d_model": 128,
    "model.head_dim": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.memory": 128,
    "model.dtype": "float32",
    "moe.num_experts": 8,
    "moe.d_ff": 128,
    "gate.top_k": 2,
    "gate.balance_loss": 0.0,
    "data.seq_len": 128,
    "data.batch_size": 16,
    "data.order": "stream",
    "optim.lr": 3e-3,
}
MOVING: dict[str, Any] = {
    "placement.slots_per_rank": 4,
    "placement.start_step": 3,
    "placement.every": 10,
    "integrity.every": 10,
}
CASES: dict[str, dict[str, Any]] = {
    "static": {},
    "random": {**MOVING, "placement.planner": "random", "placement.every": 5},
    "planned": {**MOVING, "placement.planner": "incremental"},
}


BEDS = {
    "long": Bed(repeats=60),
    "short": Bed(repeats=4),
    "smoke": Bed(repeats=1, values={"data.seq_len": 32, "data.batch_size": 4, "model.memory": 32}),
}


def measure(mesh: Mesh, bed: Bed) -> dict[str, Any]:
    values = {**MODEL, "run.steps": 2 * bed.repeats, **bed.values}
    learners = {name: make(mesh, {**values, **case}) for name, case in CASES.items()}
    return in_turn(mesh, learners, bed.repeats, warmup=bed.warmup)


def run_here(size: str) -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(RANKS, measure, BEDS[size], deadline_s=1800)[0]
    return found


def report(found: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    rows = found["rows"]
    print(
        f"\n\n{MODEL['moe.num_experts']} experts, {RANKS} ranks, 3 layers, {len(rows[0]['losses'])} steps\n"
    )
    print(
        f"{'case':<10}{'first loss':>11}{'last loss':>11}{'ms':>7}{'plans':>7}{'transfers':>11}{'balance':>9}"
    )
    for row in rows:
        print(
            f"{row['case']:<10}{row['losses'][0]:>11.5f}{row['losses'][-1]:>11.5f}{row['step_ms']:>7.0f}"
            f"{row['plans']:>7}{row['transfers']:>11}{row['balance']:>9.3f}"
        )
    print(f"\nlosses differ by {found['same_loss']:.1e} at most (fp32)")
    return rows, {"memory_loss_difference": found["same_loss"]}
