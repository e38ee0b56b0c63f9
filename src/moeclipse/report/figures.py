"""One run or several as what a page draws: thinned, bounded, plain JSON.

    figures([run])          # {"runs": [...], "equal": {...}, ...}

Contract. Its size does not grow with steps, and with layers x experts only by MOST_MOMENTS bytes each. All
texts are data: whoever draws them must not read them as markup.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moeclipse.core.steps import nth
from moeclipse.report.advice import advise_run
from moeclipse.report.equal import equal, positions
from moeclipse.report.measures import (
    ABOUT,
    LESS_IS_BETTER,
    MORE_IS_BETTER,
    PARTS,
    SHARES,
    in_words,
    measures_of,
    over,
)
from moeclipse.report.run import RunData
from moeclipse.report.skew import skew_of
from moeclipse.report.thin import bin_starts, curve, heat_bytes, mean_of_bins, numbers, safe
from moeclipse.report.timeline import hidden_by_op, timeline_of

MOST_POINTS, MOST_MOMENTS, MOST_RANKS = 600, 96, 256
"""Of a curve, of a heat map over time, and ranks that are shown one by one."""
CURVES = (
    *("loss", "lr", "grad_norm", "tokens_per_s", "mfu", "balance", "step_ms", "mean_experts"),
    *(f"{part}_ms" for part in PARTS),
)
MOST_TEXT = 2000
UNITS = {
    **dict.fromkeys(("row_forward", "row_backward", "kernel", "latency"), "s"),
    **dict.fromkeys(("bandwidth", "link"), "bytes/s"),
    **dict.fromkeys(("row_bytes", "parameter_bytes", "gradient_bytes"), "bytes"),
}
"""Of what ranks measured for planners (`moe/tune/probe`)."""


def figures(runs: Sequence[RunData]) -> dict[str, Any]:
    measured = [measures_of(run) for run in runs]
    return safe(
        {
            "runs": [
                run_figures(run, found, mark)
                for run, found, mark in zip(runs, measured, marks(len(runs)), strict=True)
            ],
            "equal": equal(runs),
            "about": ABOUT,
            "shares": list(SHARES),
            "less_is_better": list(LESS_IS_BETTER),
            "more_is_better": list(MORE_IS_BETTER),
            "settings": settings(runs),
        }
    )


def marks(count: int) -> list[str]:
    """A, B, ..., Z, A2, B2, ...: what a page calls each run."""
    rounds, letters = divmod(np.arange(count), 26)
    return [
        f"{chr(65 + letter)}{turn + 1 if turn else ''}" for turn, letter in zip(rounds, letters, strict=True)
    ]


def run_figures(run: RunData, measures: dict[str, float | None], mark: str) -> dict[str, Any]:
    parts: dict[str, tuple[Callable[[], Any], Any]] = {
        "window": (lambda: window_of(run), ""),
        "advice": (lambda: advice(run, measures), []),
        "curves": (lambda: curves(run), {"step": []}),
        "eval": (lambda: held_out(run), {"step": [], "loss": []}),
        "ranks": (lambda: rank_parts(run), []),
        "rows": (lambda: rank_rows(run), None),
        "loads": (lambda: loads(run), []),
        "timeline": (lambda: None if run.trace is None else timeline_of(run.trace), None),
        "hidden_by_op": (lambda: [] if run.trace is None else hidden_by_op(run.trace), []),
        "events": (lambda: events(run), []),
        "skew": (lambda: [] if (skew := skew_of(run)) is None else skew.in_words(), []),
        "choices": (lambda: choices(run), []),
    }
    return {
        "mark": mark,
        "name": run.name,
        "directory": str(run.directory),
        "done": int(run.steps.step[-1]) + 1 if len(run.steps.step) else 0,
        "wanted": run.config.get("run.steps"),
        "num_ranks": run.num_ranks,
        "measures": measures,
        "in_words": {name: in_words(name, value) for name, value in measures.items()},
        "unigram_entropy": run.summary.get("unigram_entropy"),
        **{name: shown(name, make, run.gaps, nothing) for name, (make, nothing) in parts.items()},
        "placement": run.summary.get("placement"),
        "memory": run.summary.get("memory"),
        "sample": run.summary.get("sample"),
        "gaps": run.gaps,
    }


def shown(name: str, make: Callable[[], Any], gaps: list[str], nothing: Any) -> Any:
    """A part of the page; where files hold what no run writes, the part is left out and named."""
    try:
        return make()
    except Exception as error:  # values of somebody else's making: whatever they break, the rest is shown
        gaps.append(f"{name} cannot be shown: the files hold what no run writes ({error!r:.200})")
        return nothing


def advice(run: RunData, measures: dict[str, float | None]) -> list[dict[str, Any]]:
    step_ms = measures["step_ms"]
    return [
        {"setting": one.setting, "why": one.why, "gain_ms": one.gain_ms, "at_most": one.at_most}
        | {"share": one.gain_ms / step_ms if one.gain_ms is not None and step_ms else None}
        for one in advise_run(run, measures)
    ]


def window_of(run: RunData) -> str:
    """The steps that means are of, as a summary says it."""
    steps = run.steps.step[run.window]
    return f"steps {nth(steps[0])} to {nth(steps[-1])}" if len(steps) else ""


def curves(run: RunData) -> dict[str, Any]:
    """Every curve over the same bins; `step` is the first of each bin, counted from 1 as people do."""
    starts = bin_starts(len(run.steps.step), MOST_POINTS)
    found: dict[str, Any] = {"step": (run.steps.step[starts] + 1).tolist()}
    found |= {name: numbers(values[starts]) for name, values in positions(run).items()}
    for name in CURVES:
        if run.steps.has(name):
            several = run.steps.num_steps > len(run.steps.step)
            ends = [part[name] if several else None for part in (run.steps.lowest, run.steps.highest)]
            found[name] = curve(run.steps.column(name), MOST_POINTS, *ends)
    return found


def held_out(run: RunData) -> dict[str, Any]:
    loss = run.steps.column("eval_loss")
    at = np.flatnonzero(np.isfinite(loss))
    at = at[bin_starts(len(at), MOST_POINTS)]
    places = {name: numbers(values[at]) for name, values in positions(run).items()}
    return {"step": (run.steps.step[at] + 1).tolist(), **places, "loss": numbers(loss[at])}


def rank_parts(run: RunData) -> list[dict[str, float | None]]:
    """The mean step of each rank, part by part, after warm-up."""
    tables = {part: run.steps.ranks.get(f"{part}_ms") for part in PARTS}
    late = np.isin(run.steps.rank_step, run.steps.step[run.window])
    found = []
    for rank in range(min(run.num_ranks if run.steps.ranks else 0, MOST_RANKS)):
        column = {part: table[late, rank] for part, table in tables.items() if table is not None}
        found.append({part: over(np.mean, values) for part, values in column.items()})
    return found


def rank_rows(run: RunData) -> dict[str, Any] | None:
    """Rows that each rank's experts computed, over time, relative to the mean."""
    rows = run.steps.ranks.get("rows")
    if rows is None or rows.shape[1] < 2:
        return None
    thinned = mean_of_bins(rows[:, :MOST_RANKS], MOST_MOMENTS)
    starts = bin_starts(len(rows), MOST_MOMENTS)
    return {
        "steps": (run.steps.rank_step[starts] + 1).tolist(),
        "count": thinned.shape[1],
        "cells": heat_bytes(thinned),
    }


def loads(run: RunData) -> dict[str, Any] | None:
    """Of each layer: experts over time; and all layers in the mean, by the rank that rows came from, too."""
    load = run.load
    if load is None or not load.num_layers:
        return None
    rows_NLE = mean_of_bins(load.rows_NLE, MOST_MOMENTS) if len(load.rows_NLE) else load.rows_NLE
    starts = bin_starts(len(load.steps_N), MOST_MOMENTS)
    return {
        "steps": (load.steps_N[starts] + 1).tolist(),
        "layers": run.expert_layers(load.num_layers),
        "experts": load.num_experts,
        "sources": load.average_LPE.shape[1],
        "over_time": [heat_bytes(rows_NLE[:, layer]) for layer in range(load.num_layers)]
        if len(load.rows_NLE)
        else [],
        "average": heat_bytes(load.average_LPE.sum(1)),
        "by_source": heat_bytes(load.average_LPE.mean(0)),
    }


def events(run: RunData) -> list[dict[str, Any]]:
    """Notes, moves and incidents in the order of steps."""
    found = [
        {"step": nth(step), "kind": kind_of_note(text), "what": text[:MOST_TEXT]} for step, text in run.notes
    ]
    for one in run.incidents:
        step = one.get("step")
        at = nth(step) if isinstance(step, int) else None
        text, where = str(one.get("what", "")), one.get("rank")
        named = "" if where is None else f"rank {where}: "
        found.append(
            {"step": at, "kind": str(one.get("kind", "incident")), "what": f"{named}{text}"[:MOST_TEXT]}
        )
    return sorted(found, key=lambda one: -1 if one["step"] is None else one["step"])


def kind_of_note(text: str) -> str:
    if "skipped" in text:
        return "skipped"
    return "placement" if "plan" in text or "moved" in text else "note"


def choices(run: RunData) -> list[dict[str, Any]]:
    """What was chosen by the clock: of each layer how rows are cut, with what was predicted and measured."""
    found = []
    exchange = run.summary.get("exchange")
    known = [one for one in exchange if isinstance(one, dict)] if isinstance(exchange, list) else []
    for layer, one in zip(run.expert_layers(len(known)), known, strict=True):
        cut = " x ".join(counted(one.get(what), what) for what in ("steps", "chunks"))
        found.append({"what": f"exchange of layer {layer}", "chosen": cut, **one})
    settled = run.choices.get("settled")
    for key, value in settled.items() if isinstance(settled, dict) else ():
        found.append({"what": key, "chosen": str(value)[:MOST_TEXT], "rule": "at start"})
    told = run.choices.get("experts")
    for line in told if isinstance(told, list) else ():
        chosen = str(line).removeprefix("experts: ")[:MOST_TEXT]
        found.append({"what": "experts", "chosen": chosen, "rule": "settings"})
    for key, value in run.choices.items():
        if key not in ("layers", "ranks", "hosts", "settled", "experts") and value is not None:
            found.append({"what": key, "chosen": readable_choice(value)[:MOST_TEXT]})
    return found


def readable_choice(value: Any) -> str:
    """Numbers by name, with their units, as they are measured; anything else as it is written."""
    if not isinstance(value, dict) or not all(type(one) in (int, float) for one in value.values()):
        return json.dumps(value)
    found = []
    for name, one in value.items():
        stem, _, end = name.rpartition("_")
        unit = UNITS.get(name, end if end in ("s", "ms") else "")
        stem = stem if end in ("s", "ms", "bytes") and stem else name
        found.append(f"{stem.replace('_', ' ')} {one:.3g}{unit and ' '}{unit}")
    return ", ".join(found)


def counted(number: Any, what: str) -> str:
    return f"{number} {what.removesuffix('s') if number == 1 else what}"


def settings(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Every key with its value in each run, and whether they differ."""
    keys = sorted({key for run in runs for key in run.config})
    rows = []
    for key in keys:
        values = [
            json.dumps(run.config[key], default=str)[:MOST_TEXT] if key in run.config else "" for run in runs
        ]
        rows.append({"key": key, "values": values, "differs": len(set(values)) > 1 and key != "run.name"})
    return rows
