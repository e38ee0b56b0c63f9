"""Training with a tp axis: raw gradients, curves and checkpoints equal one process, in every way to cut."""

from __future__ import annotations

import itertools
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import validate, with_values
from moeclipse.core.errors import CheckpointError, ConfigError, ScheduleError
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.checkpoints.checkpoint import Checkpoint, OneRank, Piece, save
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner
from pieces import Pieces, join, reduced

BOUND = 1e-12
SMALL: dict[str, Any] = {
    "model.num_layers": 2,
    "model.d_model": 16,
    "model.head_dim": 4,
    "model.num_heads": 8,
    "model.num_kv_heads": 4,
    "model.num_dense_layers": 1,
    "model.d_ff": 10,
    "model.dtype": "float64",
    "model.init_std": 0.1,
    "model.vocab_size": 257,
    "moe.num_experts": 6,
    "moe.d_ff": 9,
    "moe.num_shared_experts": 1,
    "data.seq_len": 8,
    "data.batch_size": 5,
    "optim.accumulate": 2,
    "optim.bucket_mb": 0.01,
    "optim.lr": 1e-2,
    "optim.warmup_steps": 3,
    "run.steps": 20,
}
MODELS: dict[str, dict[str, Any]] = {
    "softmax": {"gate.z_loss": 0.1, "moe.schedule": "smart"},
    "latent": {
        "model.attention": "mla",
        "model.num_heads": 5,
        "model.q_lora_rank": 6,
        "model.kv_lora_rank": 8,
        "model.qk_nope_head_dim": 4,
        "model.qk_rope_head_dim": 4,
        "model.v_head_dim": 6,
        "model.tie_embeddings": True,
        "gate.kind": "sigmoid",
        "gate.bias_rate": 0.01,
    },
    "capacity": {"gate.kind": "gshard", "gate.capacity_factor": 0.8, "model.num_dense_layers": 0},
}
WAYS = [
    {"moe.expert_tp": expert_tp, "parallel.sequence_parallel": sequence}
    for expert_tp, sequence in itertools.product(["folded", "sharded"], [True, False])
]
LAYOUTS = [(1, 1, 2), (1, 2, 2), (2, 1, 2), (1, 1, 4)]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(Path(__file__).read_text()[:4000])
    return str(path)


def configure(corpus: str, *changes: dict[str, Any]) -> TrainConfig:
    values = {**SMALL, "data.files": (corpus,)}
    for change in changes:
        values |= change
    return with_values(TrainConfig(), values)


def gradients(mesh: Mesh, configs: list[TrainConfig]) -> list[tuple[Pieces, float]]:
    found = []
    for config in configs:
        learner = Learner(config, mesh)
        sums = learner.backward(0)
        loss = float(sums["loss"] + sums["aux_loss"] * learner.tokens_per_step)
        found.append((reduced(learner), loss))
    return found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("dp", "ep", "tp"), LAYOUTS)
def test_raw_gradients_equal_one_process(model: str, dp: int, ep: int, tp: int, corpus: str) -> None:
    configs = [configure(corpus, MODELS[model], way, {"parallel.tp": tp}) for way in WAYS]
    ((alone, loss),) = run_alone(gradients, configs[:1])
    expected = join([alone])
    results = run_ranks(dp * ep * tp, gradients, configs, dp=dp, tp=tp)
    for number, way in enumerate(WAYS):
        found = join([result[number][0] for result in results])
        assert found.keys() == expected.keys()
        bad = {name: difference(found[name], expected[name]) for name in expected}
        bad = {name: value for name, value in bad.items() if not value <= BOUND}
        assert not bad, (way, bad)
        assert math.isclose(sum(result[number][1] for result in results), loss, rel_tol=BOUND), way


def curve(mesh: Mesh, config: TrainConfig, steps: int) -> list[list[float]]:
    learner = Learner(config, mesh)
    records = [learner.step(step) for step in range(steps)]
    assert learner.tokens_per_step * learner.config.gate.top_k >= sum(records[-1]["load"][0])
    return [[record["loss"], record["grad_norm"]] for record in records]


@pytest.mark.parametrize(
    ("model", "way", "layout"),
    [
        ("latent", 0, (1, 2, 2)),
        ("softmax", 1, (2, 1, 2)),
        pytest.param("capacity", 3, (1, 2, 2), marks=pytest.mark.full),
        pytest.param("softmax", 2, (1, 1, 4), marks=pytest.mark.full),
    ],
)
def test_losses_and_norms_of_20_steps_agree(
    model: str, way: int, layout: tuple[int, int, int], corpus: str
) -> None:
    dp, ep, tp = layout
    config = configure(corpus, MODELS[model], WAYS[way], {"parallel.tp": tp})
    expected = torch.tensor(run_alone(curve, config, 20), dtype=torch.float64)
    assert expected[-1, 0] < 0.97 * expected[0, 0], "it must learn something, or the curve proves nothing"
    for found in run_ranks(dp * ep * tp, curve, config, 20, dp=dp, tp=tp):
        found = torch.tensor(found, dtype=torch.float64)
        assert difference(found[:, 0], expected[:, 0]) <= BOUND
        assert difference(found[:, 1], expected[:, 1]) <= 1e-11, "each element counts once in the norm"


def save_after(mesh: Mesh, config: TrainConfig, folder: str, steps: int) -> str:
    learner = Learner(config, mesh)
    for step in range(steps):
        learner.step(step)
    return str(learner.save(Path(folder), steps))


def state_after_load(mesh: Mesh, config: TrainConfig, path: str) -> tuple[Pieces, list[float]]:
    learner = Learner(config, mesh)
    start = learner.load(Checkpoint.open(path, mesh))
    pieces = [(p.name, p.start, list(p.shape), p.data.clone()) for p in learner.optim.pieces()]
    return pieces, [learner.step(step)["loss"] for step in range(start, start + 3)]


STATES = [((1, 1, 1), 0), ((1, 1, 2), 1), ((2, 1, 2), 2), ((1, 2, 2), 3), ((1, 1, 4), 3)]


@pytest.mark.parametrize(
    "saved", [STATES[0], STATES[3], pytest.param(STATES[4], marks=pytest.mark.full)], ids=str
)
def test_any_layout_loads_any_other(saved: tuple, corpus: str, tmp_path: Path) -> None:
    def of(layout: tuple[int, int, int], way: int) -> tuple[TrainConfig, int, dict[str, int]]:
        config = configure(corpus, MODELS["latent"], WAYS[way], {"parallel.tp": layout[2]})
        return config, math.prod(layout), {"dp": layout[0], "tp": layout[2]}

    config, ranks, axes = of(*saved)
    path = run_ranks(ranks, save_after, config, str(tmp_path), 4, **axes)[0]
    expected = [loss for loss, _ in run_alone(curve, config, 7)[4:]]
    truth: dict[str, torch.Tensor] | None = None
    for state in STATES:
        config, ranks, axes = of(*state)
        results = run_ranks(ranks, state_after_load, config, path, **axes)
        found = join([pieces for pieces, _ in results])
        truth = truth or found
        assert found.keys() == truth.keys()
        assert all(torch.equal(found[name], truth[name]) for name in truth), "bits changed on the way"
        for _, losses in results:
            assert difference(torch.tensor(losses), torch.tensor(expected)) < 1e-11
    logical = Checkpoint.open(path, OneRank())
    assert logical.names == sorted(
        [*truth, *(name for name in logical.names if name.startswith(("buffer/", "load/")))]
    )
    for name, value in truth.items():
        assert logical.shape(name) == tuple(value.shape)
        assert torch.equal(logical.read(name), value.flatten())


def test_columns_are_read_whichever_way_they_are_stored(tmp_path: Path) -> None:
    matrix = torch.arange(35.0).view(5, 7)
    pieces = [
        Piece(name="m[:, 0:3]", shape=(5, 3), start=0, data=matrix[:, :3].reshape(-1)),
        Piece(name="m[:, 3:7]", shape=(5, 4), start=0, data=matrix[:, 3:].reshape(-1)),
        Piece(name="whole", shape=(5, 7), start=0, data=matrix.reshape(-1)),
        Piece(name="torn[:, 3:7]", shape=(5, 4), start=0, data=matrix[:, 3:].reshape(-1)),
    ]
    checkpoint = Checkpoint.open(save(tmp_path, 1, pieces, {}, OneRank(), keep=1), OneRank())
    assert checkpoint.names == ["m", "torn", "whole"]
    assert "m" in checkpoint
    assert checkpoint.shape("m") == (5, 7)
    assert checkpoint.dtype("m") == torch.float32
    for name in ("m", "whole"):
        assert torch.equal(checkpoint.read(name, 4, 30), matrix.view(-1)[4:30])
        for first, stop in itertools.combinations(range(8), 2):
            part = matrix[:, first:stop].reshape(-1)
            assert torch.equal(checkpoint.read(f"{name}[:, {first}:{stop}]"), part)
            assert torch.equal(checkpoint.read(f"{name}[:, {first}:{stop}]", 1, len(part)), part[1:])
    with pytest.raises(IndexError, match=r"m\[:, 5:8\]: \[0, 15\) is not inside a matrix of shape \[5, 7\]"):
        checkpoint.read("m[:, 5:8]")
    with pytest.raises(CheckpointError, match=r"lacks columns of 'torn': it holds torn\[:, 3:7\]"):
        checkpoint.read("torn")
    with pytest.raises(CheckpointError, match=r"has no tensor 'other\[:, 0:1\]'"):
        checkpoint.read("other[:, 0:1]")


def deferred(mesh: Mesh, config: TrainConfig, late: bool) -> Pieces:
    """A step by hand, its weight gradients now or at the end."""
    learner = Learner(config, mesh)
    wgrads = learner.model.tp.wgrads
    if late:
        number = itertools.count()

        def defer(submit: Any, *given: Any, **how: Any) -> Any:
            with wgrads.deferred(microbatch=next(number)):
                return submit(*given, **how)

        for each in (wgrads.submit, wgrads.submit_linears):  # each product under a key of its own
            setattr(wgrads, each.__name__, partial(defer, each))
        with pytest.raises(ScheduleError, match=r"never ran: .*\(microbatch 0, stage 0\)"):
            learner.backward(0)
        learner.buckets.arm()
        for m in range(next(number)):
            wgrads.run(microbatch=m)
        learner.buckets.finish()
    else:
        learner.backward(0)
    return reduced(learner)


def now_and_later(mesh: Mesh, config: TrainConfig) -> list[Pieces]:
    return [deferred(mesh, config, late) for late in (False, True)]


# What smart scheduling chooses from measured times (rows at a time, shadows) decides last bits: it is given.
GIVEN = {"moe.schedule": "smart", "moe.group_size": 1, "moe.chunks": 2, "moe.shadow": "off"}


@pytest.mark.parametrize("exchange", [GIVEN, {"moe.schedule": "blocking"}], ids=["smart", "blocking"])
@pytest.mark.parametrize("expert_tp", ["folded", "sharded"])
def test_deferral_of_a_whole_step_changes_no_bit(exchange: dict, expert_tp: str, corpus: str) -> None:
    way = {"parallel.tp": 2, "parallel.sequence_parallel": False, "moe.expert_tp": expert_tp}
    way["optim.accumulate"] = 3  # of two sums in a row the order would not show
    both = run_ranks(2, now_and_later, configure(corpus, MODELS["softmax"], way, exchange), tp=2)
    now, later = (join([pieces[when] for pieces in both]) for when in (0, 1))
    assert now.keys() == later.keys()
    assert [name for name in now if not torch.equal(now[name], later[name])] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"parallel.tp": 8},
            r"model.num_kv_heads \(4\) must be at least parallel.tp \(8\): every rank holds",
        ),
        ({"parallel.tp": 3}, r"data.seq_len \(8\) must be a multiple of parallel.tp \(3\)"),
        (
            {"parallel.tp": 16, "moe.expert_tp": "sharded"},
            r"moe.d_ff \(9\) must be at least parallel.tp \(16\)",
        ),
        ({"parallel.tp": 2, "parallel.async_all_reduce": "on"}, r"needs parallel.sequence_parallel = false"),
    ],
)
def test_what_cannot_be_cut_is_said_before_any_rank_starts(change: dict, message: str, corpus: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(configure(corpus, change))
