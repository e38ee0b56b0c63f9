"""choices.json as others may have written it: parts of another form are named, and left out."""

from __future__ import annotations

from typing import Any

import pytest
from made_runs import CHOICES, PROBE

from moeclipse.report.choices_form import fitting, misfits


def test_what_runs_write_fits() -> None:
    whole: dict[str, Any] = {
        **CHOICES,
        "layers": {"0": {"probe": PROBE, "chosen": None, "tried": []}, "1": {"probe": None}},
        "settled": {"pipeline.overlap": "off"},
        "search": {"seconds": 1.5},
        "experts": ["in kernels"],
        "of another version": [1],
    }
    assert misfits(whole) == []
    assert fitting(whole) == whole
    assert misfits({"placement": None, "settled": None, "search": None}) == misfits({}) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            ("ranks", value)
            for value in ([1, 2, 1], [1, 2, 1, 0], [1, 2, 1, 1.0], ["1"] * 4, [1, 2, 1, 10**12], 4)
        ],
        *[("hosts", value) for value in (5, "ab", [-1], [10**12], [True], None)],
        *[("layers", value) for value in ([], {"0": None}, {"0": {"probe": {"link": "x"}}})],
        *[("placement", value) for value in ([], {"link": float("nan")}, {"link": "1"}, {"link": []})],
        ("search", {"seconds": None, "more": {}}),
        ("settled", [1]),
    ],
)
def test_what_has_another_form_is_left_out(name: str, value: Any) -> None:
    choices = CHOICES | {name: value}
    assert misfits(choices) == [name]
    assert fitting(choices) == {key: one for key, one in choices.items() if key != name}
