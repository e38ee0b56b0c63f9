"""One line on how rows travel: when it is known, once, and only where something was chosen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from moeclipse.train.run.exchange_note import SEEN_STEPS, ExchangeNote, in_words

CUT = {
    "steps": 2,
    "chunks": 2,
    "rule": "ends",
    "predicted_ms": 2.0,
    "blocking_ms": 3.5,
    "measured_ms": 2.5,
    "over_plain": 1.25,
    "tried": 4,
}
WHOLE = {**CUT, "steps": 1, "chunks": 1, "over_plain": 1.0}
STEP = {"hidden_ms": 1.0, "comm_ms": 4.0}


def layer(report: dict[str, Any], chosen: bool = True) -> Any:
    cuts = SimpleNamespace(has_chosen=chosen, report=lambda: report)
    return SimpleNamespace(schedule=SimpleNamespace(cuts=cuts))


def test_a_choice_is_told_once_when_it_has_been_seen() -> None:
    note, layers = ExchangeNote(), [layer(CUT), layer(CUT, chosen=False)]
    for _ in range(10):
        assert note.after_step(layers, STEP) == [], "a layer is still trying"
    layers[1].schedule.cuts.has_chosen = True
    told = [note.after_step(layers, STEP) for _ in range(2 * SEEN_STEPS)]
    line = "exchange: 2 steps x 2 chunks: 25 % of communication hidden in 4 steps; 5.0 ms, "
    line += "blocking took 1.25 times as long"
    assert told == [*[[]] * (SEEN_STEPS - 1), [line], *[[]] * SEEN_STEPS]


def test_nothing_is_told_of_nothing() -> None:
    assert ExchangeNote().after_step([], STEP) == []
    assert in_words([{**CUT, "measured_ms": None}], 0.0) == []


def test_layers_may_choose_apart_and_blocking_may_stay() -> None:
    (line,) = in_words([CUT, WHOLE, CUT], 0.1)
    assert line.startswith("exchange: 2 steps x 2 chunks in 2 layers, one go in 1 layers: 10 %")
    assert in_words([WHOLE], 0.0) == ["exchange: one go: 3 cuts were tried, none was faster"]
    assert in_words([{**WHOLE, "tried": 1}], 0.0) == ["exchange: one go: no cut is predicted to be faster"]
    (line,) = in_words([{**CUT, "over_plain": None}], 0.0)
    assert line.endswith("2.5 ms, predicted 2.0 ms, blocking 3.5 ms")
