"""The form of `choices.json`: what a run writes there, whoever may have written the file at hand.

misfits(choices)    names of parts of another form, which a run cannot take over
fitting(choices)    the others, for who can do without some
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

MOST = 1 << 20
"""Ranks, and hosts."""


def misfits(choices: Mapping[str, Any]) -> list[str]:
    return [name for name, fits in PARTS.items() if name in choices and not fits(choices[name])]


def fitting(choices: Mapping[str, Any]) -> dict[str, Any]:
    bad = misfits(choices)
    return {name: value for name, value in choices.items() if name not in bad}


def _numbers(value: Any, least: int) -> bool:
    return isinstance(value, list) and all(type(one) is int and least <= one < MOST for one in value)


def _prices(value: Any) -> bool:
    """Numbers by name; None where one was not measured."""
    if not isinstance(value, dict):
        return value is None
    prices = [one for one in value.values() if one is not None]
    return all(isinstance(one, int | float) and math.isfinite(one) for one in prices)


def _layers(value: Any) -> bool:
    layers = value.values() if isinstance(value, dict) else [None]
    return all(isinstance(one, dict) and _prices(one.get("probe")) for one in layers)


PARTS: dict[str, Callable[[Any], bool]] = {
    "ranks": lambda value: _numbers(value, 1) and len(value) == 4,
    "hosts": lambda value: _numbers(value, 0),
    "layers": _layers,
    "placement": _prices,
    "search": _prices,
    "settled": lambda value: value is None or isinstance(value, dict),
}
