"""Averaging weights is not summing gradients: how far apart the two ways to keep replicas are.

    .venv/bin/python bench/placement.py --part fedavg

Four ranks train a small model in float64 with 8 experts in 16 slots, twice from the same start: with the
gradients of replicas summed (placement.reduce = "sum", which equals one process), and with "fedavg", where
each replica steps with its own part and weights are averaged by rows every N steps. For each N:

    first update   distance of the experts' first update from the true one, relative (after the first average)
    weights        distance of the experts' weights after all steps, relative to how far the true ones went
    loss           of the last step, against that of "sum"

A third way that is sometimes taken for an average of gradients, (n_r / n) x the replica's own sum, is
compared with the true gradient directly.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner

RANKS = 4
EVERY = (1, 5, 20)
MODEL: dict[str, Any] = {
    "model.num_layers": 2,
    "model.d_model": 32,
    "model.head_dim": 8,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.dtype": "float64",
    "moe.num_experts": 8,
    "moe.d_ff": 32,
    "data.seq_len": 32,
    "data.batch_size": 16,
    "optim.warmup_steps": 1,
    "placement.slots": ((0, 1, 2, 3), (2, 3, 4, 5), (4, 5, 6, 7), (6, 7, 0, 1)),
}


def configure(corpus: str, **changes: Any) -> TrainConfig:
    return with_values(TrainConfig(), {**MODEL, "data.files": (corpus,), **changes})


def experts(learner: Learner) -> dict[str, torch.Tensor]:
    """Weights of the experts whose primary is here, by name."""
    found = {}
    for piece in learner.optim.pieces():
        if piece.name.startswith("weight/") and ".experts." in piece.name:
            found[piece.name] = piece.data.clone()
    return found


def trained(mesh: Mesh, config: TrainConfig, steps: int) -> tuple[list[dict[str, torch.Tensor]], list[float]]:
    """Experts at the start, after the first average, and at the end; and the losses."""
    learner = Learner(config, mesh)
    kept, losses = [experts(learner)], []
    first = config.placement.average_every if config.placement.reduce == "fedavg" else 1
    for step in range(steps):
        losses.append(learner.step(step)["loss"])
        if step + 1 == first:
            kept.append(experts(learner))
    learner.placement.before_save()
    return [*kept, experts(learner)], losses


def weighted(mesh: Mesh, config: TrainConfig) -> tuple[float, float]:
    """Squared distances over replicated experts: of sum_r (n_r / n) g_r from sum_r g_r, and of the latter."""
    learner = Learner(config, mesh)
    learner.backward(0)
    apart = size = 0.0
    for placed in learner.placement.layers:
        placement = placed.placement
        computed = mesh.gather_objects(placed.layer.schedule.take_computed())
        for bucket in placed.buckets:
            bucket.reduced()
            rows = bucket.grads.view(bucket.num_slots, bucket.size)
            everyone = mesh.gather_objects(rows.tolist())
            for expert, ranks in enumerate(placement.holders):
                slots = [placement.slots[rank].index(expert) for rank in ranks]
                parts = [torch.tensor(everyone[r][s]) for r, s in zip(ranks, slots, strict=True)]
                seen = [computed[r][s] for r, s in zip(ranks, slots, strict=True)]
                true = sum(parts)
                share = sum(n / max(sum(seen), 1) * part for n, part in zip(seen, parts, strict=True))
                apart += float((share - true).square().sum())
                size += float(true.square().sum())
    return apart, size


def distance(a: list[dict[str, Any]], b: list[dict[str, Any]], origin: list[dict[str, Any]]) -> float:
    """|a - b| / |b - origin| over all experts of all ranks."""
    apart = size = 0.0
    for mine, theirs, begun in zip(a, b, origin, strict=True):
        for name, value in theirs.items():
            apart += float((mine[name] - value).square().sum())
            size += float((value - begun[name]).square().sum())
    return (apart / size) ** 0.5


def run_here(size: str) -> dict[str, Any]:
    steps = {"smoke": 1, "short": 4, "long": 40}[size]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "text.txt"
        corpus.write_text(Path(__file__).read_text() + Path(torch.__file__).read_text()[:60000])
        truth = run_ranks(RANKS, trained, configure(str(corpus)), steps, deadline_s=600)
        squares = run_ranks(RANKS, weighted, configure(str(corpus)))
        rows = []
        for every in (every for every in EVERY if every <= steps):
            fed = {"placement.reduce": "fedavg", "placement.average_every": every}
            reach = configure(str(corpus), **fed, **{"integrity.every": 0})
            found = run_ranks(RANKS, trained, reach, steps, deadline_s=600)
            start = [kept[0] for kept, _ in truth]
            ends = ([kept[-1] for kept, _ in found], [kept[-1] for kept, _ in truth])
            row = {"every": every, "weights": distance(*ends, start), "loss": found[0][1][-1]}
            if every == 1:
                firsts = ([kept[1] for kept, _ in found], [kept[1] for kept, _ in truth])
                row["first_update"] = distance(*firsts, start)
            rows.append(row)
    apart, size = squares[0]
    return {"rows": rows, "loss": truth[0][1][-1], "steps": steps, "shares": (apart / size) ** 0.5}


def report(found: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    print(f"8 experts in 16 slots on {RANKS} ranks, float64, AdamW, {found['steps']} steps\n")
    print(f"gradients weighted by n_r / n instead of summed: {found['shares']:.2f} of the gradient away\n")
    print(f"{'reduce':<22}{'first update':>13}{'weights':>9}{'loss':>9}")
    print(f"{'sum':<22}{0.0:>13.3f}{0.0:>9.3f}{found['loss']:>9.4f}")
    for row in found["rows"]:
        first = f"{row['first_update']:.3f}" if "first_update" in row else "-"
        print(
            f"{'fedavg, every ' + str(row['every']):<22}{first:>13}{row['weights']:>9.3f}{row['loss']:>9.4f}"
        )
    checks = {"fedavg_first_update": found["rows"][0]["first_update"], "fedavg_shares": found["shares"]}
    return found["rows"], checks
