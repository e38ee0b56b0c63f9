"""Costs in a TOML file.

    name = "my cluster"
    launch = 5e-6                 # host seconds per op
    wire = 1e-4                   # seconds per transfer between stages
    inline_compute = false
    rank_speed = [1.0, 1.0, 0.9, 1.0]
    [seconds]                     # F, B, I, W, PAIR for whole actions, or ATTN_F, DISPATCH_F, ... per layer
    F = 1.0
    [fixed]                       # added per op, however small its chunk
    DISPATCH_F = 2e-5
    [contention]                  # rate of the first lane while the second is busy
    "compute/a2a" = 0.85

Instead of [seconds], `device`, `link` and `num_ranks` (and a table [layer]) compute them from shapes.
"""

from __future__ import annotations

from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from moeclipse.core.errors import ConfigError
from moeclipse.core.toml import read_toml
from moeclipse.cost.hardware import device, link
from moeclipse.cost.model import PRESETS, Costs, LayerWork, layer_costs

TABLE_KEYS = (
    "name",
    "launch",
    "wire",
    "inline_compute",
    "rank_speed",
    "stage_scale",
    "seconds",
    "fixed",
    "contention",
)
MOST = 1e15
"""No cost is larger; sums of many stay finite."""
SHAPE_KEYS = ("device", "link", "num_ranks", "comm_processors", "layer")


def load_costs(source: str) -> Costs:
    """A preset by name, or a TOML file by path."""
    if source in PRESETS:
        return PRESETS[source]
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"costs {source!r} are neither a file nor one of {', '.join(PRESETS)}")
    return costs_from(read_toml(path), source)


def costs_from(data: dict[str, Any], source: str = "costs") -> Costs:
    problems = list(_unknown(data, (*TABLE_KEYS, *SHAPE_KEYS), source))
    shaped = "device" in data or "link" in data
    if "seconds" not in data and not shaped:
        problems.append(f"{source} needs a table [seconds], or device and link to compute them")
    if shaped and not {"device", "link", "num_ranks"} <= set(data):
        problems.append(f"{source}: device, link and num_ranks go together")
    problems += _not_numbers(data, source)
    layer = data.get("layer", {})
    problems += _unknown(layer, [f.name for f in fields(LayerWork)], f"{source}: [layer]")
    pairs = {}
    for key, rate in data.get("contention", {}).items():
        if key.count("/") != 1:
            problems.append(f'{source}: contention key {key!r} must look like "compute/a2a"')
        else:
            slowed, busy = key.split("/")
            pairs[slowed, busy] = rate
    if problems:
        raise ConfigError(problems)
    plain = ("name", "launch", "wire", "inline_compute")
    given: dict[str, Any] = {key: data[key] for key in plain if key in data}
    given |= {key: tuple(data[key]) for key in ("rank_speed", "stage_scale") if key in data}
    if pairs:
        given["contention"] = pairs
    if not shaped:
        return Costs(seconds=data["seconds"], fixed=data.get("fixed", {}), **{"name": source, **given})
    costs = layer_costs(
        LayerWork(**layer),
        device(data["device"]),
        link(data["link"]),
        data["num_ranks"],
        comm_processors=data.get("comm_processors", 0),
    )
    seconds = {**costs.seconds, **data.get("seconds", {})}
    return replace(costs, seconds=seconds, fixed={**costs.fixed, **data.get("fixed", {})}, **given)


def _unknown(table: dict[str, Any], known: Any, where: str) -> list[str]:
    found = []
    for key in table:
        if key not in known:
            close = get_close_matches(key, known, n=1)
            found.append(f"{where}: unknown key {key!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    return found


def _not_numbers(data: dict[str, Any], source: str) -> list[str]:
    found = []
    for table in ("seconds", "fixed", "contention", "layer"):
        entries = data.get(table, {})
        if not isinstance(entries, dict):
            found.append(f"{source}: {table} must be a table")
            continue
        for key, value in entries.items():
            whole = table == "layer" and key != "row_bytes_per_value"
            if not _is_number(value, whole):
                kind = "whole number" if whole else "number"
                found.append(f"{source}: {table}.{key} ({value!r}) must be a {kind}, finite and not negative")
    for key in ("rank_speed", "stage_scale"):
        values = data.get(key, [])
        if not isinstance(values, list) or not all(_is_number(value) for value in values):
            found.append(f"{source}: {key} must be a list of numbers")
    for key in ("launch", "wire"):
        if not _is_number(data.get(key, 0)):
            found.append(f"{source}: {key} ({data[key]!r}) must be a number, finite and not negative")
    for key, least in (("num_ranks", 1), ("comm_processors", 0)):
        if not _is_number(data.get(key, 1), whole=True) or data.get(key, 1) < least:
            found.append(f"{source}: {key} ({data[key]!r}) must be a whole number, at least {least}")
    found += [
        f"{source}: {key} ({data[key]!r}) must be a name"
        for key in ("name", "device", "link")
        if not isinstance(data.get(key, ""), str)
    ]
    if not isinstance(data.get("inline_compute", False), bool):
        found.append(f"{source}: inline_compute ({data['inline_compute']!r}) must be true or false")
    return found


def _is_number(value: Any, whole: bool = False) -> bool:
    """A cost that can be added up; NaN compares as false, so it is none."""
    kind = int if whole else int | float
    return not isinstance(value, bool) and isinstance(value, kind) and 0 <= value < MOST
