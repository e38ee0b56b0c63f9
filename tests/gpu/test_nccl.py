"""Every layout over NCCL gives the gradients of one process.

Ranks share a GPU where there are not enough of them (`testing/run_ranks`); they start once for a layout and
run all its cases, three steps each: the first one of a pipeline settles op by op, later ones do not.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parent.parent / "train"))

from test_learner import configure
from test_pipelined import BASE, MODELS, SCHEDULES

from moeclipse.comm.mesh import Mesh
from moeclipse.pipeline.config import PAIRED
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner
from pieces import Pieces, join, reduced

# Counted through NVML: asking CUDA itself here would spoil forked ranks.
HAS_NCCL = torch.cuda.device_count() > 0 and dist.is_nccl_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.nccl,
    pytest.mark.usefixtures("mps"),
    pytest.mark.skipif(not HAS_NCCL, reason="needs a CUDA device and NCCL"),
]

MODEL = {**BASE, **MODELS["softmax"], "model.num_kv_heads": 2}
SMART = {"moe.schedule": "smart", "moe.group_size": 1, "moe.chunks": 2}
OFF = {"pipeline.overlap": "off", "pipeline.schedule": "auto", "pipeline.recompute": "off"}
OFF |= {"moe.shadow": "off", "moe.transport": "direct"}


BOTH = ("off", "pair+self")


def stages(*schedules: str, overlaps: tuple[str, ...] = BOTH, **more: Any) -> list[dict[str, Any]]:
    return [
        {"pipeline.schedule": schedule, "pipeline.overlap": overlap, **more}
        for schedule in schedules
        for overlap in overlaps
    ]


LAYOUTS: dict[str, tuple[int, dict[str, int], list[dict[str, Any]]]] = {
    "pp 2": (
        2,
        {"pp": 2},
        [
            *stages(*SCHEDULES),
            *stages(*PAIRED[1:], overlaps=("pair",)),
            *stages("1f1b", "dualpipev", overlaps=("pair+self",), **{"pipeline.recompute": "full"}),
        ],
    ),
    "pp 4": (4, {"pp": 4}, stages("dualpipev", "vpp+1", **{"model.num_layers": 8, "optim.accumulate": 8})),
    "ep 2": (
        2,
        {},
        [
            {},
            SMART,
            {**SMART, "moe.shadow": (0, 2)},
            {"pipeline.overlap": "pair+self"},
            {"gate.capacity_factor": 0.8},
            {"gate.choose": "top_p", "gate.top_k": 3},
            {"moe.transport": "two_level"},
        ],
    ),
    "ep 4": (4, {}, [SMART, {**SMART, "moe.shadow": (0, 2)}, {**SMART, "pipeline.overlap": "pair+self"}]),
    "dp 2 x ep 2": (4, {"dp": 2}, [{}, SMART]),
    "tp 2": (2, {"tp": 2}, [{}, {"parallel.sequence_parallel": False}, {"moe.expert_tp": "sharded"}]),
    "ep 2 x tp 2": (4, {"tp": 2}, [{}, {"moe.expert_tp": "sharded"}]),
    "ep 2 x pp 2": (
        4,
        {"pp": 2},
        [*stages("dualpipev", "1f1b", "vpp+1"), *stages("zb-h1", overlaps=("pair+self",), **SMART)],
    ),
    "tp 2 x pp 2": (4, {"pp": 2, "tp": 2}, stages("dualpipev", "1f1b", overlaps=("pair+self",))),
}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(Path(__file__).read_text()[:4000])
    return str(path)


def gradients(mesh: Mesh, config: TrainConfig) -> list[Pieces]:
    """Of step 0, in the first step that is run and in the third."""
    learner, found = Learner(config, mesh), []
    for step in (0, 1, 0):
        learner.backward(step)
        found.append(reduced(learner))
    return [found[0], found[2]]


def of_several(mesh: Mesh, configs: list[TrainConfig]) -> list[list[Pieces]]:
    return [gradients(mesh, config) for config in configs]


@cache
def alone(config: TrainConfig) -> dict[str, torch.Tensor]:
    return join([run_alone(gradients, config)[0]])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_equals_one_process(name: str, corpus: str) -> None:
    num_ranks, axes, cases = LAYOUTS[name]
    wanted = [{**MODEL, **case} for case in cases]
    configs = [configure(corpus, **changes) for changes in wanted]
    ways: dict[str, Any] = {"device": "cuda", "backend": "nccl", "deadline_s": 150, **axes}
    by_rank = run_ranks(num_ranks, of_several, configs, **ways)
    worst = {}
    for changes, results in zip(wanted, zip(*by_rank, strict=True), strict=True):
        expected = alone(configure(corpus, **{**changes, **OFF}))
        for which, pieces in zip(("first", "third"), zip(*results, strict=True), strict=True):
            found = join(pieces)
            assert set(found) == set(expected)
            key = (which, *(f"{k}={v}" for k, v in changes.items() if k not in MODEL))
            worst[key] = max(difference(found[n].cpu(), expected[n]) for n in expected)
    assert max(worst.values()) <= 1e-12, sorted(worst.items(), key=lambda item: -item[1])[:5]


def test_the_doctor_exchanges_rows() -> None:
    """In a process of its own: it forks, which one that has opened a device must not."""
    ask = "from moeclipse.cli.exchange import try_nccl; print(*try_nccl())"
    found = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    assert found.stdout.startswith("True "), found
    assert "sent each other 512 KiB in" in found.stdout
