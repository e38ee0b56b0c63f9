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
from moeclipse.core.config import with_values
from moeclipse.core.errors import DivergedError
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner
from moeclipse.train.step.nonfinite import is_bad, outputs_watched, tensors_in


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
    elif where in dict(learner.model.named_modules()):  # else another stage has it
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
        assert notes[0].startswith("step 2: repeatable: the output of layers.1.attention on rank ")
        assert f"on rank {victim} is the first non-finite value" in notes[0]
        assert "lower optim.lr" in notes[0]


LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "ep": ({}, {"gate.choose": "threshold", "gate.threshold": 0.24}),
    "dp": ({"dp": 2}, {}),
    "pp": ({"pp": 2}, {"parallel.pp": 2, "optim.accumulate": 2, "pipeline.schedule": "1f1b"}),
    "memory": ({}, {"model.memory": 8, "data.order": "streams"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_does_not_come_again_is_the_machine_and_leaves_no_trace(tmp_path: Path, layout: str) -> None:
    axes, changes = LAYOUTS[layout]
    config = configure(tmp_path, **changes)
    victim = 0 if layout == "pp" else 1  # the last stage, rank 1, computes the loss of what rank 0 spoils
    harmed = run_ranks(2, said, config, "layers.0.attention", victim, 1, **axes)
    plain = run_ranks(2, said, config, "layers.0.attention", victim, 0, **axes)
    for (notes, losses), (_, expected) in zip(harmed, plain, strict=True):
        assert notes == [
            "step 2: transient: rank 1 had a non-finite value, but the same step computed again was finite "
            "everywhere; look at the memory and the links of that machine before the numbers of the model; "
            "the step is computed anew"
        ]
        assert losses == expected


def test_an_accident_in_both_tries_skips_the_step(tmp_path: Path) -> None:
    """The look in between is the only one that goes well."""
    for notes, losses in run_ranks(2, twice_by_accident, configure(tmp_path)):
        assert [note.partition(": rank")[0] for note in notes] == ["step 2: transient"] * 2
        assert notes[0].endswith("the step is computed anew")
        assert not notes[1].endswith("the step is computed anew")
        assert math.isnan(float.fromhex(losses[1]))
        assert math.isfinite(float.fromhex(losses[2]))


def twice_by_accident(mesh: Mesh, config: TrainConfig) -> tuple[list[str], list[str]]:
    learner, calls = Learner(config, mesh), 0

    def spoil(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor | None:
        nonlocal calls
        calls += 1
        return out * math.nan if calls in (2, 4) else None  # step 1, its look, step 1 again, its look

    learner.model.get_submodule("layers.0.attention").register_forward_hook(spoil)
    records = [learner.step(step) for step in range(3)]
    return [note for record in records for note in record.get("notes", ())], [
        record["loss"].hex() for record in records
    ]


def test_a_weight_comes_before_what_it_leads_to(tmp_path: Path) -> None:
    config = with_values(configure(tmp_path), {"integrity.every": 0})  # which would name the weight first
    for notes, _ in run_ranks(2, said, config, "weight", 1, 0):
        assert len(notes) == 1
        assert notes[0].startswith("step 1: repeatable: the weight ")
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
