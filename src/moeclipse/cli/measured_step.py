"""How much slower kernels and messages are inside a training step than alone: small steps of ours, beside
their prediction.

    kernels     a step has work that no price is of (views, masks, Python between two kernels), caches are
                cold in it, and on CPUs other ranks use the same memory: two ranks measure at once there
    messages    on CPUs threads send, which wait for a core that computes; two ranks that share the experts

The model is of no use but this.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from moeclipse.cli.simulate_run import step_on
from moeclipse.cli.two_ranks import Answer, ask_two_ranks, mesh_of_two
from moeclipse.core.config import with_values
from moeclipse.core.outside import parse_json
from moeclipse.cost.cluster import cluster_from
from moeclipse.train.config import TrainConfig

WARM, TIMED = 3, 5
PATIENCE_S = 120.0
COMMON = {
    "data.files": (__file__,),
    "moe.shadow": "off",
    "placement.planner": "static",
    "pipeline.overlap": "off",
    "pipeline.recompute": "off",
    "parallel.peer": "off",
    "optim.accumulate": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    "cpu": {
        "model.num_layers": 2,
        "model.d_model": 192,
        "model.num_heads": 3,
        "model.num_kv_heads": 3,
        "model.head_dim": 64,
        "model.vocab_size": 1024,
        "model.dtype": "float32",
        "moe.num_experts": 16,
        "moe.d_ff": 384,
        "gate.top_k": 2,
        "data.seq_len": 256,
        "data.batch_size": 4,
    },
    "cuda": {
        "model.num_layers": 4,
        "model.d_model": 1024,
        "model.num_heads": 16,
        "model.num_kv_heads": 4,
        "model.head_dim": 64,
        "model.vocab_size": 16384,
        "model.dtype": "bfloat16",
        "moe.num_experts": 64,
        "moe.d_ff": 512,
        "gate.top_k": 4,
        "data.seq_len": 1024,
        "data.batch_size": 16,
    },
}


def measured_config(kind: str) -> TrainConfig:
    return with_values(TrainConfig(), {**COMMON, **SHAPES[kind]})


def measured_step(kind: str) -> float | None:
    """Seconds of its step here; None where it could not run. On CPUs it forks: it must come first."""
    if kind == "cuda":
        return _step_seconds(kind)
    yes, text = ask_two_ranks(_of_a_rank, PATIENCE_S)
    return float(parse_json(text)) if yes else None


def _of_a_rank(_rank: int, _folder: str) -> Answer:
    import torch

    torch.set_num_threads(1)
    return True, json.dumps(_step_seconds("cpu"))


def shared_step() -> tuple[float, float] | None:
    """(seconds of its step on two CPU ranks that share the experts, what the busiest one had of the mean)."""
    yes, text = ask_two_ranks(_of_a_sharing_rank, PATIENCE_S)
    if not yes:
        return None
    seconds, imbalance = parse_json(text)
    return float(seconds), float(imbalance)


def _of_a_sharing_rank(rank: int, folder: str) -> Answer:
    import torch

    from moeclipse.comm.start import stop
    from moeclipse.train.step.learner import Learner

    torch.set_num_threads(1)
    learner = Learner(measured_config("cpu"), mesh_of_two(rank, folder, "cpu", PATIENCE_S))
    records = [learner.step(step) for step in range(WARM + TIMED)][WARM:]
    stop()
    seconds = 1e-3 * statistics.median(record["step_ms"] for record in records)
    return True, json.dumps([seconds, statistics.mean(busiest(record["load"], 2) for record in records)])


def busiest(load: Sequence[Sequence[int]], ranks: int) -> float:
    """What the fullest of some ranks has of the mean, in the mean of layers; experts are where they began."""
    found = []
    for load_E in load:
        held = len(load_E) // ranks
        most = max(sum(load_E[held * rank : held * (rank + 1)]) for rank in range(ranks))
        found.append(ranks * most / sum(load_E))
    return statistics.mean(found)


def _step_seconds(kind: str) -> float:
    from moeclipse.comm.mesh import Mesh
    from moeclipse.train.step.learner import Learner

    learner = Learner(measured_config(kind), Mesh.single(kind))
    return 1e-3 * statistics.median([learner.step(step)["step_ms"] for step in range(WARM + TIMED)][WARM:])


def predicted_step(
    kind: str, tables: Mapping[str, Any], inside: float = 1.0, ep: int = 1, imbalance: float = 1.0
) -> float:
    """Seconds, where kernels take `inside` times what they take alone."""
    config = measured_config(kind)
    machine = cluster_from(
        {**tables, "kernels": {**tables.get("kernels", {}), "inside": inside}}, "this machine"
    )
    return step_on(machine, config, (1, ep), imbalance).answer(config.pipeline.schedule).summary.makespan


def kernels_inside(kind: str, tables: Mapping[str, Any], seconds: float) -> float:
    """So that `seconds` are predicted; never less than half of what kernels take alone."""
    once, twice = (predicted_step(kind, tables, inside) for inside in (1.0, 2.0))
    return max(1.0 + (seconds - once) / (twice - once), 0.5)


def message_inside(tables: Mapping[str, Any], seconds: float, imbalance: float) -> float:
    """Seconds of a message, so that `seconds` of the shared step are predicted; never less than alone."""
    alone = tables["near"]["latency"]

    def predicted(latency: float) -> float:
        links = {name: {**tables[name], "latency": latency} for name in ("near", "far")}
        inside = tables["kernels"]["inside"]
        return predicted_step("cpu", {**tables, **links}, inside, ep=2, imbalance=imbalance)

    once, later = predicted(alone), predicted(alone + 1e-3)
    return float(max(alone + 1e-3 * (seconds - once) / (later - once), alone))
