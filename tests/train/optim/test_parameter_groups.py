"""Frozen parameters stay as they are and cost nothing, and factors act as parameter groups, in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moeclipse.balance.placement import Placement
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import problems_of, with_values
from moeclipse.core.errors import ConfigError
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.checkpoints.checkpoint import Checkpoint, OneRank
from moeclipse.train.config import TrainConfig
from moeclipse.train.optim.optim_config import OptimConfig
from moeclipse.train.optim.parameter_groups import ParameterGroups, near, picks
from moeclipse.train.step.learner import Learner

STEPS = 2
SMALL: dict[str, Any] = {
    "parallel.check_launches": True,
    "model.num_layers": 2,
    "model.d_model": 16,
    "model.head_dim": 8,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.num_dense_layers": 1,
    "model.d_ff": 12,
    "model.dtype": "float64",
    "model.init_std": 0.1,
    "moe.num_experts": 4,
    "moe.d_ff": 12,
    "moe.num_shared_experts": 1,
    "gate.kind": "sigmoid",
    "gate.bias_rate": 0.01,
    "data.files": (str(Path(__file__).parents[1] / "text.txt"),),
    "data.seq_len": 8,
    "data.batch_size": 4,
    "optim.accumulate": 2,
    "optim.bucket_mb": 0.01,
    "optim.lr": 1e-2,
    "optim.warmup_steps": 1,
    "run.steps": 20,
}
FROZEN = ("embed", "gate", "layers.0.dense.up", "layers.1.attention.[qkv].weight", "experts.down")
FACTORS = ("experts.up=0.5", "layers.0.*=3", "norm=0.1")
CHOSEN = {"optim.frozen": FROZEN, "optim.lr_factors": FACTORS}
PLANNED = {"placement.planner": "random", "placement.every": 1, "placement.slots_per_rank": 3}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp": ({"dp": 2}, {}),
    "ep and shadows": ({}, {"moe.schedule": "smart", "moe.shadow": (0, 3)}),
    "tp": ({"tp": 2}, {"parallel.tp": 2}),
    "sharded": ({"tp": 2}, {"parallel.tp": 2, "moe.expert_tp": "sharded"}),
    "pp": ({"pp": 2}, {"parallel.pp": 2, "pipeline.schedule": "zb-h1"}),
    "replicas": ({}, PLANNED),
}


def configure(**changes: Any) -> TrainConfig:
    return with_values(TrainConfig(), {**SMALL, **changes})


def weights(learner: Learner) -> dict[str, list[tuple[int, torch.Tensor]]]:
    """This rank's pieces of weights and buffers."""
    found: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for piece in learner.optim.pieces():
        found.setdefault(piece.name, []).append((piece.start, piece.data.clone()))
    return found | {f"buffer/{n}": [(0, b.clone())] for n, b in learner._buffers()}


def train(mesh: Mesh, config: TrainConfig, folder: str = "") -> tuple[Any, ...]:
    """(pieces before, after STEPS steps, elements of gradients and of what trains, path of a checkpoint)."""
    learner = Learner(config, mesh)
    before = weights(learner)
    for step in range(STEPS):
        learner.step(step)
    path = learner.save(Path(folder), STEPS) if folder else None
    frozen = {name for name, p in learner.model.named_parameters() if not p.requires_grad}
    assert all(not hasattr(p, "main_grad") for n, p in learner.model.named_parameters() if n in frozen)
    grads = sum(bucket.grads.numel() for bucket in (*learner.buckets, *learner.buckets.frozen))
    trained = sum(p.numel() for p in learner.model.parameters() if p.requires_grad)
    return before, weights(learner), (grads, trained), str(path)


def joined(ranks: list[dict[str, list[tuple[int, torch.Tensor]]]]) -> dict[str, torch.Tensor]:
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for rank in ranks:
        for name, pieces in rank.items():
            parts.setdefault(name, {}).update(dict(pieces))
    return {name: torch.cat([found[s].flatten() for s in sorted(found)]) for name, found in parts.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_frozen_stay_to_the_bit_and_all_else_trains_as_in_one_process(layout: str, tmp_path: Path) -> None:
    mesh, changes = LAYOUTS[layout]
    extra = {"model.tie_embeddings": True} if layout == "pp" else {}
    one = run_alone(train, configure(**CHOSEN, **extra))
    ranks = run_ranks(2, train, configure(**CHOSEN, **extra, **changes), str(tmp_path), **mesh)
    before, after = joined([rank[0] for rank in ranks]), joined([rank[1] for rank in ranks])
    alone = joined([one[1]])
    groups = ParameterGroups.of(configure(**CHOSEN).optim)
    moments = {name.partition("/")[2] for name in after if name.startswith("adam_m/")}
    assert moments
    for name, values in after.items():
        kind, _, tensor = name.partition("/")
        whole = tensor.split("[")[0]
        parts = whole.split(".experts.")
        parameter = whole if len(parts) == 1 else f"{parts[0]}.experts.{parts[1].partition('.')[2]}"
        if groups.is_frozen(parameter):
            assert kind in ("weight", "buffer"), f"{name} takes memory and is frozen"
            assert torch.equal(values, before[name]), name
        elif kind == "weight":
            assert not torch.equal(values, before[name]), name
        if "[" not in name:
            assert difference(values, alone[name]) <= 1e-12, name
    path = ranks[0][3]
    assert path
    again = run_alone(resumed, configure(**CHOSEN, **extra), path)
    for name, values in joined([again]).items():
        if name.startswith(("weight/", "adam_m/", "adam_v/")):
            assert difference(values, alone[name]) <= 1e-12, name


def resumed(mesh: Mesh, config: TrainConfig, path: str) -> Any:
    learner = Learner(config, mesh)
    learner.load(Checkpoint.open(path, OneRank()))
    return weights(learner)


def moved(mesh: Mesh, config: TrainConfig) -> tuple[Any, Any, int]:
    """Pieces before and after all experts have changed places, and how many transfers that took."""
    learner = Learner(config, mesh)
    learner.step(0)
    before, count = weights(learner), 0
    for placed in learner.placement.layers:
        new = Placement(tuple(reversed(placed.placement.slots)))
        owners = learner.placement._owners(new, placed.layer, placed.ownership)
        count += placed.migrate(owners, learner.optim.updates)
    after = weights(learner)
    learner.step(1)
    return before, after, count


def test_frozen_experts_move_with_the_others() -> None:
    ranks = run_ranks(2, moved, configure(**CHOSEN, **PLANNED))
    before, after = (joined([rank[which] for rank in ranks]) for which in (0, 1))
    assert ranks[0][2] > 0
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], values) for name, values in before.items())
    assert any(name.endswith("experts.3.down") for name in after)


def test_what_is_frozen_takes_no_gradient_memory(tmp_path: Path) -> None:
    whole = run_alone(train, configure())
    part = run_alone(train, configure(**CHOSEN), str(tmp_path))
    assert part[2][0] == part[2][1] < whole[2][0] == whole[2][1]
    with pytest.raises(AssertionError, match=r"no optimizer state of .*was frozen"):
        run_alone(resumed, configure(), part[3])


def parameter_groups(mesh: Mesh, config: TrainConfig) -> float:
    """How far our update is from torch's, whose groups have a rate of their own."""
    learner = Learner(config, mesh)
    names = {id(p): name for name, p in learner.model.named_parameters()}
    twins: dict[str, torch.Tensor] = {}
    options = []
    for bucket in learner.buckets:
        for parameter in bucket.parameters:
            twin = parameter.detach().clone().requires_grad_()
            name = names[id(parameter)]
            twins[name] = twin
            decay = config.optim.weight_decay if bucket.decay else 0.0
            factor = ParameterGroups.of(config.optim).lr_factor(name)
            options.append({"params": [twin], "weight_decay": decay, "factor": factor})
    betas = (config.optim.beta1, config.optim.beta2)
    adam = torch.optim.AdamW(options, betas=betas, eps=config.optim.eps)
    update = learner.optim.update

    def both(*given: Any) -> None:
        for name, parameter in learner.model.named_parameters():
            if name in twins:
                twins[name].grad = parameter.main_grad.clone()
        for group in adam.param_groups:
            group["lr"] = group["factor"] * given[1]
        adam.step()
        update(*given)

    learner.optim.update = both  # type: ignore[method-assign]
    for step in range(3):
        learner.step(step)
    now = dict(learner.model.named_parameters())
    return max(difference(now[name].detach(), twin.detach()) for name, twin in twins.items())


def test_factors_act_as_parameter_groups_of_torch() -> None:
    assert run_alone(parameter_groups, configure(**CHOSEN, **{"optim.clip_norm": 0.0})) <= 1e-12


def refused(mesh: Mesh, config: TrainConfig) -> str:
    try:
        Learner(config, mesh)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_pattern_that_picks_nothing_is_refused_on_all_ranks() -> None:
    changes = {"optim.frozen": ("embedings", "gate"), "optim.lr_factors": ("atention=2",)}
    told = run_ranks(2, refused, configure(**changes, **LAYOUTS["pp"][1]), pp=2)
    assert told[0] == told[1]
    assert "optim.frozen: 'embedings' picks no parameter; did you mean 'embedding'?" in told[0]
    assert "optim.lr_factors: 'atention' picks no parameter; did you mean 'attention'?" in told[0]
    everything = configure(**{"optim.frozen": ("embed", "head", "norm", "layers")})
    assert "leaves nothing to train" in run_alone(refused, everything)


def test_a_stage_may_have_nothing_to_train() -> None:
    frozen = {"optim.frozen": ("embed", "layers.0.")}
    one = run_alone(train, configure(**frozen))
    ranks = run_ranks(2, train, configure(**frozen, **LAYOUTS["pp"][1]), pp=2)
    alone, both = joined([one[1]]), joined([rank[1] for rank in ranks])
    assert ranks[0][2] == (0, 0)
    assert max(difference(both[name], values) for name, values in alone.items()) <= 1e-12


def test_patterns() -> None:
    assert picks("gate", "layers.1.moe.gate.weight")
    assert picks("layers.1.", "layers.1.moe.gate.weight")
    assert not picks("layers.1.", "layers.11.moe.gate.weight")
    assert picks("layers.*.gate", "layers.11.moe.gate.weight")
    groups = ParameterGroups.of(OptimConfig(lr_factors=("embed=0.1", "embedding=3")))
    assert groups.lr_factor("embedding") == 0.1
    assert groups.lr_factor("head.weight") == 1.0
    assert near("xyz", ["a.b", "c"]) == "names are such as a.b, c"


@pytest.mark.parametrize("given", ["embed", "embed=", "=2", "embed=-1", "embed=0", "embed=inf", "embed=x"])
def test_factors_that_are_none(given: str) -> None:
    assert any("PATTERN=FACTOR" in text for text in problems_of(OptimConfig(lr_factors=(given,)), "optim."))
    assert not list(problems_of(OptimConfig(lr_factors=("embed=0.1",)), "optim."))
    assert any("picks everything" in text for text in problems_of(OptimConfig(frozen=("*",)), "optim."))
