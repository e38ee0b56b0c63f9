"""A trace as rows of slices to draw, and what each kind of transfer had hidden.

A trace (`trace.json`, Perfetto's format) has one process for each rank, a row for each of its lanes, and the
same once more as the simulator would have it, with process numbers from SIMULATED on. Of it a page shows
the first traced step of some ranks; all of it opens in ui.perfetto.dev.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from moeclipse.report.op_words import in_words, kind_of, lane_in_words

SIMULATED = 1_000_000
"""Process numbers of simulated ranks begin here."""
MOST_SLICES, MOST_RANKS = 12_000, 8
"""That a page holds: of measured and simulated ranks each half."""
COMPUTE, TRANSFER, WAIT, KERNEL = "compute", "transfer", "wait", "kernel"
KINDS = (COMPUTE, TRANSFER, WAIT, KERNEL)


def timeline_of(trace: dict[str, Any]) -> dict[str, Any]:
    """Rows with slices [start, length (both microseconds), index of a name, index of a kind]."""
    events = [event for event in trace["traceEvents"] if isinstance(event, dict)]
    other = trace.get("otherData")
    told: dict[str, Any] = other if isinstance(other, dict) else {}
    rows = row_names(events)
    names: dict[str, int] = {}
    found: dict[tuple[int, int], list[list[float]]] = defaultdict(list)
    left_out, begin = 0, min((start for start, *_ in slices(events)), default=0.0)
    room = {False: MOST_SLICES // 2, True: MOST_SLICES // 2}
    for start, length, event in sorted(slices(events), key=lambda one: one[0]):
        process, simulated = event["pid"], event["pid"] >= SIMULATED
        if not of_first_step(event) or process % SIMULATED >= MOST_RANKS or not room[simulated]:
            left_out += 1
            continue
        room[simulated] -= 1
        name = names.setdefault(in_words(str(event.get("name", "")))[:120], len(names))
        kind = KINDS.index(event["cat"]) if event.get("cat") in KINDS else 0
        found[process, event.get("tid", 0)].append([round(start - begin, 1), round(length, 1), name, kind])
    return {
        "rows": [
            {
                "rank": process % SIMULATED,
                "simulated": process >= SIMULATED,
                "lane": lane_in_words(lane),
                "slices": found[key],
            }
            for key in sorted(found)
            for process, lane in [(key[0], rows.get(key, str(key[1])))]
        ],
        "names": list(names),
        "kinds": KINDS,
        "steps": told.get("steps", []),
        "clock_error_ms": told.get("clock_error_ms"),
        "simulated": told.get("simulated", ""),
        "left_out": left_out + int(told.get("left_out") or 0),
    }


def slices(events: list[Any]) -> Iterator[tuple[float, float, dict[str, Any]]]:
    """(start, length, event) of what has both."""
    for event in events:
        if isinstance(event, dict) and event.get("ph") == "X" and isinstance(event.get("pid"), int):
            start, length = event.get("ts", math.nan), event.get("dur", math.nan)
            if is_finite(start) and is_finite(length) and length >= 0:
                yield float(start), float(length), event


def is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def of_first_step(event: dict[str, Any]) -> bool:
    return not arguments(event).get("turn")


def arguments(event: dict[str, Any]) -> dict[str, Any]:
    found = event.get("args")
    return found if isinstance(found, dict) else {}


def row_names(events: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event.get("tid", 0)): str(arguments(event).get("name", ""))
        for event in events
        if event.get("ph") == "M" and event.get("name") == "thread_name" and isinstance(event.get("pid"), int)
    }


def hidden_by_op(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each kind of transfer: how many, and how long they were hidden, exposed, and waited for others.

    Means over ranks and traced steps, in milliseconds of a step. A moment with two transfers under way counts
    for both: these numbers say which ops to look at, and do not add up to a step.
    """
    sums: dict[str, dict[str, float]] = {}
    ranks, turns = set(), set()
    for _, _, event in slices(trace["traceEvents"]):
        told = arguments(event)
        if event["pid"] >= SIMULATED:
            continue
        ranks.add(event["pid"])
        turns.add(told.get("turn", 0))
        if event.get("cat") != TRANSFER:
            continue
        one = sums.setdefault(kind_of(str(event.get("name", ""))), defaultdict(float))
        one["count"] += 1
        for part in ("hidden", "exposed", "late"):
            one[f"{part}_ms"] += 1e-3 * float(told.get(f"{part}_us") or 0.0)
    share = max(len(ranks) * len(turns), 1)
    rows = [{"op": op, **{key: value / share for key, value in one.items()}} for op, one in sums.items()]
    return sorted(rows, key=lambda row: -row["exposed_ms"])
