"""Every schedule and overlap mode gives the gradients of one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_learner import LATENT, configure
from test_tensor_parallel import Pieces, join, reduced

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CorruptionError
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.checkpoints.checkpoint import Checkpoint
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner

BOUND = 1e-12
MODELS: dict[str, dict[str, Any]] = {
    "softmax": {"gate.balance_loss": 0.05, "gate.z_loss": 0.01},
    "latent": {**LATENT, "model.num_layers": 3},
}
BASE = {"optim.accumulate": 4, "data.batch_size": 18, "model.num_layers": 4}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(Path(__file__).read_text()[:4000])
    return str(path)


def gradients(mesh: Mesh, config: TrainConfig) -> Pieces:
    learner = Learner(config, mesh)
    learner.backward(0)
    for bucket in learner.buckets:
        assert not any(state._left for state in bucket.sums), f"{bucket.name} waits for more gradients"
    return reduced(learner)


@cache
def alone(config: TrainConfig) -> dict[str, torch.Tensor]:
    return join([run_alone(gradients, config)])


def of_several(mesh: Mesh, configs: list[TrainConfig]) -> list[Pieces]:
    return [gradients(mesh, config) for config in configs]


def check(corpus: str, ranks: int, changes: dict[str, Any], layout: dict[str, int]) -> None:
    check_several(corpus, ranks, [changes], layout)


def check_several(corpus: str, ranks: int, several: list[dict[str, Any]], layout: dict[str, int]) -> None:
    """All of them with ranks that start once."""
    by_rank = run_ranks(ranks, of_several, [configure(corpus, **changes) for changes in several], **layout)
    for changes, results in zip(several, zip(*by_rank, strict=True), strict=True):
        compare(corpus, changes, list(results))


def compare(corpus: str, changes: dict[str, Any], results: list[Pieces]) -> None:
    off = {"pipeline.overlap": "off", "pipeline.schedule": "auto", "pipeline.recompute": "off"}
    expected, found = alone(configure(corpus, **{**changes, **off})), join(results)
    assert set(found) == set(expected)
    worst = {name: difference(found[name], expected[name]) for name in expected}
    assert max(worst.values()) < BOUND, (changes, sorted(worst.items(), key=lambda item: -item[1])[:5])


@pytest.mark.parametrize("ep", [1, 2])
def test_pairs_of_microbatches_on_one_stage(corpus: str, ep: int) -> None:
    modes = (("off", "1f1b"), ("off", "layers"), ("pair", "auto"), ("pair+self", "auto"))
    several = [
        {**BASE, **model, "pipeline.overlap": overlap, "pipeline.schedule": schedule}
        for model in MODELS.values()
        for overlap, schedule in modes
    ]
    check_several(corpus, ep, several, {})


SCHEDULES = ["gpipe", "1f1b", "1f1b-pairs", "vpp", "vpp+1", "zb-h1", "zb-h2", "zb-m", "zb-v"]
SCHEDULES += ["dualpipe", "dualpipev"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.full)])
def test_stages_over_ranks(corpus: str, schedule: str, tied: bool) -> None:
    changes = {**BASE, **MODELS["softmax"], "model.tie_embeddings": tied, "pipeline.schedule": schedule}
    overlaps = [{**changes, "pipeline.overlap": overlap} for overlap in ("off", "pair+self")]
    check_several(corpus, 4, overlaps, {"pp": 2, "mirrored": schedule == "dualpipe"})


ORDERS: tuple[dict[str, Any], ...] = (
    {"pipeline.schedule": "zb-h2"},
    {"pipeline.schedule": "zb-m", "pipeline.budget": 3},
    {"pipeline.schedule": "zb-m", "pipeline.budget": 2, "pipeline.layers_per_virtual_stage": 1},
)
FURTHER: tuple[dict[str, Any], ...] = (
    {"pipeline.schedule": "vpp"},
    {"pipeline.schedule": "vpp+1"},
    {"pipeline.schedule": "zb-m", "pipeline.budget": 1},
)


@pytest.mark.parametrize(
    ("pp", "orders"),
    [
        (2, ORDERS),
        pytest.param(2, FURTHER, marks=pytest.mark.full),
        pytest.param(4, (*ORDERS, *FURTHER), marks=pytest.mark.full),
    ],
)
def test_orders_of_any_number_of_microbatches(
    corpus: str, pp: int, orders: tuple[dict[str, Any], ...]
) -> None:
    """Five microbatches: PP 2, N 3, M 5, VP 2 among them."""
    changes = {**BASE, **MODELS["softmax"], "model.num_layers": 2 * pp, "pipeline.overlap": "off"}
    changes |= {"optim.accumulate": 5, "data.batch_size": 20}
    groups = {"pipeline.schedule": "vpp", "pipeline.group_size": pp + 1}
    several = [{**changes, **order} for order in (groups, *orders)]
    check_several(corpus, 4, several, {"pp": pp})


@pytest.mark.full
@pytest.mark.parametrize(("pp", "stages"), [(2, 3), (2, 4), (4, 3)])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_that_is_folded_over_the_ranks(corpus: str, pp: int, stages: int, tied: bool) -> None:
    """The last stage is on the last rank of an odd fold, and on the first of an even one."""
    changes = {**BASE, **MODELS["softmax"], "model.num_layers": pp * stages, "model.tie_embeddings": tied}
    changes |= {"pipeline.schedule": "zb-m", "pipeline.layers_per_virtual_stage": 1}
    several = [
        {**changes, "pipeline.budget": budget, "pipeline.recompute": recompute}
        for budget, recompute in ((1, "off"), (2, "mlp"))
    ]
    check_several(corpus, 4, several, {"pp": pp})


DIRECTIONS: dict[str, tuple[dict[str, int], list[dict[str, Any]]]] = {
    "two places": ({"pp": 2}, [{"pipeline.overlap": "pair+self"}]),
    "four places": (
        {"pp": 4},
        [
            {"model.num_layers": 5, "optim.accumulate": 8, "pipeline.overlap": "pair+self"},
            {"model.num_layers": 6, "pipeline.layers": (1, 2, 1, 2), "optim.accumulate": 10},
        ],
    ),
    "four places, dense and latent": (
        {"pp": 4},
        [{**LATENT, "model.num_layers": 5, "optim.accumulate": 8, "pipeline.overlap": "pair"}],
    ),
    "dp": ({"pp": 2, "dp": 2}, [{"pipeline.overlap": "pair+self"}]),
    "tp": (
        {"pp": 2, "tp": 2},
        [
            {
                "parallel.sequence_parallel": sequence,
                "moe.expert_tp": experts,
                "model.tie_embeddings": sequence,
            }
            for sequence in (True, False)
            for experts in ("folded", "sharded")
        ],
    ),
    "smart, and tokens that are dropped": (
        {"pp": 2},
        [{"moe.schedule": "smart", "moe.group_size": 1, "moe.chunks": 2, "gate.capacity_factor": 0.8}],
    ),
}


@pytest.mark.parametrize(
    "name",
    ["two places", *(pytest.param(n, marks=pytest.mark.full) for n in DIRECTIONS if n != "two places")],
)
def test_two_copies_of_the_model_add_up_what_both_compute(corpus: str, name: str) -> None:
    """Places p and P-1-p hold the same layers, and half of the microbatches each."""
    axes, several = DIRECTIONS[name]
    base = {**BASE, **MODELS["softmax"], "pipeline.schedule": "dualpipe", "data.batch_size": 32}
    base |= {"model.num_kv_heads": 2, "parallel.tp": axes.get("tp", 1)}
    ranks = 2 if name == "two places" else 4
    check_several(corpus, ranks, [{**base, **changes} for changes in several], {**axes, "mirrored": True})


@pytest.mark.full
@pytest.mark.parametrize(
    "placement", [{"placement.slots": ((0, 1, 2), (3, 4, 0))}, {"placement.slots_per_rank": 4}]
)
def test_replicas_of_experts_in_two_copies_of_the_model(corpus: str, placement: dict[str, Any]) -> None:
    changes = {**BASE, **MODELS["softmax"]}
    there = {"pipeline.schedule": "dualpipe", "placement.planner": "static", **placement}
    axes = {"pp": 2, "mirrored": True}
    found = join(run_ranks(4, gradients, configure(corpus, **changes, **there), **axes))
    expected = alone(configure(corpus, **changes))
    assert set(found) == set(expected)
    assert max(difference(found[name], expected[name]) for name in expected) < BOUND


def test_two_copies_want_a_mesh_that_knows_of_them(corpus: str) -> None:
    config = configure(corpus, **BASE, **{"pipeline.schedule": "dualpipe"})
    with pytest.raises(AssertionError, match=r"two copies of the model: make Mesh\(mirrored=True\)"):
        run_ranks(2, gradients, config, pp=2)


def saved_then_harmed(mesh: Mesh, config: TrainConfig) -> tuple[list[str], str]:
    """(what this rank saves after a step, what is said of a buffer that differs on rank 1)"""
    learner = Learner(config, mesh)
    learner.step(0)
    saved = [piece.name for piece in learner._pieces()]
    if mesh.rank == 1:
        learner.layers[0].gate.bias_E += 1
    with pytest.raises(CorruptionError) as caught:
        learner.integrity.before_save()
    return saved, str(caught.value)


def test_what_two_copies_hold_alike_is_saved_once_and_compared(corpus: str) -> None:
    """In a step whose launches are checked, op by op, against the program of both directions."""
    changes = {**BASE, "gate.kind": "sigmoid", "gate.bias_rate": 0.01, "integrity.every": 1}
    changes |= {"pipeline.schedule": "dualpipe", "parallel.check_launches": True, "model.num_layers": 2}
    found = run_ranks(2, saved_then_harmed, configure(corpus, **changes), pp=2, mirrored=True)
    buffers = [name for saved, _ in found for name in saved if name.startswith("buffer/")]
    assert sorted(buffers) == sorted(set(buffers))
    assert {name.split(".")[1] for name in buffers} == {"0", "1"}
    for _, told in found:
        assert "ranks 0, 1 disagree about a buffer of layers.0." in told, "of two nobody knows who is right"


TOGETHER: dict[str, dict[str, Any]] = {
    "capacity": {"gate.capacity_factor": 0.8},
    "padded": {"gate.capacity_factor": 0.7, "gate.overflow": "pad"},
    "noisy": {"gate.kind": "noisy"},
    "smart": {"moe.schedule": "smart", "moe.group_size": 1, "moe.chunks": 2},
    "shadows": {"moe.schedule": "smart", "moe.group_size": 1, "moe.chunks": 2, "moe.shadow": (0, 2)},
    "dense between": {"model.num_dense_layers": 2},
    "top-p": {"gate.choose": "top_p", "gate.top_k": 3},
    "idle experts": {"moe.num_experts": 40, "gate.top_k": 1},
    "one rank has no samples": {"data.batch_size": 4},
}


def test_overlap_goes_with_everything(corpus: str) -> None:
    base = {**BASE, **MODELS["softmax"], "pipeline.overlap": "pair+self"}
    check_several(corpus, 2, [{**base, **what} for what in TOGETHER.values()], {})


@pytest.mark.parametrize("recompute", ["attn", "mlp", "moe", "full"])
def test_recompute_goes_with_overlap(corpus: str, recompute: str) -> None:
    changes = {**BASE, **MODELS["softmax"], "model.num_dense_layers": 1}
    changes |= {"pipeline.recompute": recompute, "pipeline.recompute_layers": 3}
    overlaps = [{**changes, "pipeline.overlap": overlap} for overlap in ("off", "pair+self")]
    check_several(corpus, 2, overlaps, {})


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recompute", ["mlp", "full"])
def test_recompute_goes_with_every_schedule(corpus: str, schedule: str, recompute: str) -> None:
    changes = {**BASE, **MODELS["softmax"], "model.tie_embeddings": True, "gate.capacity_factor": 1.0}
    changes |= {"pipeline.overlap": "pair+self", "pipeline.schedule": schedule, "moe.schedule": "smart"}
    check(
        corpus,
        4,
        changes | {"pipeline.recompute": recompute},
        {"pp": 2, "mirrored": schedule == "dualpipe"},
    )


@pytest.mark.parametrize(
    ("sequence", "experts"),
    [(True, "folded"), pytest.param(False, "folded", marks=pytest.mark.full), (True, "sharded")],
)
def test_overlap_goes_with_tensor_parallel(corpus: str, sequence: bool, experts: str) -> None:
    changes = {**BASE, **MODELS["softmax"], "pipeline.overlap": "pair+self", "model.num_kv_heads": 2}
    changes |= {"parallel.tp": 2, "parallel.sequence_parallel": sequence, "moe.expert_tp": experts}
    check(corpus, 4, changes, {"tp": 2})


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b-pairs", "dualpipev"])
def test_all_axes_at_once(corpus: str, schedule: str) -> None:
    changes = {**BASE, **MODELS["softmax"], "pipeline.overlap": "pair+self", "model.num_kv_heads": 2}
    changes |= {"parallel.tp": 2, "pipeline.schedule": schedule, "data.batch_size": 32}
    check(corpus, 8, changes, {"tp": 2, "pp": 2})


@pytest.mark.parametrize(
    ("pp", "layers", "changes"),
    [
        (2, (1, 3), {"pipeline.schedule": "1f1b-pairs"}),
        (2, (1, 1, 2, 1), {"pipeline.schedule": "vpp+1", "model.num_layers": 5}),
        pytest.param(2, (2, 1, 1, 1), {"pipeline.schedule": "dualpipev", **LATENT}, marks=pytest.mark.full),
    ],
)
def test_layers_may_be_shared_out_unevenly(
    corpus: str, pp: int, layers: tuple[int, ...], changes: dict[str, Any]
) -> None:
    changes = {**BASE, **changes, "model.num_layers": sum(layers), "pipeline.layers": layers}
    check(corpus, 2 * pp, {**changes, "pipeline.overlap": "pair+self"}, {"pp": pp})


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "pp"), [(2, 1), (4, 2)])
def test_sixteen_microbatches_of_a_latent_model(corpus: str, ranks: int, pp: int) -> None:
    changes = {**MODELS["latent"], "optim.accumulate": 16, "data.batch_size": 64, "model.num_layers": 4}
    check(corpus, ranks, {**changes, "pipeline.overlap": "pair+self"}, {"pp": pp})


def curve(mesh: Mesh, config: TrainConfig, steps: int) -> list[torch.Tensor]:
    """Losses of some steps, and all weights afterwards."""
    learner = Learner(config, mesh)
    losses = [learner.step(step)["loss"] for step in range(steps)]
    weights = [parameter.detach().flatten().double() for parameter in learner.model.parameters()]
    return [torch.tensor(losses, dtype=torch.float64), torch.cat(weights)]


@pytest.mark.parametrize("recompute", ["off", "full"])
def test_pairs_change_no_bit(corpus: str, recompute: str) -> None:
    """fp32 on CPU, three steps: sums are taken in the order of microbatches with and without overlap."""
    changes = {**BASE, **MODELS["softmax"], "model.dtype": "float32"}
    off = configure(corpus, **changes, **{"pipeline.schedule": "1f1b"})
    on = configure(corpus, **changes, **{"pipeline.overlap": "pair", "pipeline.recompute": recompute})
    for expected, found in zip(run_ranks(2, curve, off, 3), run_ranks(2, curve, on, 3), strict=True):
        assert torch.equal(expected[0], found[0])
        assert torch.equal(expected[1], found[1])


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b-pairs", "vpp+1", "dualpipev"])
def test_pairs_over_ranks_change_no_bit(corpus: str, schedule: str) -> None:
    changes = {**BASE, **MODELS["softmax"], "model.dtype": "float32", "pipeline.schedule": schedule}
    off = configure(corpus, **changes)
    on = configure(corpus, **changes, **{"pipeline.overlap": "pair"})
    results = [run_ranks(4, curve, config, 3, pp=2) for config in (off, on)]
    for expected, found in zip(*results, strict=True):
        assert torch.equal(expected[0], found[0])
        assert torch.equal(expected[1], found[1])


def save_and_go_on(mesh: Mesh, config: TrainConfig, folder: str) -> list[torch.Tensor]:
    learner = Learner(config, mesh)
    for step in range(2):
        learner.step(step)
    learner.save(Path(folder), 2)
    return [torch.tensor([learner.step(step)["loss"] for step in (2, 3)])]


def resume(mesh: Mesh, config: TrainConfig, folder: str) -> list[torch.Tensor]:
    learner = Learner(config, mesh)
    (path,) = Path(folder).iterdir()
    start = learner.load(Checkpoint.open(path, mesh))
    return [torch.tensor([learner.step(step)["loss"] for step in (start, start + 1)])]


@pytest.mark.parametrize(
    ("schedule", "tied"), [("1f1b-pairs", False), ("1f1b-pairs", True), ("dualpipe", True)]
)
def test_a_checkpoint_of_stages_goes_on_without_them(
    corpus: str, schedule: str, tied: bool, tmp_path: Path
) -> None:
    changes = {**BASE, **MODELS["softmax"], "model.tie_embeddings": tied, "gate.kind": "sigmoid"}
    changes |= {"gate.bias_rate": 0.01, "integrity.every": 1}
    staged = configure(corpus, **changes, **{"pipeline.overlap": "pair", "pipeline.schedule": schedule})
    axes = {"pp": 2, "mirrored": schedule == "dualpipe"}
    plain = configure(corpus, **changes)
    there = run_ranks(2, save_and_go_on, staged, str(tmp_path / "a"), **axes)
    here = run_ranks(1, resume, plain, str(tmp_path / "a"))
    torch.testing.assert_close(there[0][0], here[0][0], rtol=1e-12, atol=0)
    there = run_ranks(1, save_and_go_on, plain, str(tmp_path / "b"))
    here = run_ranks(2, resume, staged, str(tmp_path / "b"), **axes)
    torch.testing.assert_close(there[0][0], here[0][0], rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("changes", "chunks"),
    [
        ({"pipeline.overlap": "pair"}, 1),
        ({"pipeline.overlap": "pair+self"}, 2),
        ({"pipeline.overlap": "pair+self", "data.batch_size": 4}, 1),
        ({"pipeline.overlap": "pair+self", "gate.capacity_factor": 1.0}, 1),
        ({"pipeline.overlap": "pair+self", "pipeline.chunks": 4}, 4),
    ],
)
def test_into_how_many_chunks_a_microbatch_is_cut(corpus: str, changes: dict[str, Any], chunks: int) -> None:
    from moeclipse.train.step.pipelined import chunks_of  # the first lines of this file are its corpus

    assert chunks_of(configure(corpus, **{**BASE, **changes}), Mesh.single()) == chunks
