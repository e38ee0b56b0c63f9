"""Bytes of state, told before there is any: those that ranks then have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_learner import configure, corpus  # noqa: F401  (a fixture)

from moeclipse.comm.mesh import Mesh
from moeclipse.pipeline.overlap import lay_out
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.observe.memory_table import MemoryTable
from moeclipse.train.optim.optim_config import OptimConfig
from moeclipse.train.predict.state_bytes import least_work, state_bytes, update_bytes
from moeclipse.train.step.dtype import choose_dtype
from moeclipse.train.step.learner import Learner

BIG: dict[str, Any] = {
    "model.num_layers": 4,
    "model.num_dense_layers": 1,
    "model.d_model": 32,
    "model.d_ff": 64,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "moe.num_experts": 8,
    "moe.d_ff": 32,
    "moe.num_shared_experts": 1,
    "model.dtype": "bfloat16",
    "data.batch_size": 8,
    "optim.accumulate": 2,
}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp": ({"dp": 2}, {}),
    "ep": ({"ep": 2}, {"optim.master": "low-bits"}),
    "tied": ({"ep": 2}, {"model.tie_embeddings": True, "model.num_layers": 2}),
    "slots to spare": ({"ep": 2}, {"placement.planner": "incremental", "placement.slots_per_rank": 6}),
    "tp": ({"tp": 2}, {"optim.state": "bf16", "model.attention": "mla", "moe.shared_gate": True}),
    "tp, experts cut": ({"tp": 2}, {"moe.expert_tp": "sharded", "optim.main_grad": "bf16"}),
    "pp": ({"pp": 2}, {"model.tie_embeddings": True}),
    "pp, both ends": ({"pp": 2}, {"pipeline.schedule": "zb-v", "optim.state": "8bit"}),
    "wide": ({"ep": 2}, {"model.dtype": "float32", "model.norms": "both", "gate.kind": "noisy"}),
    "no master": ({"dp": 2}, {"optim.master": "none", "optim.state": "bf16", "gate.logit_bias": True}),
}


def both(mesh: Mesh, config: TrainConfig) -> tuple[float, float]:
    """(told, taken) of this rank."""
    held = choose_dtype(config.model.dtype, torch.device("cpu"))
    layout = lay_out(config.pipeline, config.model.num_layers, mesh.pp, config.optim.accumulate)
    told = state_bytes(config, mesh, layout, held)[mesh.pp_index]
    taken = MemoryTable(Learner(config, mesh).optim, [], by_autograd=False).state()
    return told, float(sum(taken.values()))


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_told_is_what_is_taken(corpus: str, name: str) -> None:  # noqa: F811
    axes, changes = LAYOUTS[name]
    parallel = {f"parallel.{axis}": size for axis, size in {"dp": 1, "ep": 1, **axes}.items()}
    config = configure(corpus, **{**BIG, **parallel, **changes})
    mesh = {axis: size for axis, size in axes.items() if axis != "ep"}  # what is left over
    for told, taken in run_ranks(2, both, config, **mesh):  # type: ignore[arg-type]
        assert told == pytest.approx(taken, rel=0.03), name


@pytest.mark.parametrize(
    ("optim", "held", "expected"),
    [
        ({}, torch.bfloat16, 2 * (4 + 8) + 2 * 4 + 2),
        ({}, torch.float32, 2 * 8 + 2 * 4 + 2 * 4),
        ({"master": "low-bits", "state": "8bit"}, torch.bfloat16, 2 * (2 + 2) + 2 * 4 + 2 * 2),
        ({"master": "none", "state": "bf16", "main_grad": "bf16"}, torch.bfloat16, 2 * 4 + 2 * 2 + 2 * 2),
    ],
)
def test_an_update_moves_what_it_holds(optim: dict[str, Any], held: torch.dtype, expected: float) -> None:
    assert update_bytes(OptimConfig(**optim), held) == expected


def test_the_least_work_of_a_run_knows_what_is_frozen(corpus: str) -> None:  # noqa: F811
    cpu = torch.device("cpu")
    full = least_work(configure(corpus), cpu)
    some = least_work(configure(corpus, **{"optim.frozen": ("experts",)}), cpu)
    adapted = least_work(configure(corpus, **{"lora.rank": 2}), cpu)
    assert full.flops > some.flops > 0.6 * full.flops
    assert full.update_bytes > some.update_bytes > adapted.update_bytes > 0
