"""Fewer points, the same picture."""

from __future__ import annotations

import base64
import json
import math

import numpy as np
import pytest

from moeclipse.report.thin import bin_starts, curve, heat_bytes, mean_of_bins, safe


def test_bins_cover_all_and_are_even() -> None:
    starts = bin_starts(1003, 100)
    widths = np.diff([*starts, 1003])
    assert len(starts) == 100
    assert set(widths.tolist()) <= {10, 11}
    assert bin_starts(5, 100).tolist() == [0, 1, 2, 3, 4]
    assert len(bin_starts(0, 100)) == 0


def test_no_spike_is_lost() -> None:
    values = np.zeros(1000)
    values[617] = 50.0
    values[3] = math.nan
    values[900:950] = math.nan
    found = curve(values, 50)
    assert max(one for one in found["high"] if one is not None) == 50.0
    assert found["mean"][0] == 0.0
    assert found["mean"][45] is None
    assert len(found["mean"]) == 50
    assert found["mean"][30] == pytest.approx(2.5)


def test_few_points_stay_as_they_are() -> None:
    assert curve(np.array([1.0, 2.0, math.inf]), 50) == {"mean": [1.0, 2.0, None]}
    assert curve(np.zeros(0), 50) == {"mean": []}


def test_rows_are_averaged() -> None:
    table = np.arange(12.0).reshape(6, 2)
    assert mean_of_bins(table, 3).tolist() == [[1.0, 2.0], [5.0, 6.0], [9.0, 10.0]]
    assert mean_of_bins(table, 9).tolist() == table.tolist()


def test_heat_is_relative_to_the_mean() -> None:
    cells = base64.b64decode(heat_bytes(np.array([[10.0, 10.0], [0.0, 20.0], [0.0, 0.0]])))
    assert list(cells) == [128, 128, 0, 160, 0, 0]
    far = np.array([[1.0, *[0.0] * 999]])
    assert max(base64.b64decode(heat_bytes(far))) == 255


def test_what_json_cannot_say_is_left_out() -> None:
    told = safe({"a": math.nan, 3: [math.inf, 1, "x", None, True], "p": object})
    assert json.dumps(told, allow_nan=False)
    assert (told["a"], told["3"]) == (None, [None, 1, "x", None, True])
