"""Predicted over published: the bars of docs/planning.md, and which rows may be called predictions."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

from moeclipse.cost.kernels import MEASURED_ON_HOPPER
from moeclipse.cost.layer_seconds import Software
from moeclipse.plan.published import ROWS

RATIOS = {row.name: row.predicted() / row.seconds for row in ROWS}
TABLE = (0.85, 0.95, 1.00, 1.03, 1.00, 0.83)
"""As docs/planning.md has them."""


def test_ratios_are_those_of_the_page() -> None:
    assert [round(ratio, 2) for ratio in RATIOS.values()] == list(TABLE)


def test_all_are_within_a_fifth_and_the_median_within_a_tenth() -> None:
    errors = [abs(ratio - 1) for ratio in RATIOS.values()]
    assert max(errors) < 0.2
    assert statistics.median(errors) < 0.1
    predictions = [abs(RATIOS[row.name] - 1) for row in ROWS if not row.fitted]
    assert len(predictions) == 4
    assert statistics.median(predictions) < 0.105


def test_layouts_of_one_model_stand_in_the_published_order() -> None:
    rows = [row for row in ROWS if row.name.startswith("Qwen3-235B")]
    published = sorted(rows, key=lambda row: row.seconds)
    assert sorted(rows, key=lambda row: row.predicted()) == published
    assert len(rows) == 3


def test_batches_are_the_published_ones() -> None:
    assert [row.batch for row in ROWS] == [15360, 8192, 2048, 2048, 2048, 512]
    assert [row.layout.num_ranks for row in ROWS] == [2048, 1024, 256, 256, 256, 16]


def test_how_much_hangs_on_each_constant() -> None:
    def ratios(change: Callable[[Software], Software]) -> list[float]:
        return [round(row.predicted(change) / row.seconds, 2) for row in ROWS]

    hidden = ratios(lambda software: replace(software, hides=0.9))
    assert (hidden[1], hidden[3]) == (0.85, 0.89)
    assert ratios(lambda software: replace(software, host_s=0.0))[4] == 0.6
    unslowed = ratios(lambda software: replace(software, slows=1 / MEASURED_ON_HOPPER.inside))
    assert unslowed == [0.79, 0.89, 0.95, 0.97, 1.0, 0.77]
