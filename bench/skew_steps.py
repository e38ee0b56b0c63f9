"""What uneven gates cost ranks that really train, and what helps: eight workloads, steps in turns.

    .venv/bin/python bench/skew_steps.py [--json FILE] [--steps 44] [--rate 60]    needs root, ten minutes
    .venv/bin/python bench/skew_steps.py --smoke                                   two ranks, seconds
    .venv/bin/python bench/skew_steps.py --device cuda --ranks 2                   GPUs at hand, over NCCL

Four ranks, each in a network namespace of its own with a slow cable to a switch (bench/shaped_network.py),
train a model of one layer whose gate is made to choose what a workload says (`balance/workloads`): every case
sees the same routing in the same step. Learners of all cases live in the same processes and take their steps
in turns, in an order that is drawn anew each step, so that whatever else the machine does falls on all alike:

    forced      the same tokens under a gate that is forced to be even, experts in order
    static      experts in order, nothing moves
    shadows     experts are lent for the step at hand where that pays
    replicas    spare slots are filled by one plan from the first loads, and stay
    planned     the incremental planner, every ten steps and when loads jump, taken two steps later
    auto        planner and shadows choose for themselves

The table has the sum of all steps of `forced` over that of a case, `later` the second half of them; the
median ratio of steps side by side stands in the JSON. Times are those of the slowest rank. `fullest` is the
mean over steps of the fullest rank's rows over the mean, with experts in order; `MB` the experts' weights on
the fullest rank, slots that stand empty and what is lent in the last step included. All cases compute the
same loss but `forced`: `difference` is the largest relative one between them.

Two cores compute for four ranks, so what is uneven costs here is above all the cable of the rank that has the
hot experts; a device each would wait for compute as well. Prices are measured (`run.deterministic = false`).
"""

from __future__ import annotations

import functools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from _smoke import BenchParser, machine, write
from shaped_network import is_plain, join_switch, switched_network

from moeclipse.balance.workloads import WORKLOADS, SharedLayer, choices, tokens_of
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.moe.gate.gates import count_experts
from moeclipse.moe.gate.routing import Routing
from moeclipse.moe.layer import MoE
from moeclipse.moe.tokens import Tokens
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner

RANKS, EXPERTS, TOP_K, SPARE = 4, 16, 2, 2
MOST_RAGGED = 1.75
"""Tokens of the last rank under `ragged sources`, in means: it is the one that fills its samples."""
MODEL: dict[str, Any] = {
    "model.num_layers": 1,
    "model.d_model": 128,
    "model.head_dim": 32,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.tie_embeddings": True,
    "moe.num_experts": EXPERTS,
    "moe.d_ff": 64,
    "moe.transport": "direct",
    "gate.top_k": TOP_K,
    "gate.balance_loss": 0.0,
    "data.seq_len": 128,
    "run.deterministic": False,
}
ON_GPU = {"model.d_model": 2048, "moe.d_ff": 768, "data.seq_len": 1024, "model.dtype": "bfloat16"}
PLANNED = {
    "placement.planner": "incremental",
    "placement.start_step": 4,
    "placement.every": 10,
}
CASES: dict[str, dict[str, Any]] = {
    "forced": {},
    "static": {},
    "shadows": {"moe.shadow": "auto"},
    # An average with a decay of its own knows of no jumps, behind which plans would be made anew.
    "replicas": {**PLANNED, "placement.every": 1000, "placement.decay": 0.9},
    "planned": PLANNED,
    "auto": {**PLANNED, "placement.planner": "auto", "moe.shadow": "auto"},
}
FORCED = "forced"


@dataclass(frozen=True, kw_only=True)
class Bed:
    steps: int
    sequences: int
    """Of a rank and step."""
    workloads: tuple[str, ...]
    values: dict[str, Any]
    seed: int = 1
    own_hosts: bool = False
    """Each rank has a cable of its own, as hosts have."""


def choose(layer: MoE, workload: str, forced: bool, bed: Bed, mesh: Mesh) -> list[float]:
    """Let the gate choose what a workload says; scores and gradients stay the gate's own.

    Returns a list that grows by the fullest rank's rows over the mean with experts in order.
    """
    gate = layer.gate
    plain: Callable[[torch.Tensor, Tokens], Routing] = gate.forward
    fullest: list[float] = []

    def forward(x_TD: torch.Tensor, tokens: Tokens) -> Routing:
        routing = plain(x_TD, tokens)
        ids = chosen(workload, forced, bed.seed, tokens.step, mesh.num_ranks, len(x_TD), fullest)[mesh.rank]
        ids_TK = torch.from_numpy(ids).to(x_TD.device)
        scores_TK = routing.probs_TE.gather(1, ids_TK.clamp(min=0)).to(routing.scores_TK.dtype)
        load_E = count_experts(ids_TK, EXPERTS)
        return replace(routing, expert_ids_TK=ids_TK, scores_TK=scores_TK, load_E=load_E)

    gate.forward = forward  # type: ignore[method-assign]
    return fullest


def chosen(
    workload: str, forced: bool, seed: int, step: int, ranks: int, tokens: int, fullest: list[float]
) -> list[np.ndarray]:
    """Of each rank [tokens, k]; -1 where a rank has fewer tokens than the one that has most."""
    ragged = workload == "ragged sources"
    mean = int(tokens / MOST_RAGGED) if ragged else tokens
    shape = SharedLayer(num_experts=EXPERTS, top_k=TOP_K, num_ranks=ranks, tokens=mean)
    if forced:
        bounds = np.cumsum([0, *tokens_of(workload, shape)])
        found = [dealt(np.arange(bounds[rank], bounds[rank + 1])) for rank in range(ranks)]
    else:
        found = choices(workload, seed, step, shape)
    rows_P = np.bincount(np.concatenate(found).ravel(), minlength=EXPERTS).reshape(ranks, -1).sum(1)
    fullest.append(float(rows_P.max() / rows_P.mean()))
    none = [np.full((max(tokens - len(ids), 0), TOP_K), -1) for ids in found]
    return [np.concatenate([ids[:tokens], rest]) for ids, rest in zip(found, none, strict=True)]


def dealt(token_T: np.ndarray) -> np.ndarray:
    """[T, K]: so many tokens as there are experts give each of them the same, at all distances in turn.

    Neighbours alone would share a rank, and a token's row travels to a rank once.
    """
    stride_T = 1 + token_T // EXPERTS % ((EXPERTS - 1) // max(TOP_K - 1, 1))
    found: np.ndarray = (token_T[:, None] + stride_T[:, None] * np.arange(TOP_K)) % EXPERTS
    return found


def measure(mesh: Mesh, bed: Bed) -> list[dict[str, Any]]:
    if bed.own_hosts:
        mesh.hosts = tuple(range(mesh.num_ranks))
    if mesh.device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(mesh.device)
    return [under(mesh, workload, bed) for workload in bed.workloads]


def under(mesh: Mesh, workload: str, bed: Bed) -> dict[str, Any]:
    """All cases of one workload, in turns."""
    values = {**MODEL, **bed.values, "data.batch_size": bed.sequences * mesh.num_ranks}
    learners, fullest = {}, {}
    room = {"placement.slots_per_rank": EXPERTS // mesh.num_ranks + SPARE}
    for name, case in CASES.items():
        case = {**case, **(room if "placement.planner" in case else {})}
        learners[name] = Learner(with_values(TrainConfig(), {**values, **case}), mesh)
        for layer in learners[name].layers:
            fullest[name] = choose(layer, workload, name == FORCED, bed, mesh)
    times: dict[str, list[float]] = {name: [] for name in learners}
    losses: dict[str, list[float]] = {name: [] for name in learners}
    shuffled = random.Random(0)  # the same order on all ranks
    for step in range(bed.steps):
        for name in shuffled.sample(list(learners), len(learners)):
            mesh.barrier()
            begun = time.perf_counter()
            record = learners[name].step(step)
            if mesh.device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(max(mesh.gather_objects(time.perf_counter() - begun)))
            losses[name].append(record["loss"])
        if mesh.rank == 0:
            print(f"\r{workload}: {step + 1}/{bed.steps} ", end="", file=sys.stderr, flush=True)
    return row_of(workload, bed, learners, times, losses, fullest)


def row_of(
    workload: str,
    bed: Bed,
    learners: dict[str, Learner],
    times: dict[str, list[float]],
    losses: dict[str, list[float]],
    fullest: dict[str, list[float]],
) -> dict[str, Any]:
    half = bed.steps // 2
    table = np.array([losses[name] for name in learners if name != FORCED])
    row: dict[str, Any] = {
        "workload": workload,
        "fullest": float(np.mean(fullest["static"])),
        "difference": float(((table.max(0) - table.min(0)) / table.mean(0)).max()),
    }
    for name, learner in learners.items():
        beside = [a / b for a, b in zip(times[FORCED], times[name], strict=True)]
        row[name] = {
            "step_ms": 1e3 * statistics.median(times[name]),
            "throughput": sum(times[FORCED]) / sum(times[name]),
            "later": sum(times[FORCED][half:]) / sum(times[name][half:]),
            "beside": statistics.median(beside),
            "plans": learner.placement.plans_taken,
            "transfers": learner.placement.transfers,
            "chosen": learner.config.placement.planner,
            "times": times[name],
            **held_by(learner),
        }
    return row


def held_by(learner: Learner) -> dict[str, Any]:
    """Rows, replicas, loans and memory after the last step."""
    layer = learner.layers[0]
    placement, plan = layer.dispatcher.placement, layer.schedule.shadow_plan
    lent = np.zeros(placement.num_ranks, dtype=int)
    for _, ranks in () if plan is None else plan.shadows:
        lent[list(ranks)] += 1
    model = learner.config
    expert = 3 * model.model.d_model * model.moe.d_ff * torch.empty((), dtype=learner.dtype).itemsize
    slots = np.array([len(row) for row in placement.slots]) + lent
    return {
        "replicas": placement.num_replicas - placement.num_experts,
        "loans": int(lent.sum()),
        "mb": float(slots.max() * expert / 2**20),
    }


def main() -> int:
    smallest = {"steps": 16, "sequences": 1, "workloads": ["hot rank"], "ranks": 2}
    parser = BenchParser(__doc__, smoke=smallest)
    parser.add_argument("--steps", type=int, default=44)
    parser.add_argument("--sequences", type=int, default=2, help="of a rank and step")
    parser.add_argument("--rate", type=float, default=60.0, help="mbit of a rank's cable")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--inside", type=Path, help="in the namespace; write what was measured here")
    given = parser.parse_args()
    values = {"data.seq_len": 16} if given.smoke else ON_GPU if given.device == "cuda" else {}
    bed = Bed(
        steps=given.steps,
        sequences=given.sequences,
        workloads=tuple(given.workloads),
        values=values,
        seed=given.seed,
    )
    limits = {"deadline_s": 5400, "collective_deadline_s": 300.0}
    if given.device == "cuda":
        if torch.cuda.device_count() == 0:
            print("bench/skew_steps.py --device cuda: this machine has no CUDA device.", file=sys.stderr)
            return 2
        bed = replace(bed, values={**values, "run.device": "cuda"})
        return report(
            run_ranks(given.ranks, measure, bed, device="cuda", backend="nccl", **limits)[0], given.json
        )
    if given.inside is None:
        with tempfile.TemporaryDirectory() as folder, switched_network(given.smoke) as run:
            out = Path(folder) / "rows.json"
            code = run([sys.executable, __file__, *sys.argv[1:], "--inside", str(out)]).returncode
            return code or report(json.loads(out.read_text()), given.json)
    cables = not is_plain()
    before = functools.partial(join_switch, rate_mbit=given.rate) if cables else None
    bed = replace(bed, own_hosts=cables)
    write(given.inside, run_ranks(given.ranks, measure, bed, before=before, **limits)[0])
    return 0


def report(rows: list[dict[str, Any]], file: Path | None) -> int:
    names = [name for name in CASES if name != FORCED]
    print(
        f"\n\n{'workload':16}{'fullest':>8}{'forced ms':>10}" + "".join(f"{n:>10}{'later':>7}" for n in names)
    )
    for row in rows:
        cells = "".join(f"{row[name]['throughput']:10.2f}{row[name]['later']:7.2f}" for name in names)
        print(f"{row['workload']:16}{row['fullest']:8.2f}{row[FORCED]['step_ms']:10.0f}{cells}")
    heads = ("plans", "transfers", "replicas", "loans", "MB", "static MB", "difference")
    print(f"\n{'auto':16}" + "".join(f"{head:>11}" for head in heads))
    for row in rows:
        auto = row["auto"]
        numbers = "".join(f"{auto[name]:11}" for name in ("plans", "transfers", "replicas", "loans"))
        memory = f"{auto['mb']:11.2f}{row['static']['mb']:11.2f}"
        print(f"{row['workload']:16}{numbers}{memory}{row['difference']:11.1e}")
    checks = {
        "worst_auto": min(row["auto"]["throughput"] for row in rows),
        "worst_auto_later": min(row["auto"]["later"] for row in rows),
        "worst_over_static": min(row["auto"]["throughput"] / row["static"]["throughput"] for row in rows),
    }
    print("\n" + "  ".join(f"{name} {value:.2f}" for name, value in checks.items()))
    write(file, {"rows": rows, "checks": checks, "machine": machine()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
