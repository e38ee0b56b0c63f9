"""One step of training in any layout: raw gradients, loss curves and checkpoints equal one process."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.core.errors import CheckpointError, DivergedError
from moeclipse.model.transformer import Transformer
from moeclipse.moe.tokens import Tokens
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.checkpoints.checkpoint import Checkpoint
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner

LAYOUTS = [(2, 1), (1, 2), (2, 2), (1, 4)]
BOUND = 1e-12

SMALL: dict[str, Any] = {
    "parallel.check_launches": True,
    "model.num_layers": 2,
    "model.d_model": 16,
    "model.head_dim": 8,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.dtype": "float64",
    "model.init_std": 0.1,
    "moe.num_experts": 5,
    "moe.d_ff": 12,
    "moe.num_shared_experts": 1,
    "data.seq_len": 8,
    "data.batch_size": 5,
    "optim.accumulate": 2,
    "optim.bucket_mb": 0.01,
    "optim.lr": 1e-2,
    "optim.warmup_steps": 3,
    "run.steps": 20,
}
LATENT: dict[str, Any] = {
    "model.attention": "mla",
    "model.num_dense_layers": 1,
    "model.q_lora_rank": 6,
    "model.kv_lora_rank": 8,
    "model.qk_nope_head_dim": 4,
    "model.qk_rope_head_dim": 4,
    "model.v_head_dim": 6,
    "model.tie_embeddings": True,
    "moe.num_experts": 8,
    "gate.kind": "sigmoid",
    "gate.num_groups": 4,
    "gate.top_groups": 2,
    "gate.bias_rate": 0.01,
    "gate.z_loss": 0.01,
}
MODELS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "latent": LATENT,
    "switch": {"gate.kind": "switch", "gate.top_k": 1, "gate.capacity_factor": 1.0},
    "gshard": {"gate.kind": "gshard", "gate.capacity_factor": 0.8},
    "noisy": {"gate.kind": "noisy", "moe.num_experts": 6},
    "smart": {"moe.schedule": "smart", "moe.group_size": 1, "moe.chunks": 2, "moe.shadow": (0, 2)},
    "pad": {"gate.capacity_factor": 0.7, "gate.overflow": "pad", "gate.z_loss": 0.1},
}


@pytest.fixture(scope="session")
def corpus() -> str:
    """A file of its own: with the text of a test, every edit of that test would train another model."""
    return str(Path(__file__).parents[1] / "text.txt")


def configure(corpus: str, **changes: Any) -> TrainConfig:
    values = {**SMALL, "data.files": (corpus,), **changes}
    return with_values(TrainConfig(), values)


def gradients(mesh: Mesh, config: TrainConfig) -> tuple[list, float]:
    """This rank's shards of the summed gradient, as (name, start, flat values); and its part of the loss."""
    learner = Learner(config, mesh)
    sums = learner.backward(0)
    pieces = []
    for bucket in learner.buckets:
        shard = bucket.reduced()
        for segment in bucket.segments():
            values = shard[segment.offset : segment.offset + segment.length].clone()
            pieces.append((segment.entry.name, segment.start, values))
    return pieces, float(sums["loss"] + sums["aux_loss"] * learner.tokens_per_step)


def join(results: list[tuple[list, float]]) -> dict[str, torch.Tensor]:
    parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for pieces, _ in results:
        for name, start, values in pieces:
            parts.setdefault(name, []).append((start, values))
    joined = {}
    for name, found in parts.items():
        found.sort(key=lambda item: item[0])
        starts = [start for start, _ in found]
        lengths = [values.numel() for _, values in found]
        assert starts == [sum(lengths[:i]) for i in range(len(lengths))], (
            f"{name} is not covered exactly once"
        )
        joined[name] = torch.cat([values for _, values in found])
    return joined


def of_all_models(mesh: Mesh, configs: list[TrainConfig]) -> list[tuple[list, float]]:
    return [gradients(mesh, config) for config in configs]


@cache
def gradients_of(dp: int, ep: int, corpus: str) -> dict[str, list[tuple[list, float]]]:
    """What each rank found for each model; ranks start once for all of them."""
    configs = [configure(corpus, **changes) for changes in MODELS.values()]
    by_rank = run_ranks(dp * ep, of_all_models, configs, dp=dp)
    return dict(zip(MODELS, map(list, zip(*by_rank, strict=True)), strict=True))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("dp", "ep"), LAYOUTS)
def test_raw_gradients_equal_one_process(model: str, dp: int, ep: int, corpus: str) -> None:
    (reference,) = gradients_of(1, 1, corpus)[model]
    expected = join([reference])
    results = gradients_of(dp, ep, corpus)[model]
    found = join(results)
    assert found.keys() == expected.keys()
    bad = {name: difference(found[name], expected[name]) for name in expected}
    bad = {name: value for name, value in bad.items() if not value <= BOUND}
    assert not bad, bad
    assert math.isclose(sum(loss for _, loss in results), reference[1], rel_tol=BOUND)


def test_gradients_are_those_of_plain_autograd(corpus: str) -> None:
    run_alone(compare_with_autograd, configure(corpus))


def compare_with_autograd(mesh: Mesh, config: TrainConfig) -> None:
    """The reference itself: the same model without buckets, its loss written down from its definition."""
    learner = Learner(config, mesh)
    model = Transformer(config.model, config.moe, config.gate, mesh=mesh, dtype=torch.float64)
    total = 0.0
    for m in range(2):
        batch = learner.batches.microbatch(0, m)
        out = model(
            batch.inputs, batch.targets, Tokens(mesh=mesh, first=0, total=batch.total_tokens, microbatch=m)
        )
        total = total + out.loss_sum / (5 * 8) + out.aux_loss / 2
    total.backward()
    found = join([gradients(mesh, config)])
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            head, key = name.rsplit(".", 1)
            for expert in range(5):
                value = found[f"{head}.{expert}.{key}"]
                assert difference(value, parameter.grad[expert].flatten()) < BOUND
        else:
            assert difference(found[name], parameter.grad.flatten()) < BOUND, name


def curve(mesh: Mesh, config: TrainConfig, steps: int) -> list[float]:
    learner = Learner(config, mesh)
    return [learner.step(step)["loss"] for step in range(steps)]


@cache
def curve_alone(config: TrainConfig, steps: int) -> list[float]:
    losses: list[float] = run_alone(curve, config, steps)
    return losses


@pytest.mark.parametrize(
    ("model", "dp", "ep"), [("softmax", 2, 1), ("softmax", 1, 2), ("latent", 2, 2), ("gshard", 1, 4)]
)
def test_loss_curves_of_20_steps_agree(model: str, dp: int, ep: int, corpus: str) -> None:
    config = configure(corpus, **MODELS[model])
    expected = torch.tensor(curve_alone(config, 20), dtype=torch.float64)
    assert expected[-1] < 0.97 * expected[0], "it must learn something, or the curve proves nothing"
    for losses in run_ranks(dp * ep, curve, config, 20, dp=dp):
        assert difference(torch.tensor(losses, dtype=torch.float64), expected) <= BOUND


def save_after(mesh: Mesh, config: TrainConfig, folder: str, steps: int) -> str:
    learner = Learner(config, mesh)
    for step in range(steps):
        learner.step(step)
    return str(learner.save(Path(folder), steps))


def state_after_load(mesh: Mesh, config: TrainConfig, path: str) -> tuple[list, dict, list[float]]:
    learner = Learner(config, mesh)
    start = learner.load(Checkpoint.open(path, mesh))
    pieces = [(piece.name, piece.start, piece.data.clone()) for piece in learner.optim.pieces()]
    facts = {"start": start, "updates": learner.optim.updates}
    for name, buffer in learner._buffers():
        pieces += [(f"buffer/{name}", 0, buffer.clone())] if mesh.rank == 0 else []
    return pieces, facts, [learner.step(step)["loss"] for step in range(start, start + 3)]


@pytest.mark.parametrize(
    "saved", [(2, 2), *(pytest.param(layout, marks=pytest.mark.full) for layout in ((1, 2), (2, 1), (1, 4)))]
)
def test_any_layout_loads_any_other(saved: tuple[int, int], corpus: str, tmp_path: Path) -> None:
    config = configure(corpus, **LATENT)
    dp, ep = saved
    path = run_ranks(dp * ep, save_after, config, str(tmp_path), 4, dp=dp)[0]
    expected = curve_alone(config, 7)[4:]
    truth: dict[str, torch.Tensor] | None = None
    for dp, ep in [(1, 1), *LAYOUTS]:
        results = run_ranks(dp * ep, state_after_load, config, path, dp=dp)
        state = join([(pieces, 0.0) for pieces, _, _ in results])
        assert all(facts == {"start": 4, "updates": 4} for _, facts, _ in results)
        truth = truth or state
        assert state.keys() == truth.keys()
        assert all(torch.equal(state[name], truth[name]) for name in truth), "bits changed on the way"
        for _, _, losses in results:
            assert difference(losses, expected) < 1e-11


def test_a_checkpoint_of_another_model_is_refused(corpus: str, tmp_path: Path) -> None:
    mesh = Mesh.single()
    path = run_alone(save_after, configure(corpus), str(tmp_path), 1)
    other = Learner(configure(corpus, **{"model.d_model": 32}), mesh)
    with pytest.raises(CheckpointError, match=r"model\.d_model is 16 in the checkpoint, 32 in this run"):
        other.load(Checkpoint.open(path, mesh))


def poisoned(mesh: Mesh, config: TrainConfig, bad_steps: list[int], steps: int) -> tuple[list[bool], bool]:
    """Rank 1's weights give NaN gradients in some steps; were its parameters touched?"""
    learner = Learner(config, mesh)
    skipped, untouched = [], True
    for step in range(steps):
        before = [bucket.params.clone() for bucket in learner.buckets]
        layer = learner.layers[0]
        if step in bad_steps and mesh.rank == mesh.num_ranks - 1:
            layer.gate.weight.register_hook(lambda grad: grad * math.nan)
        record = learner.step(step)
        skipped.append(record["skipped"])
        if record["skipped"]:
            same = all(torch.equal(a, b.params) for a, b in zip(before, learner.buckets, strict=True))
            untouched &= same
            layer.gate.weight._backward_hooks = None
    return skipped, untouched


def test_a_bad_step_is_skipped_on_all_ranks(corpus: str) -> None:
    for skipped, untouched in run_ranks(2, poisoned, configure(corpus), [1, 3], 5):
        assert skipped == [False, True, False, True, False]
        assert untouched


def test_ten_bad_steps_in_a_row_stop_the_run(corpus: str) -> None:
    run_alone(diverge, configure(corpus))


def diverge(mesh: Mesh, config: TrainConfig) -> None:
    learner = Learner(config, mesh)
    learner.layers[0].gate.weight.register_hook(lambda grad: grad * math.nan)
    for step in range(9):
        assert learner.step(step)["skipped"]
    with pytest.raises(DivergedError, match="10 steps in a row, up to step 10, had a non-finite loss"):
        learner.step(9)
    assert learner.optim.updates == 0


def test_times_of_a_step_add_up(corpus: str) -> None:
    def told(mesh: Mesh) -> dict[str, Any]:
        learner = Learner(config, mesh)
        for step in range(3):
            assert learner.step(step)["step_ms"] > 0
        assert [told.step for told in learner.times.take()] == [0], "what is known without waiting"
        learner.times.settle()
        return learner.times.take()[-1].times

    config = configure(corpus)
    for record in run_ranks(2, told):
        for rank in range(2):
            times = {name: values[rank] for name, values in record["ranks"].items()}
            parts = times["compute_ms"] + times["exposed_ms"] + times["straggle_ms"] + times["idle_ms"]
            assert math.isclose(parts, times["step_ms"], rel_tol=1e-9)
            assert all(value >= -1e-9 for value in times.values())
        assert record["comm_ms"] > 0


def price_of_overlap(mesh: Mesh, config: TrainConfig) -> tuple[float | None, int]:
    """(slow-down of compute, ops that were seen of a step that nobody looked at)."""
    learner = Learner(config, mesh)
    assert learner.pipelined is not None
    for step in range(3, 7):
        learner.step(step)
    ratio = learner.pipelined.slowdown.ratio()
    learner.step(20)
    return ratio, len(learner.pipelined._seen) + (learner.pipelined.runtime.observe is not None)


def watched_by_another(mesh: Mesh, config: TrainConfig) -> tuple[bool, float | None]:
    learner = Learner(config, mesh)
    assert learner.pipelined is not None
    seen: list[Any] = []
    learner.pipelined.runtime.observe = lambda *one: seen.append(one)
    for step in range(3, 7):
        before = len(seen)
        learner.step(step)
        assert len(seen) > before
    return bool(seen), learner.pipelined.slowdown.ratio()


def test_who_watches_the_ops_of_a_step_goes_on_watching(corpus: str) -> None:
    changes: dict[str, Any] = {"optim.accumulate": 2, "data.batch_size": 4, "pipeline.overlap": "pair"}
    assert run_ranks(2, watched_by_another, configure(corpus, **changes)) == [(True, None)] * 2


def test_a_run_knows_what_overlap_costs(corpus: str) -> None:
    changes: dict[str, Any] = {"optim.accumulate": 4, "data.batch_size": 8, "pipeline.overlap": "pair"}
    for ratio, seen in run_ranks(2, price_of_overlap, configure(corpus, **changes)):
        assert ratio is not None
        assert 0.1 < ratio < 100
        assert not seen
