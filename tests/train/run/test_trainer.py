"""Whole runs: what they write, that they go on exactly after any kill, and what stops them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.core.errors import CheckpointError, ConfigError, DataError, MoEclipseError
from moeclipse.testing.run_ranks import run_alone, run_ranks, run_ranks_raw
from moeclipse.train.config import TrainConfig
from moeclipse.train.run.trainer import Run, Silence, train

STEPS = 6


def configure(folder: Path, **changes: Any) -> TrainConfig:
    text = folder / "text.txt"
    text.write_text(Path(__file__).read_text())
    values: dict[str, Any] = {
        "model.num_layers": 2,
        "model.d_model": 16,
        "model.num_heads": 2,
        "model.num_kv_heads": 1,
        "model.head_dim": 8,
        "moe.num_experts": 4,
        "moe.d_ff": 12,
        "gate.kind": "sigmoid",
        "gate.bias_rate": 0.01,
        "data.files": (str(text),),
        "data.seq_len": 16,
        "data.batch_size": 4,
        "run.dir": str(folder / "runs"),
        "run.name": "run",
        "run.steps": STEPS,
        "checkpoint.every": 2,
        "optim.warmup_steps": 2,
        "metrics.warmup_steps": 1,
    }
    return with_values(TrainConfig(), {**values, **changes})


class Killer(Silence):
    """Ends this process, with no chance to say goodbye, when a step is over."""

    def __init__(self, step: int) -> None:
        self.at = step

    def step(self, record: dict[str, Any]) -> None:
        if record["step"] == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


class Notes(Silence):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def whole(
    mesh: Mesh, config: TrainConfig, resume: str = "off", victim: int = -1, step: int = -1
) -> list[str]:
    notes = Notes()
    Run(config, mesh, Killer(step) if mesh.rank == victim else notes).whole(resume)
    return notes.texts


def losses(config: TrainConfig) -> list[tuple[int, str]]:
    """(step, loss) to the last bit."""
    lines = (Path(config.run.dir) / config.run.name / "metrics.jsonl").read_text().splitlines()
    return [(record["step"], record["loss"].hex()) for record in map(json.loads, lines)]


def resumed_after_kill(folder: Path, dp: int, victim: int, step: int) -> list[tuple[int, str]]:
    config = configure(folder, **{"run.name": f"killed-{dp}-{victim}-{step}"})
    outcomes = run_ranks_raw(2, whole, config, "off", victim, step, dp=dp)
    assert not any(ok for ok, _ in outcomes), "a dead peer must end the others"
    run_ranks(2, whole, config, "auto", dp=dp)
    return losses(config)


CASES = [(dp, victim, step) for dp in (1, 2) for victim in (0, 1) for step in range(STEPS)]


def check_kills(folder: Path, cases: list[tuple[int, int, int]]) -> None:
    for dp in (1, 2):
        config = configure(folder, **{"run.name": f"whole-{dp}"})
        run_ranks(2, whole, config, dp=dp)
        expected = losses(config)
        assert [step for step, _ in expected] == list(range(STEPS))
        for case in cases:
            if case[0] == dp:
                assert resumed_after_kill(folder, *case) == expected, case


def test_the_curve_goes_on_exactly_after_a_kill(tmp_path: Path) -> None:
    check_kills(tmp_path, [(1, 0, 3), (1, 1, 4), (2, 1, 0), (2, 0, 5)])


@pytest.mark.full
def test_the_curve_goes_on_exactly_after_any_kill(tmp_path: Path) -> None:
    check_kills(tmp_path, CASES)


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    config = configure(tmp_path, **{"run.name": "whole"})
    run_ranks(2, whole, config)
    other = configure(tmp_path, **{"run.name": "damaged", "run.steps": 4})
    run_ranks(2, whole, other)
    shards = sorted((tmp_path / "runs/damaged/checkpoints/step-00000004").glob("*.safetensors"))
    raw = bytearray(shards[0].read_bytes())
    raw[random.Random(0).randrange(len(raw))] ^= 1
    shards[0].write_bytes(raw)
    longer = configure(tmp_path, **{"run.name": "damaged"})
    notes = run_ranks(2, whole, longer, "auto")[0]
    assert len(notes) == 1
    assert "passed over a damaged checkpoint, step-00000004: " in notes[0]
    assert shards[0].name in notes[0]
    # Steps 2 and 3 ran twice, the first time on another learning-rate horizon; the rest cannot differ.
    assert [step for step, _ in losses(longer)] == list(range(STEPS))


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path) -> None:
    config = configure(tmp_path, **{"run.steps": 2})
    run_alone(finish, config)
    (tmp_path / "runs/run/checkpoints/step-00000002/index.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole: step-00000002: .*index\.json"):
        Run(config, Mesh.single(), Silence()).whole("auto")


def test_a_resumed_run_cuts_rows_as_before(tmp_path: Path) -> None:
    """The smart schedule's choice comes from measured times; a resumed run must not measure another one."""
    config = configure(tmp_path, **{"moe.schedule": "smart", "moe.shadow": "off"})
    run_ranks(2, whole, config)
    expected = losses(config)
    shutil.rmtree(tmp_path / "runs/run/checkpoints/step-00000006")
    run_ranks(2, whole, config, "auto")
    assert losses(config) == expected
    summary = json.loads((tmp_path / "runs/run/summary.json").read_text())
    assert [choice["rule"] for choice in summary["exchange"]] == ["resumed", "resumed"]


def test_what_a_run_leaves_behind(tmp_path: Path) -> None:
    config = configure(tmp_path, **{"checkpoint.keep": 2, "metrics.tensorboard": True})
    summary = run_alone(finish, config)
    directory = tmp_path / "runs/run"
    assert json.loads((directory / "summary.json").read_text()) == json.loads(json.dumps(summary))
    required = {"loss_first", "loss_last", "tokens_per_s", "step_ms", "compute_ms", "exposed_ms", "idle_ms"}
    assert required | {"hidden_fraction", "window", "load"} <= summary.keys()
    assert summary["window"] == "steps 1 to 5"
    kept = sorted(path.name for path in (directory / "checkpoints").iterdir())
    assert kept == ["step-00000004", "step-00000006"]
    assert list((directory / "tensorboard").iterdir())
    record = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])
    assert {
        "loss",
        "lr",
        "grad_norm",
        "tokens_per_s",
        "step_ms",
        "hidden_fraction",
        "dropped",
    } <= record.keys()
    assert [sum(layer) for layer in record["load"]] == [2 * 64, 2 * 64], "top-2 of 64 tokens, in each layer"
    assert 'kind = "sigmoid"' in (directory / "config.toml").read_text()


def finish(mesh: Mesh, config: TrainConfig) -> dict[str, Any]:
    return Run(config, mesh, Silence()).whole("off")


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    config = configure(tmp_path, **{"run.steps": 1})
    run_alone(finish, config)
    with pytest.raises(ConfigError, match=r"run directory .*runs/run exists; continue it with --resume auto"):
        Run(config, Mesh.single(), Silence()).whole("off")
    for ok, text in run_ranks_raw(2, whole, config):
        assert not ok
        assert "exists; continue it with --resume auto" in text


def failing(mesh: Mesh, config: TrainConfig) -> str:
    try:
        Run(config, mesh, Silence()).whole("off")
    except MoEclipseError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_bad_input_stops_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="missing"):
        train(configure(tmp_path, **{"data.files": (str(tmp_path / "missing.txt"),)}))
    with pytest.raises(ConfigError, match="4 problems"):
        train(configure(tmp_path, **{"gate.top_k": 9, "run.steps": 0, "optim.lr": -1.0, "model.head_dim": 7}))
    with pytest.raises(ConfigError, match=r"parallel.ep \(3\) must divide the number of ranks \(1\)"):
        train(configure(tmp_path, **{"parallel.ep": 3}))


def test_a_run_directory_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    config = configure(tmp_path, **{"run.dir": str(blocked)})
    for text in run_ranks(2, failing, config):
        assert "cannot be written" in text
        assert "choose another --run.dir" in text


def full_disk(mesh: Mesh, config: TrainConfig) -> str:
    """Rank 1's disk is full from the second checkpoint on."""
    import moeclipse.train.step.checkpointed_state as learner
    from moeclipse.train.checkpoints.disk import Disk

    class Full(Disk):
        def write(self, *args: Any, **kwargs: Any) -> Any:
            raise OSError(28, "No space left on device")

    plain = learner.save

    def save(folder: Path, step: int, *args: Any, **kwargs: Any) -> Path:
        if step >= 4 and mesh.rank == 1:
            kwargs["disk"] = Full()
        return plain(folder, step, *args, **kwargs)

    learner.save = save
    return failing(mesh, config)


def test_a_full_disk_stops_all_ranks_and_spares_the_last_checkpoint(tmp_path: Path) -> None:
    config = configure(tmp_path)
    for text in run_ranks(2, full_disk, config):
        assert text.startswith("StorageError: checkpoint step 4 could not be saved")
        assert "checkpoint step 2 is intact; free some space" in text
    kept = [path.name for path in (tmp_path / "runs/run/checkpoints").iterdir()]
    assert kept == ["step-00000002"]
    run_ranks(2, whole, config, "auto")
    assert [step for step, _ in losses(config)] == list(range(STEPS))
