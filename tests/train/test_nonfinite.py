"""A non-finite step is looked at again: where it began, on which rank, and whether it comes again."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer import configure

from apart import apart
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import DivergedError
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.learner import Learner
from moeclipse.train.nonfinite import is_bad, outputs_watched, tensors_in


def said(mesh: Mesh, config: TrainConfig, where: str, victim: int, times: int) -> tuple[list[str], list[str]]:
    """Notes of all steps, and losses, when a module on `victim` gives NaN so many times in step 1."""
    learner = Learner(config, mesh)
    left = times
    now = 0

    def spoil(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor | None:
        nonlocal left
        if now >= 1 and mesh.rank == victim and left:
            left -= 1
            return out * math.nan
        return None

    if where == "weight":
        bucket = learner.optim.buckets.buckets[-1]
        if mesh.rank == victim:
            bucket.params[bucket.shard.start] = math.nan
    else:
        learner.model.get_submodule(where).register_forward_hook(spoil)
    notes, losses = [], []
    for now in range(3):
        record = learner.step(now)
        notes += record.get("notes", ())
        losses.append(record["loss"].hex())
    return notes, losses


@pytest.mark.parametrize("victim", [0, 1])
def test_the_module_and_the_rank_that_come_first_are_named(tmp_path: Path, victim: int) -> None:
    config = configure(tmp_path)
    for notes, _ in run_ranks(2, said, config, "layers.1.attention", victim, 99):
        assert len(notes) == 1, "the first of several bad steps"
        assert notes[0].startswith("step 1: repeatable: the output of layers.1.attention on rank ")
        assert f"on rank {victim} is the first non-finite value" in notes[0]
        assert "lower optim.lr" in notes[0]


def test_what_does_not_come_again_is_the_machine(tmp_path: Path) -> None:
    config = configure(tmp_path)
    for notes, losses in run_ranks(2, said, config, "layers.0.attention", 1, 1):
        assert notes == [
            "step 1: transient: rank 1 had a non-finite value, but the same step computed again was finite "
            "everywhere; look at the memory and the links of that machine before the numbers of the model"
        ]
        assert math.isnan(float.fromhex(losses[1]))


def test_a_second_look_leaves_no_trace(tmp_path: Path) -> None:
    """Step 2 after a skipped step 1 is what it is when the look is left out."""
    config = configure(tmp_path, **{"gate.choose": "threshold", "gate.threshold": 0.24})
    looked = run_ranks(2, said, config, "layers.0.attention", 1, 1)
    plain = run_ranks(2, without_look, config)
    assert [losses[2] for _, losses in looked] == plain


def without_look(mesh: Mesh, config: TrainConfig) -> str:
    Learner._doubt = lambda self, step, loss, losses: []  # type: ignore[method-assign]
    return said(mesh, config, "layers.0.attention", 1, 1)[1][2]


def test_a_weight_comes_before_what_it_leads_to(tmp_path: Path) -> None:
    for notes, _ in run_ranks(2, said, configure(tmp_path), "weight", 1, 0):
        assert len(notes) == 1
        assert notes[0].startswith("step 0: repeatable: the weight ")
        assert " on rank 1 is the first" in notes[0]
        assert "integrity.every = 1" in notes[0]


def diverged(mesh: Mesh, config: TrainConfig) -> str:
    try:
        for _ in range(3):
            said(mesh, config, "layers.1.attention", 0, 99)
    except DivergedError as error:
        return str(error)
    return ""


def test_a_run_that_diverges_says_where_it_began(tmp_path: Path) -> None:
    config = configure(tmp_path, **{"optim.max_bad_steps": 2})
    for text in run_ranks(2, diverged, config):
        assert "Of the first of them: repeatable: the output of layers.1.attention on rank 0" in text


@apart
def test_the_innermost_module_speaks_first() -> None:
    inner = torch.nn.Linear(2, 2)
    outer = torch.nn.Sequential(torch.nn.Linear(2, 2), inner)
    inner.weight.data.fill_(math.nan)
    with outputs_watched(outer) as found:
        outer(torch.ones(1, 2))
    assert found == [(2, "1")]
    outer(torch.ones(1, 2))
    assert found == [(2, "1")], "nobody looks any more"


def test_tensors_are_found_in_whatever_a_module_returns() -> None:
    class Report:
        def __init__(self) -> None:
            self.loss = torch.tensor(math.inf)

    value = {"a": [torch.ones(1), (torch.zeros(1), 3)], "b": Report()}
    assert [is_bad(tensor) for tensor in tensors_in(value)] == [False, False, True]
    assert not is_bad(torch.tensor([1, 2]))
