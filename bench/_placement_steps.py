"""Step times of real training on a slow wire, under a skewed gate and under an even one.

    .venv/bin/python bench/placement.py --part end_to_end [--json FILE] [--short]

Four ranks in a network namespace of their own, whose loopback is a slow wire (bench/shaped_network.py), train
a small model with 16 experts. The gate is made to choose experts with Zipf frequencies (s = 1.2), or evenly,
the same ones in every case, so all cases of a gate compute the same loss; only where experts live differs:

    static                experts in order, four on each rank
    placement             six slots per rank, planned once from the loads of the first steps (incremental)
    placement + shadows   the same, and experts are shadowed for a step where that pays
    auto                  planner and shadows choose for themselves, every 5 steps, in six slots per rank
    auto, own slots       the same with the slots that a run settles when nothing is said (`spare_slots`)
    auto, five slots      the same with those of a run that has no memory to spare

Under an even gate there is nothing to win: `auto` may cost at most 2 % there. The cases take turns, step by
step; the table shows the median step of the slowest rank, and the median of what a step of static took beside
it (`gain`), which drifts of the machine change least. A plan is taken during the first steps, which are left
out. All ranks share one wire, so bytes add up over ranks, and two cores compute for four: what is won comes
from rows that stay on their rank more than from even ranks. On a cluster, where each rank has a wire and a
processor of its own, the fullest rank counts as well. `wire` is the time that the bytes of rows alone take at
the shaped rate: what is left of a step beside it is compute, gradients and weights, which placement does not
make shorter.

In short there are a quarter of the tokens, in a step of which less is wire, and half of the cases.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from shaped_network import shaped_network

from moeclipse.balance.objective import EXCHANGES
from moeclipse.balance.split import ReplicaTable, split_rows
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.moe.gate.gates import count_experts
from moeclipse.moe.gate.routing import Routing
from moeclipse.moe.layer import MoE
from moeclipse.moe.tokens import Tokens
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.placement.spare_slots import choose_slots, left_open
from moeclipse.train.step.learner import Learner

RANKS, EXPERTS, ZIPF, SLOTS = 4, 16, 1.2, 6
RATE_MBIT = 120.0
WARMUP = 6
MODEL: dict[str, Any] = {
    "model.num_layers": 1,
    "model.d_model": 256,
    "model.head_dim": 32,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.tie_embeddings": True,
    "model.dtype": "float32",
    "moe.num_experts": EXPERTS,
    "moe.d_ff": 64,
    "moe.schedule": "smart",
    "moe.group_size": 1,
    "moe.chunks": 1,
    "gate.top_k": 1,
    "gate.renormalise": False,
    "gate.balance_loss": 0.0,
    "data.seq_len": 128,
    "data.batch_size": 128,
    "optim.accumulate": 4,
}
PLANNED: dict[str, Any] = {
    "placement.planner": "incremental",
    "placement.slots_per_rank": SLOTS,
    "placement.start_step": 2,
    "placement.every": 1000,
}
AUTO: dict[str, Any] = {
    "placement.planner": "auto",
    "moe.shadow": "auto",
    "placement.start_step": 2,
    "placement.every": 5,
    "placement.slots_per_rank": SLOTS,
}
CASES: dict[str, dict[str, Any]] = {
    "static": {},
    "placement": PLANNED,
    "placement + shadows": {**PLANNED, "moe.shadow": "auto"},
    "auto": AUTO,
    "auto, own slots": {**AUTO, "placement.slots_per_rank": "auto"},
    "auto, five slots": {**AUTO, "placement.slots_per_rank": 5},
}
GATES: dict[str, tuple[float, tuple[str, ...]]] = {
    "skewed": (ZIPF, tuple(CASES)),
    "even": (0.0, ("static", "auto, own slots")),
}
"""Zipf's exponent, and the cases that are held against each other."""
NAMES = {
    "placement": "",
    "placement + shadows": "_shadows",
    "auto": "_auto",
    "auto, own slots": "_auto_own_slots",
    "auto, five slots": "_auto_five_slots",
}
"""Of checks: how much faster than static a case is; above 1 is faster."""


def skew(layer: MoE, exponent: float = ZIPF) -> None:
    """Let the gate choose with Zipf frequencies; probabilities and gradients stay the gate's own."""
    gate = layer.gate
    plain: Callable[[torch.Tensor, Tokens], Routing] = gate.forward
    weight_E = torch.arange(1, EXPERTS + 1, dtype=torch.float64) ** -exponent

    def forward(x_TD: torch.Tensor, tokens: Tokens) -> Routing:
        routing = plain(x_TD, tokens)
        seed = (tokens.step * 1009 + tokens.microbatch) * 1_000_003 + tokens.first
        draw = torch.rand(
            len(x_TD), EXPERTS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        ids_TK = (draw.log() / weight_E).topk(routing.expert_ids_TK.shape[1]).indices
        scores_TK = routing.probs_TE.gather(1, ids_TK).to(routing.scores_TK.dtype)
        load_E = count_experts(ids_TK, EXPERTS)
        return replace(routing, expert_ids_TK=ids_TK, scores_TK=scores_TK, load_E=load_E)

    gate.forward = forward  # type: ignore[method-assign]


@dataclass(frozen=True, kw_only=True)
class Bed:
    """How much of it is run."""

    repeats: int
    warmup: int = WARMUP
    values: dict[str, Any] = field(default_factory=dict)
    gates: tuple[str, ...] = tuple(GATES)
    cases: tuple[str, ...] = tuple(CASES)


BEDS = {
    "long": Bed(repeats=9),
    "short": Bed(
        repeats=2,
        values={"data.batch_size": 32},
        cases=("static", "placement", "auto, own slots"),
    ),
    "smoke": Bed(
        repeats=1,
        warmup=3,
        values={"data.batch_size": 16, "data.seq_len": 16},
        gates=("skewed",),
        cases=("static", "auto"),
    ),
}


def measure(mesh: Mesh, bed: Bed) -> dict[str, Any]:
    return {name: under_gate(mesh, *GATES[name], bed) for name in bed.gates}


def under_gate(mesh: Mesh, exponent: float, cases: Sequence[str], bed: Bed) -> dict[str, Any]:
    learners = {
        name: make(mesh, {**MODEL, **CASES[name], **bed.values}) for name in cases if name in bed.cases
    }
    for learner in learners.values():
        for layer in learner.layers:
            skew(layer, exponent)
    return in_turn(mesh, learners, bed.repeats, warmup=bed.warmup)


def make(mesh: Mesh, values: dict[str, Any]) -> Learner:
    config = with_values(TrainConfig(), values)
    if left_open(config):
        config = with_values(config, choose_slots(config, mesh)[0])
    return Learner(config, mesh)


def in_turn(
    mesh: Mesh,
    learners: dict[str, Learner],
    repeats: int,
    *,
    warmup: int = WARMUP,
    before: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Train all of them side by side, each step of one after that of another; `before` each turn."""
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {name: [] for name in learners}
    losses: dict[str, list[float]] = {name: [] for name in learners}
    saved: dict[str, float] = dict.fromkeys(learners, 0.0)
    for step in range(warmup + repeats):
        for name, learner in learners.items():
            before(name)
            mesh.barrier()
            begun = time.perf_counter()
            record = learner.step(step)
            seconds = max(mesh.gather_objects(time.perf_counter() - begun))
            losses[name].append(record["loss"])
            saved[name] += record.get("plan_before_ms", 0.0) - record.get("plan_after_ms", 0.0)
            if step >= warmup:
                times[name].append(seconds)
        if mesh.rank == 0:
            done = max(step + 1 - warmup, 0)
            print(f"\rsteps: {done}/{repeats} ", end="", file=sys.stderr, flush=True)
    rows, first = [], next(iter(times.values()))
    for name, learner in learners.items():
        beside = [a / b for a, b in zip(first, times[name], strict=True)]
        rows.append(
            {
                "case": name,
                "step_ms": 1e3 * statistics.median(times[name]),
                "gain": statistics.median(beside),
                "steps_ms": [1e3 * seconds for seconds in times[name]],
                "losses": losses[name],
                "predicted_ms": saved[name],
                "plans": learner.placement.plans_taken,
                "transfers": learner.placement.transfers,
                **judge(learner),
            }
        )
    return {"rows": rows, "same_loss": spread(losses)}


def judge(learner: Learner) -> dict[str, Any]:
    """How even ranks are, and how many rows travel, with the average loads."""
    layer = learner.layers[0]
    counts_PE = np.rint(learner.loads.average.rows_LPE[0]).astype(np.int64)
    placement = layer.dispatcher.placement
    split = split_rows(counts_PE, layer.dispatcher.table or ReplicaTable.of(placement))
    plan = layer.schedule.shadow_plan
    rows = float(counts_PE.sum()) - float(np.trace(split.sent_PP))
    wire_s = EXCHANGES * rows * 4 * learner.config.model.d_model / (RATE_MBIT * 1e6 / 8)
    return {
        "wire_ms": 1e3 * wire_s,
        "balance": split.balance,
        "sent": 1 - float(np.trace(split.sent_PP)) / float(counts_PE.sum()),
        "replicas": placement.num_replicas,
        "shadows": 0 if plan is None else sum(len(ranks) for _, ranks in plan.shadows),
    }


def spread(losses: dict[str, list[float]]) -> float:
    """The largest relative difference between cases in any step."""
    table = np.array(list(losses.values()))
    return float(((table.max(0) - table.min(0)) / table.mean(0)).max())


def run_here(size: str) -> dict[str, Any]:
    """All cases on a shaped network; ends the program with status 2 where there is none."""
    with tempfile.TemporaryDirectory() as folder, shaped_network(RATE_MBIT) as run:
        out = Path(folder) / "rows.json"
        done = run([sys.executable, __file__, "--inside", str(out), "--size", size])
        if done.returncode:
            raise SystemExit(done.returncode)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def report(found: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Print the tables; rows and checks."""
    rows: list[dict[str, Any]] = []
    checks: dict[str, float] = {}
    for gate, told in found.items():
        exponent = GATES[gate][0]
        print(f"\n\n{EXPERTS} experts, {RANKS} ranks, Zipf {exponent:g}, {RATE_MBIT:g} mbit: median step\n")
        print(
            f"{'case':<22}{'ms':>7}{'wire':>7}{'gain':>7}{'balance':>9}{'sent':>7}{'replicas':>10}"
            f"{'shadows':>9}{'plans':>7}"
        )
        for row in told["rows"]:
            print(
                f"{row['case']:<22}{row['step_ms']:>7.0f}{row['wire_ms']:>7.0f}{row['gain']:>6.2f}x"
                f"{row['balance']:>9.3f}{row['sent']:>7.0%}{row['replicas']:>10}{row['shadows']:>9}"
                f"{row['plans']:>7}"
            )
        print(f"\nlosses of the cases differ by {told['same_loss']:.1e} at most (fp32)")
        rows += [{"gate": gate, **row} for row in told["rows"]]
        prefix = "end_to_end" if gate == "skewed" else f"end_to_end_{gate}"
        checks |= {f"{prefix}{NAMES[row['case']]}": row["gain"] for row in told["rows"][1:]}
        checks[f"{prefix}_loss_difference"] = told["same_loss"]
    return rows, checks


def main() -> int:
    """The part that runs inside the namespace."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=BEDS, required=True)
    parser.add_argument("--inside", type=Path, required=True)
    given = parser.parse_args()
    found = run_ranks(RANKS, measure, BEDS[given.size], deadline_s=1800, collective_deadline_s=60)[0]
    given.inside.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
