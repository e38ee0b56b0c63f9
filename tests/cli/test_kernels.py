"""What doctor says about the experts' kernels; on CPU both ways are plain torch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from moeclipse.cli import kernels as checked
from moeclipse.cli.kernels import Speed, TriedLayer, finding, kernels, measure
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.experts.two_projections import Experts
from moeclipse.testing.run_ranks import run_alone

SMALL = TriedLayer(tokens=24, d_model=16, d_ff=8, experts=4, top_k=2)
GOOD = Speed(kernels_s=0.004, plain_s=0.006, difference=0.004)
FORM = "descriptor form for sm_90"


def found(_: Mesh) -> tuple[float, float, float]:
    speed = measure(SMALL, torch.device("cpu"))
    return speed.kernels_s, speed.plain_s, speed.difference


def test_both_ways_compute_the_same_and_are_timed() -> None:
    kernels_s, plain_s, difference = run_alone(found)
    assert kernels_s > 0
    assert plain_s > 0
    assert difference == 0


def wrong(_: Mesh) -> float:
    made: list[Experts] = []
    forward = Experts.forward

    def doubled(self: Experts, *args: object, **options: object) -> object:
        made.append(self)
        out, *more = forward(self, *args, **options)  # type: ignore[arg-type]
        return (2 * out if self is made[0] else out, *more)

    Experts.forward = doubled  # type: ignore[method-assign, assignment]
    return measure(SMALL, torch.device("cpu")).difference


def test_a_way_that_computes_something_else_is_seen() -> None:
    assert run_alone(wrong) > 0.5


def test_speed_is_told_beside_plain_torch() -> None:
    item = finding(FORM, TriedLayer(), GOOD)
    assert (item.section, item.name, item.state) == ("kernels", "experts", "works")
    assert item.value == (
        "descriptor form for sm_90: 464 TFLOP/s forward and backward, plain torch 309 "
        "(1.50 times as fast; 8192 tokens x 8 of 32 experts, 2048 x 768)"
    )


def test_slow_kernels_have_advice_and_wrong_ones_stop_training() -> None:
    slow = finding(FORM, TriedLayer(), replace(GOOD, kernels_s=0.009))
    assert slow.state == "limited"
    assert "--moe.kernels off" in slow.advice
    for difference in (0.5, math.nan, math.inf):
        item = finding(FORM, TriedLayer(), replace(GOOD, difference=difference))
        assert item.state == "broken"
        assert "differ from plain torch" in item.value


def test_without_a_device_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(checked, "measure", None)
    (item,) = kernels()
    assert item.state == "info"
    assert "plain torch" in item.value


def on_a_device(monkeypatch: pytest.MonkeyPatch, outcome: object) -> str:
    def measured(*_: object) -> Speed:
        if isinstance(outcome, Exception):
            raise outcome
        assert isinstance(outcome, Speed)
        return outcome

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "Some GPU")
    monkeypatch.setattr("moeclipse.ops.architecture.architecture_of", lambda _: checked_architecture(outcome))
    monkeypatch.setattr(checked, "measure", measured)
    (item,) = kernels()
    return f"{item.state}: {item.value}"


def checked_architecture(outcome: object) -> object:
    from moeclipse.ops.architecture import ARCHITECTURES

    return ARCHITECTURES["sm_89"] if outcome is not None else None


def test_what_can_happen_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_a_device(monkeypatch, GOOD).startswith("works: pointer form for sm_89: 464 TFLOP/s")
    assert on_a_device(monkeypatch, None) == "limited: experts compute in plain torch on Some GPU"
    full = torch.cuda.OutOfMemoryError("full")
    assert on_a_device(monkeypatch, full) == "works: pointer form for sm_89, not measured"
    assert on_a_device(monkeypatch, ValueError("bad\nmore")) == "limited: pointer form for sm_89 fails: bad"
