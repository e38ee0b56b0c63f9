"""Planners side by side: who plans which layers, how long it takes, and what its plans are worth.

Planners take milliseconds for a layer of eight experts, and seconds for one of 256. A comparison is wanted
soon: where all layers would take longer, those whose experts differ most in load stand for the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.progress import Progress

from moeclipse.balance.objective import PlacementCosts, Score, score
from moeclipse.balance.placement import Placement
from moeclipse.balance.planner import PlanConfig, plan
from moeclipse.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LayerLoads:
    """One layer's loads: what planners may see, and what they are measured on."""

    number: int
    seen_PE: np.ndarray
    next_PE: np.ndarray
    current: Placement


@dataclass(frozen=True, kw_only=True)
class Verdict:
    name: str
    placements: list[Placement]
    scores: list[Score]
    milliseconds: float


def judge(
    name: str,
    placements: list[Placement],
    layers: list[LayerLoads],
    costs: PlacementCosts,
    node_P: tuple[int, ...],
    milliseconds: float,
) -> Verdict:
    scores = [
        score(
            placement,
            layer.next_PE,
            costs,
            current=layer.current,
            node_P=node_P,
            expected_E=layer.seen_PE.sum(0),
        )
        for placement, layer in zip(placements, layers, strict=True)
    ]
    return Verdict(name=name, placements=placements, scores=scores, milliseconds=milliseconds)


def planned(
    console: Console,
    name: str,
    wanted: PlanConfig,
    slots: tuple[int, ...],
    asked: bool,
    layers: list[LayerLoads],
    costs: PlacementCosts,
    node_P: tuple[int, ...],
) -> Verdict | None:
    """None when a planner that was not asked for cannot run here."""
    how = PlanConfig(planner=name, max_moved=wanted.max_moved, time_limit=wanted.time_limit)
    try:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            begin = time.perf_counter()
            placements = [
                plan(how, layer.seen_PE, slots, layer.current, costs, node_P)
                for layer in bar.track(layers, description=f"planning: {name}")
            ]
            spent = 1e3 * (time.perf_counter() - begin) / len(layers)
    except ConfigError as error:
        if asked or name != "exact":
            raise
        console.print(f"exact left out: {error}", style="dim")
        return None
    return judge(name, placements, layers, costs, node_P, spent)


def fitting(
    layers: list[LayerLoads], seconds: float, take: Callable[[list[LayerLoads]], object]
) -> list[LayerLoads]:
    """The layers that can be planned in so many seconds, by what the worst of them takes; 0: all of them."""
    worst = sorted(layers, key=lambda layer: -float(layer.seen_PE.sum(0).max() / max(layer.seen_PE.sum(), 1)))
    if not seconds or len(layers) == 1:
        return layers
    begin = time.perf_counter()
    take(worst[:1])
    count = int(seconds / max(time.perf_counter() - begin, 1e-9))
    return sorted(worst[: max(count, 1)], key=lambda layer: layer.number)
