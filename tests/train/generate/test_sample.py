"""Lines that a trained model writes: in every layout the same, bounded, and otherwise the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_run import TINY

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import problems_of, with_values
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.generate import sample
from moeclipse.train.generate.sample import write_sample
from moeclipse.train.run.trainer import Run, Silence
from moeclipse.train.step.learner import Learner


def configuration(root: Path, **values: Any) -> TrainConfig:
    (root / "text.txt").write_text("abcdefgh" * 50)
    given = {"data.files": (str(root / "text.txt"),), "run.dir": str(root / "runs")}
    given |= {"data.batch_size": 4, "parallel.check_launches": True, "parallel.peer": "off"}
    return with_values(TrainConfig(), {**TINY, **given, **values})


def written(mesh: Mesh, config: TrainConfig) -> dict[str, Any]:
    """After a step, as at the end of a run; and training goes on as if nothing had been."""
    learner = Learner(config, mesh)
    learner.step(0)
    found = write_sample(learner, 3)
    assert learner.model.training
    learner.step(1)
    return found


def test_lines_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    expected = run_alone(written, config)
    assert [len(prompt) for prompt, _ in expected["lines"]] == [16] * 3
    assert all(prompt in "abcdefgh" * 5 for prompt, _ in expected["lines"])
    assert all(text for _, text in expected["lines"])
    for layout, values in (
        ({}, {}),
        ({"tp": 2}, {"parallel.tp": 2}),  # with sequence parallelism: three lines, and one that nobody wants
    ):
        found = run_ranks(2, written, with_values(config, values), **layout)
        assert found == [expected, expected], layout


def reasons(mesh: Mesh, root: Path) -> list[str]:
    np.save(root / "tokens.npy", np.arange(200, dtype=np.uint8))
    tokens = configuration(root, **{"data.files": (str(root / "tokens.npy"),)})
    short = configuration(root, **{"data.seq_len": 1})
    return [write_sample(Learner(config, mesh), 2)["why"] for config in (tokens, short)]


def of_a_pipeline(mesh: Mesh, config: TrainConfig) -> dict[str, Any]:
    return write_sample(Learner(config, mesh), 2)


def test_where_nothing_can_be_written_one_line_says_why(tmp_path: Path) -> None:
    tokens, short = run_alone(reasons, tmp_path)
    assert "trained on files of tokens" in tokens
    assert short == "data.seq_len (1) leaves no room for a prompt and a text"
    config = configuration(tmp_path, **{"parallel.pp": 2})
    for told in run_ranks(2, of_a_pipeline, config, pp=2):
        assert "parallel.pp" in told["why"]
    (problem,) = problems_of(configuration(tmp_path, **{"run.sample": -1}))
    assert problem.startswith("run.sample (-1)")


def runs(mesh: Mesh, root: Path) -> list[Any]:
    """Summaries of a run with two lines, of one with none, and of one without time; and of a resumed one."""
    many = {"run.steps": 4, "checkpoint.every": 2, "optim.warmup_steps": 1, "metrics.warmup_steps": 0}
    wsd = {"optim.schedule": "wsd", "optim.decay_share": 0.5, "run.sample": 2}
    config = configuration(root, **many, **wsd)
    whole = Run(config, mesh, Silence()).whole("off")
    none = Run(with_values(config, {"run.name": "none", "run.sample": 0}), mesh, Silence()).whole("off")
    half = str(root / "runs" / "tiny" / "checkpoints" / "step-00000002")
    again = Run(with_values(config, {"run.name": "again"}), mesh, Silence()).whole(half)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "MAX_SECONDS", -1.0)
        late = Run(with_values(config, {"run.name": "late", "run.steps": 1}), mesh, Silence()).whole("off")
    return [(one["loss_last"], one.get("sample")) for one in (whole, none, again, late)]


def test_a_run_ends_in_lines_and_a_resumed_one_in_the_same(tmp_path: Path) -> None:
    whole, none, again, late = run_alone(runs, tmp_path)
    assert len(whole[1]["lines"]) == 2
    assert none == (whole[0], None)
    assert again == whole, "the schedule goes on exactly, and so does the text"
    assert all(len(text) <= 1 for _, text in late[1]["lines"])
