"""Whole training steps over NCCL: what moves, saves, scales and starts again, against one rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parent.parent / "train"))

from test_learner import configure
from test_nccl import HAS_NCCL, MODEL, SMART, corpus  # noqa: F401

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.start import RankPlace, start, stop
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.checkpoints.checkpoint import Checkpoint
from moeclipse.train.config import TrainConfig
from moeclipse.train.ranks import PatientRanks
from moeclipse.train.step.learner import Learner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.nccl,
    pytest.mark.usefixtures("mps"),
    pytest.mark.skipif(not HAS_NCCL, reason="needs a CUDA device and NCCL"),
]

STEPS = 8
MOVES = {
    "placement.planner": "random",
    "placement.start_step": 1,
    "placement.every": 2,
    "placement.slots_per_rank": 3,
    "integrity.every": 1,
}
PAIRS = {"pipeline.schedule": "dualpipev", "pipeline.overlap": "pair+self"}
HALF = {"model.dtype": "float16"}
KERNELS = {"model.dtype": "bfloat16", "moe.kernels": "auto"}
OVER_NCCL: dict[str, Any] = {"device": "cuda", "backend": "nccl", "deadline_s": 150}
LAYOUTS: dict[str, tuple[dict[str, int], list[dict[str, Any]]]] = {
    "ep 2": ({}, [MOVES, {**SMART, **MOVES}, HALF, KERNELS, {**KERNELS, **SMART}]),
    "pp 2": ({"pp": 2}, [{**PAIRS, **HALF}, {**PAIRS, **KERNELS}]),
    "tp 2": ({"tp": 2}, [HALF, KERNELS]),
}
ONE = {**PAIRS, **SMART, **MOVES}  # what one rank needs none of


def curves(mesh: Mesh, configs: list[TrainConfig]) -> list[tuple[list[float], int]]:
    """Losses of each, and how many plans were taken."""
    found = []
    for config in configs:
        learner = Learner(config, mesh)
        losses = [float(learner.step(step)["loss"]) for step in range(STEPS)]
        found.append((losses, learner.placement.plans_taken if learner.placement.in_use else 0))
    return found


def plain(case: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in case.items() if name not in ONE}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_curve_equals_that_of_one_rank(name: str, corpus: str) -> None:  # noqa: F811
    axes, cases = LAYOUTS[name]
    expected = run_ranks(
        1, curves, [configure(corpus, **{**MODEL, **plain(case)}) for case in cases], device="cuda"
    )[0]
    by_rank = run_ranks(
        2, curves, [configure(corpus, **{**MODEL, **case}) for case in cases], **OVER_NCCL, **axes
    )
    for case, (wanted, _), *found in zip(cases, expected, *by_rank, strict=True):
        bound = 2e-2 if "model.dtype" in case else 1e-12
        for losses, plans in found:
            assert difference(torch.tensor(losses), torch.tensor(wanted)) <= bound, (name, case)
            assert plans >= 2 * ("placement.planner" in case)


def saved(mesh: Mesh, config: TrainConfig, folder: str) -> list[float]:
    learner = Learner(config, mesh)
    losses = [float(learner.step(step)["loss"]) for step in range(STEPS // 2)]
    learner.save(Path(folder), STEPS // 2)
    return losses


def continued(mesh: Mesh, config: TrainConfig, path: str) -> list[float]:
    learner = Learner(config, mesh)
    begin = learner.load(Checkpoint.open(path, PatientRanks(mesh, 60.0)))
    return [float(learner.step(step)["loss"]) for step in range(begin, STEPS)]


def test_a_checkpoint_of_one_layout_continues_in_others(corpus: str, tmp_path: Path) -> None:  # noqa: F811
    config = configure(corpus, **MODEL)
    ((expected, _),) = run_ranks(1, curves, [config], device="cuda")[0]
    first = run_ranks(2, saved, config, str(tmp_path), **OVER_NCCL)[0]
    (path,) = tmp_path.glob("step-*")
    for axes in ({"pp": 2}, {"tp": 2}, {"dp": 2}):
        for then in run_ranks(2, continued, config, str(path), **OVER_NCCL, **axes):
            assert difference(torch.tensor(first + then), torch.tensor(expected)) <= 1e-12, axes


def again(mesh: Mesh, folder: str) -> list[int]:
    """Leaves and joins twice more."""
    found = [sum(mesh.gather_objects(mesh.rank))]
    stop()
    for attempt in (1, 2):
        place = RankPlace(rank=mesh.rank, num_ranks=2, local_rank=mesh.rank, local_ranks=2)
        store = dist.FileStore(f"{folder}/{attempt}", 2)
        watch = start(place, device=mesh.device, deadline_s=30, store=store, backend="nccl")
        other = Mesh(dp=1, ep=2, rank=mesh.rank, device=mesh.device, watch=watch)
        found.append(sum(other.gather_objects(other.rank + attempt)))
        stop()
    return found


def test_three_starts_and_stops_in_one_process(tmp_path: Path) -> None:
    assert run_ranks(2, again, str(tmp_path), **OVER_NCCL) == [[1, 3, 5], [1, 3, 5]]
