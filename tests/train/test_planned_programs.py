"""Programs whose exchanges are planned as kernels plan them, against one process.

On a CPU that plan is made by the kernels' references (`moe/exchange/dispatch_on_device`), in float64, which a
device would not take; over NCCL it is in tests/gpu/test_nccl_training.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from test_pipelined import BASE, MODELS, TOGETHER, compare, corpus, gradients  # noqa: F401  (a fixture)
from test_tensor_parallel import Pieces

from moeclipse.comm.mesh import Mesh
from moeclipse.moe.exchange import plan as exchanges
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig

from test_learner import configure  # isort: skip

CASES: dict[str, dict[str, Any]] = {name: TOGETHER[name] for name in ("smart", "shadows", "noisy", "top-p")}
CASES |= {
    "attn again": {"pipeline.recompute": "attn"},
    "full again": {"pipeline.recompute": "full"},
    "replicas": {"placement.planner": "random", "placement.slots_per_rank": 3, "moe.num_experts": 4},
}
LAYOUTS: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "pairs": (2, {}, {"pipeline.overlap": "pair+self"}),
    "stages": (4, {"pp": 2}, {"pipeline.schedule": "1f1b"}),
}


def planned(mesh: Mesh, configs: list[TrainConfig]) -> list[tuple[Pieces, int]]:
    """Gradients, and how often kernels would have planned."""
    exchanges.plans_on_device = lambda _: True
    real, found = exchanges.plan_on_device, []
    for config in configs:
        plans: list[int] = []
        exchanges.plan_on_device = lambda *given, plans=plans: (plans.append(1), real(*given))[1]
        found.append((gradients(mesh, config), len(plans)))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_programs_planned_by_kernels(layout: str, corpus: str) -> None:  # noqa: F811
    ranks, axes, changes = LAYOUTS[layout]
    several = [{**BASE, **MODELS["softmax"], **changes, **case} for case in CASES.values()]
    by_rank = run_ranks(ranks, planned, [configure(corpus, **one) for one in several], **axes)  # type: ignore[arg-type]
    for one, results in zip(several, zip(*by_rank, strict=True), strict=True):
        plain = {name: value for name, value in one.items() if not name.startswith(("placement.", "moe.s"))}
        compare(corpus, plain, [pieces for pieces, _ in results])
        layers = one["model.num_layers"] // axes.get("pp", 1)
        halves = 2 if layout == "pairs" else 1  # a microbatch at an end goes in two
        for _, plans in results:
            assert layers * one["optim.accumulate"] <= plans <= halves * layers * one["optim.accumulate"]
