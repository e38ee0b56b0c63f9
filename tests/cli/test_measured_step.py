"""Kernels inside a step: what is found makes the prediction the measured step, and is part of the file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from moeclipse.cli import measured_step
from moeclipse.cli.measure import of_machine
from moeclipse.cli.measured_step import (
    SHAPES,
    busiest,
    kernels_inside,
    measured_config,
    message_inside,
    predicted_step,
)
from moeclipse.cost.cluster import cluster, cluster_at
from moeclipse.train.predict import machine
from moeclipse.train.predict.machine import as_toml

KNOWN = {"cpu": "cpu", "cuda": "h200"}


def tables(kind: str) -> dict[str, Any]:
    return {"device": KNOWN[kind], "kernels": {"stream": asdict(cluster(KNOWN[kind]).constants)["stream"]}}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("times", [0.8, 1.3, 3.0])
def test_the_measured_step_is_predicted_with_what_was_found(kind: str, times: float) -> None:
    seconds = times * predicted_step(kind, tables(kind))
    inside = kernels_inside(kind, tables(kind), seconds)
    assert (inside - 1.0) * (times - 1.0) > 0
    assert predicted_step(kind, tables(kind), inside) == pytest.approx(seconds, rel=0.01)


def linked(latency: float) -> dict[str, Any]:
    link = {"bandwidth": 1e9, "latency": latency, "efficiency": 1.0}
    found = tables("cpu")
    return {**found, "kernels": {**found["kernels"], "inside": 1.2}, "near": link, "far": link}


@pytest.mark.parametrize("latency", [3e-4, 2e-3])
def test_the_shared_step_is_predicted_with_what_messages_take_inside(latency: float) -> None:
    seconds = predicted_step("cpu", linked(latency), 1.2, ep=2, imbalance=1.1)
    assert message_inside(linked(1e-4), seconds, 1.1) == pytest.approx(latency, rel=0.05)
    uneven = predicted_step("cpu", linked(latency), 1.2, ep=2, imbalance=1.3)
    assert message_inside(linked(1e-4), uneven, 1.3) == pytest.approx(latency, rel=0.05)


def test_a_message_inside_takes_no_less_than_alone() -> None:
    assert message_inside(linked(1e-4), 1e-9, 1.0) == 1e-4


def test_the_busiest_rank_has_so_much_of_the_mean() -> None:
    assert busiest([[3, 1, 0, 0], [1, 1, 1, 1]], 2) == pytest.approx((2.0 + 1.0) / 2)
    assert busiest([[3, 1, 0, 0]], 1) == 1.0


def test_kernels_take_no_less_than_half() -> None:
    assert kernels_inside("cpu", tables("cpu"), 1e-9) == 0.5


def test_a_step_of_two_ranks_at_once_enters_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = {"model.d_model": 48, "model.num_heads": 1, "model.num_kv_heads": 1, "model.head_dim": 48}
    monkeypatch.setitem(SHAPES, "cpu", {**SHAPES["cpu"], **small, "moe.d_ff": 16, "data.seq_len": 16})
    monkeypatch.setattr(measured_step, "TIMED", 1)
    monkeypatch.setattr(machine, "REPEATS", 1)
    monkeypatch.setitem(machine.COPIED, "cpu", 1 << 20)
    assert measured_config("cpu").model.d_model == 48
    found, _ = of_machine("cpu")
    file = tmp_path / "costs.toml"
    file.write_text(as_toml(found, "measured here"))
    assert cluster_at(str(file)).constants.inside == pytest.approx(found["kernels"]["inside"], rel=1e-4)
    assert found["kernels"]["inside"] != 1.0
    assert cluster_at(str(file)).near.latency == pytest.approx(found["near"]["latency"], rel=1e-4)


def test_without_ranks_the_file_says_nothing_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_step, "ask_two_ranks", lambda *_: (False, "no fork"))
    assert measured_step.measured_step("cpu") is None
    assert measured_step.shared_step() is None
