"""What runs again on several ranks: as much as it takes, counted as it is kept, the same for all ranks."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_learner import configure, corpus  # noqa: F401  (a fixture)
from test_state_bytes import BIG

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.observe.memory_table import watched
from moeclipse.train.run.choices import FILE, Choices
from moeclipse.train.run.resolve_auto import settle
from moeclipse.train.step import recompute_ranks
from moeclipse.train.step.learner import Learner
from moeclipse.train.step.recompute import MARGIN, pick
from moeclipse.train.step.recompute_ranks import (
    APART,
    activation_of,
    arriving_bytes,
    layer_keeps,
    left_open,
    peaks,
)

WIDE = {**BIG, "data.seq_len": 32, "moe.expert_tp": "sharded", "model.dtype": "float32"}


def kept(mesh: Mesh, config: TrainConfig) -> list[tuple[float, float]]:
    """(counted on one layer alone, kept in training) of each layer."""
    learner = Learner(config, mesh)
    table = watched(learner)
    learner.step(0)
    samples = config.data.batch_size // (config.optim.accumulate * mesh.num_data)
    alone = {dense: layer_keeps(config, mesh, samples, dense)["off"] for dense in (False, True)}
    return [
        (alone[config.model.is_dense(index)], table.kept[f"layer {index}"])
        for index in range(config.model.num_layers)
    ]


@pytest.mark.parametrize("axis", ["ep", "dp", "tp", "tp, whole sequences"])
def test_a_layer_alone_keeps_what_it_keeps_in_training(corpus: str, axis: str) -> None:  # noqa: F811
    axes = {name: 2 if axis.startswith(name) else 1 for name in ("ep", "dp", "tp")}
    values = {f"parallel.{name}": size for name, size in axes.items()}
    values["parallel.sequence_parallel"] = axis == "tp"
    config = configure(corpus, **{**WIDE, **values})
    mesh = {"ep": {}, "dp": {"dp": 2}}.get(axis, {"tp": 2})
    for layers in run_ranks(2, kept, config, **mesh):  # type: ignore[arg-type]
        for alone, training in layers:
            if (
                axis == "ep"
            ):  # rows as the gate has it; a device keeps those that arrive, plain torch does not
                assert 0.65 * alone < training < 1.05 * alone
            else:
                assert alone == pytest.approx(training, rel=0.25), axis


def test_rows_that_arrive_are_kept(corpus: str) -> None:  # noqa: F811
    """Once for each rank that a token goes to, evenly; on one rank they are the layer's own."""
    values = {**WIDE, "gate.top_k": 2, "model.d_model": 32, "data.seq_len": 16}

    class Ranks:
        def __init__(self, ep: int = 1, tp: int = 1, pp: int = 1) -> None:
            self.ep, self.tp, self.pp, self.num_ranks = ep, tp, pp, ep * tp * pp

    class Model:
        dtype = torch.float32

    def rows(ranks: Ranks, **changes: Any) -> float:
        config = configure(corpus, **{**values, **changes})
        with pytest.MonkeyPatch.context() as patch:
            size = ranks.ep * (ranks.tp if config.moe.expert_tp == "folded" else 1)
            patch.setattr(recompute_ranks, "expert_group", lambda *_: type("Group", (), {"size": size}))
            found: float = arriving_bytes(config, ranks, Model)  # type: ignore[arg-type]
        return found / (32 * 4)

    assert rows(Ranks()) == 0
    assert rows(Ranks(ep=2)) == 16 * 1.5
    assert rows(Ranks(ep=4)) == 16 * 1.75
    assert rows(Ranks(ep=2, tp=2)) == 16 * 1.5, "parts of experts see all rows"
    assert rows(Ranks(ep=2, tp=2), **{"moe.expert_tp": "folded"}) == 8 * 1.75
    assert rows(Ranks(pp=2)) == 16, "a program copies them"


def expected(mesh: Mesh, config: TrainConfig) -> dict[str, float]:
    return dict(peaks(config, mesh))


def test_a_pipeline_holds_several_microbatches(corpus: str) -> None:  # noqa: F811
    """With every schedule the rank that holds most counts; the state is there in any case."""
    deep = {**WIDE, "model.num_layers": 8, "parallel.pp": 2, "parallel.ep": 1, "data.batch_size": 8}
    found = {}
    for schedule, accumulate in (("1f1b", 4), ("1f1b", 16), ("gpipe", 4), ("gpipe", 16)):
        values = {**deep, "pipeline.schedule": schedule, "optim.accumulate": accumulate}
        config = configure(corpus, **{**values, "data.batch_size": 2 * accumulate})
        first, second = run_ranks(2, expected, config, pp=2)
        assert first == second
        assert first["off"] == first["norms"] > first["attn"] > first["full"], "no norms in a program"
        found[schedule, accumulate] = first["off"]
    assert found["1f1b", 16] == found["1f1b", 4] < found["gpipe", 4] < 0.5 * found["gpipe", 16]


def test_more_samples_keep_more(corpus: str) -> None:  # noqa: F811
    one, two, three = (
        peaks(
            configure(corpus, **{**WIDE, "optim.accumulate": 1, "data.batch_size": size}), Mesh.single("cpu")
        )
        for size in (1, 2, 3)
    )
    for level in one:
        assert three[level] - two[level] == pytest.approx(two[level] - one[level])
        assert two[level] > one[level]


def test_many_microbatches_are_not_written_out(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """And tell the same: a program soon holds no more than before."""
    asked = []
    real = recompute_ranks.make_program

    def counted(*given: Any) -> Any:
        asked.append(given[4])
        return real(*given)

    monkeypatch.setattr(recompute_ranks, "make_program", counted)
    found = []
    for accumulate in (4, 32):
        values = {**WIDE, "optim.accumulate": accumulate, "data.batch_size": 2 * accumulate}
        found.append(peaks(configure(corpus, **values), Mesh.single("cpu")))
    assert set(asked) == {4}
    assert found[0] == found[1]


def test_a_program_that_saves_less_than_it_takes_is_not_chosen(corpus: str) -> None:  # noqa: F811
    """Of few layers running attention again takes more than it saves."""

    def found(layers: int) -> dict[str, float]:
        config = configure(corpus, **{**WIDE, "model.num_layers": layers, "parallel.ep": 2})
        return run_ranks(2, expected, config)[0]

    few, many = found(2), found(24)
    assert few["attn"] > few["off"] > few["norms"]
    assert many["off"] > many["attn"] > many["full"]
    assert pick(few, 0.0) == min(few, key=lambda level: few[level])  # type: ignore[arg-type]
    assert pick(many, 0.0) == "full"  # type: ignore[arg-type]


def test_parts_of_a_layer() -> None:
    parts = activation_of({"off": 100.0, "norms": 90.0, "attn": 60.0, "full": 10.0})
    assert (parts.input, parts.attn, parts.shared, parts.mlp) == (10.0, 40.0, 0.0, 50.0)


def test_who_is_asked(corpus: str) -> None:  # noqa: F811
    class Cuda:
        class device:  # noqa: N801
            type = "cuda"

        num_ranks = 2

    config = configure(corpus)
    several: Any = Cuda
    assert left_open(config, several)
    for key, value in (("pipeline.recompute", "off"), ("optim.frozen", ("gate",)), ("lora.rank", 4)):
        assert not left_open(with_values(config, {key: value}), several), key
    assert not left_open(config, Mesh.single("cpu"))


def settled(mesh: Mesh, config: TrainConfig, folder: str, level: str) -> dict[str, Any]:
    """A run whose last rank has least memory, just enough for this level."""
    found = peaks(config, mesh)
    apart = APART if mesh.ep > 1 else 1.0
    room = found[level] / (MARGIN * apart) * 1.0001  # type: ignore[index]
    recompute_ranks.left_open = lambda config, _: config.pipeline.recompute == "auto"
    recompute_ranks.memory_left = lambda _: room + (1 - mesh.rank) * 1e9  # type: ignore[attr-defined, assignment]
    Path(folder).mkdir(exist_ok=True)
    choices = Choices(mesh, Path(folder))
    taken, lines = settle(config, mesh, choices)
    choices.write()
    learner = Learner(taken, mesh)
    return {
        "level": taken.pipeline.recompute,
        "lines": lines,
        "program": learner.pipelined is not None,
        "losses": [learner.step(step)["loss"] for step in range(3)],
    }


@cache
def losses_of(config: TrainConfig) -> list[float]:
    return run_ranks(2, plainly, config)[0]


def plainly(mesh: Mesh, config: TrainConfig) -> list[float]:
    learner = Learner(config, mesh)
    return [learner.step(step)["loss"] for step in range(3)]


@pytest.mark.parametrize(("level", "steps"), [("off", 100), ("norms", 3), ("attn", 100), ("full", 3)])
def test_the_first_that_fits_all_ranks(
    corpus: str,  # noqa: F811
    tmp_path: Path,
    level: str,
    steps: int,
) -> None:
    """Also in runs too short for trials: these have to fit, too. And it trains the same."""
    values = {**WIDE, "model.dtype": "float64", "run.steps": steps, "moe.transport": "direct"}
    values |= {"optim.accumulate": 1, "data.batch_size": 2}
    values["model.num_layers"] = 14  # of few layers a program takes more than it saves
    config = configure(corpus, **{**values, "parallel.ep": 2, "pipeline.overlap": "off"})
    plain = losses_of(with_values(config, {"pipeline.recompute": "off"}))
    for found in run_ranks(2, settled, config, str(tmp_path), level):
        assert found["level"] == (level if level != "off" else "auto")
        assert found["program"] == (level in ("attn", "full"))
        assert difference(found["losses"], plain) < 1e-12
        said = [line for line in found["lines"] if line.startswith("recompute")]
        assert len(said) == (level != "off"), found["lines"]
    kept = tmp_path / FILE
    written = json.loads(kept.read_text())["settled"] if kept.exists() else {}
    assert written.get("pipeline.recompute", "off") == level


def test_a_pipeline_chooses_among_its_own(corpus: str, tmp_path: Path) -> None:  # noqa: F811
    values = {**WIDE, "parallel.pp": 2, "parallel.ep": 1, "model.dtype": "float64", "run.steps": 3}
    config = configure(corpus, **values)
    first, second = run_ranks(2, settled, config, str(tmp_path), "attn", pp=2)
    assert first["level"] == second["level"] == "attn"


def test_graphs_have_a_place_for_the_input_of_each_layer(corpus: str, monkeypatch: Any) -> None:  # noqa: F811
    """Where nothing runs again: otherwise parts are no graphs."""
    config, mesh = configure(corpus, **WIDE), Mesh.single("cpu")
    eagerly = peaks(config, mesh)
    monkeypatch.setattr(recompute_ranks, "obstacle_in_config", lambda *_: "")
    replayed = peaks(config, mesh)
    tokens = config.data.batch_size // config.optim.accumulate * config.data.seq_len
    rows = config.model.num_layers * tokens * config.model.d_model * 4
    assert {level: replayed[level] - eagerly[level] for level in eagerly} == {
        **dict.fromkeys(eagerly, 0.0),
        "off": rows,
    }
