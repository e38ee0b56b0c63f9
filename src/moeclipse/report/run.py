"""A run as its directory tells it: one plain structure, whole or with gaps that are named.

    run = read_run(Path("runs/mine"))
    run.steps.column("loss")          # one number a step, NaN where a line has none
    run.gaps                          # what is missing, in words

Contract. Files are data of somebody else's making: lines that were cut, columns that an older version did not
write, a summary that never came. None of it raises; it is left out and said in `gaps`. Only a folder that
holds nothing of a run is refused. Memory grows with steps x (columns + ranks), not with experts.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moeclipse.balance.load import Load
from moeclipse.core.errors import ConfigError

TRACE = "trace.json"
MOST_NOTES = 500
"""Notes and incidents that are kept; how many more there were is said."""
MOST_TRACE_BYTES = 200 << 20
WARMUP_STEPS = 3
"""First steps left out of means where the configuration does not say."""
WINDOW = re.compile(r"steps (\d+) to (\d+)")
"""Of a summary: the steps that its means are of."""


@dataclass(frozen=True, kw_only=True)
class StepTable:
    """Numbers of steps, in the order of steps."""

    step: np.ndarray
    columns: dict[str, np.ndarray]
    ranks: dict[str, np.ndarray] = field(default_factory=dict)
    """By name: [steps in which ranks were told apart, P]."""
    rank_step: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def column(self, name: str) -> np.ndarray:
        found = self.columns.get(name)
        return np.full(len(self.step), math.nan) if found is None else found

    def has(self, name: str) -> bool:
        return bool(np.isfinite(self.column(name)).any())


@dataclass(frozen=True, kw_only=True)
class RunData:
    name: str
    directory: Path
    steps: StepTable
    summary: dict[str, Any]
    config: dict[str, Any]
    """Dotted key -> value."""
    notes: list[tuple[int, str]]
    incidents: list[dict[str, Any]]
    choices: dict[str, Any]
    """Of all stages: `layers` by name, and whatever else the files hold."""
    load: Load | None
    trace: dict[str, Any] | None
    gaps: list[str]
    kept: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What was computed from all this once, and takes a while (`report/skew`)."""

    @property
    def num_ranks(self) -> int:
        table = self.steps.ranks.get("step_ms")
        return 1 if table is None else table.shape[1]

    def expert_layers(self, count: int) -> list[int]:
        """The numbers of so many layers with experts, as the model counts them."""
        first, dense = self.config.get("model.num_dense_layers"), self.config.get("model.dense_layers")
        return layers_with_experts(int(number(first, 0)), dense if isinstance(dense, list) else [], count)

    @property
    def window(self) -> np.ndarray:
        """Which steps count for means: those of the summary, else those after warm-up."""
        step, found = self.steps.step, WINDOW.fullmatch(str(self.summary.get("window")))
        if found is not None and len(step):
            first, last = map(int, found.groups())
            if first <= last == step[-1]:  # a run that goes on has the summary of an earlier start
                return step >= first
        return self.warm

    @property
    def warm(self) -> np.ndarray:
        """Steps after warm-up, of all starts; all where there are no others."""
        step = self.steps.step
        warm = number(self.config.get("metrics.warmup_steps"), WARMUP_STEPS)
        late = np.arange(len(step)) >= warm
        return late if late.any() else np.ones(len(step), dtype=bool)


def layers_with_experts(dense_first: int, dense: Collection[int], count: int) -> list[int]:
    """The numbers in the model of so many layers with experts, where the first and some others are dense."""
    last = dense_first + count + len(dense)
    return [layer for layer in range(dense_first, last) if layer not in dense][:count]


def number(value: Any, otherwise: float) -> float:
    """A number of a file, or another one in its place; true and false count."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else otherwise


def read_run(directory: Path) -> RunData:
    if not directory.is_dir():
        raise ConfigError(f"{directory}: there is no such folder; give that of a run, like runs/NAME")
    gaps: list[str] = []
    records = list(records_of(directory / "metrics.jsonl", gaps))
    summary = read_json(directory / "summary.json", gaps)
    if not records and not summary and not (directory / "config.toml").is_file():
        raise ConfigError(f"{directory} holds no run: neither metrics.jsonl nor summary.json nor config.toml")
    if not summary:
        gaps.append("there is no summary yet: the run is under way, or it was cut")
    config = read_config(directory / "config.toml", gaps)
    steps = table_of(records)
    if len(steps.step) and not steps.ranks:
        gaps.append("no per-rank times: this version of the run did not write them")
    if len(steps.step) and not steps.has("eval_loss"):
        gaps.append("nothing was validated: set eval.share or eval.files")
    return RunData(
        name=str(config.get("run.name") or directory.resolve().name),
        directory=directory,
        steps=steps,
        summary=summary,
        config=config,
        notes=notes_of(records, gaps),
        incidents=incidents_of(directory, gaps),
        choices=choices_of(directory, gaps),
        load=load_of(directory / "load.npz", gaps),
        trace=trace_of(directory / TRACE, gaps),
        gaps=gaps,
    )


def records_of(path: Path, gaps: list[str]) -> Iterator[dict[str, Any]]:
    """Lines with a step, each as a record without the loads of experts: those are in `load.npz`."""
    if not path.is_file():
        gaps.append("there is no metrics.jsonl: no step was recorded")
        return
    cut = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
                record["step"] = int(record["step"])
                record.pop("load", None)
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError, AttributeError):
                cut += bool(line.strip())
                continue
            yield record
    if cut:
        gaps.append(f"{cut} lines of metrics.jsonl were cut or damaged, and are left out")


def table_of(records: list[dict[str, Any]]) -> StepTable:
    """The last word on each step counts: a step may have been run again."""
    by_step = {record["step"]: record for record in records}
    ordered = [by_step[step] for step in sorted(by_step)]
    names = {key for record in ordered for key, value in record.items() if is_number(value)} - {"step"}
    columns = {
        name: np.array([number(record.get(name), math.nan) for record in ordered]) for name in sorted(names)
    }
    told = [record for record in ordered if isinstance(record.get("ranks"), dict)]
    ranks: dict[str, np.ndarray] = {}
    width = max((len(one["ranks"].get("step_ms") or ()) for one in told), default=0)
    told = [one for one in told if len(one["ranks"].get("step_ms") or ()) == width]
    for name in sorted({key for one in told for key in one["ranks"]}):
        rows = [one["ranks"].get(name) for one in told]
        whole = [row if isinstance(row, list) and len(row) == width else [math.nan] * width for row in rows]
        ranks[name] = np.array([[number(value, math.nan) for value in row] for row in whole])
    return StepTable(
        step=np.array([record["step"] for record in ordered], dtype=np.int64),
        columns=columns,
        ranks=ranks if width else {},
        rank_step=np.array([record["step"] for record in told], dtype=np.int64),
    )


def is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def notes_of(records: list[dict[str, Any]], gaps: list[str]) -> list[tuple[int, str]]:
    found = [
        (record["step"], str(note))
        for record in records
        if isinstance(record.get("notes"), list)
        for note in record["notes"]
    ]
    found += [(record["step"], "the step was skipped") for record in records if record.get("skipped")]
    if len(found) > MOST_NOTES:
        gaps.append(f"of {len(found)} notes the first {MOST_NOTES} are shown")
    return sorted(found)[:MOST_NOTES]


def incidents_of(directory: Path, gaps: list[str]) -> list[dict[str, Any]]:
    path = directory / "incidents.jsonl"
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            found.append(record)
        elif line.strip():
            gaps.append("a line of incidents.jsonl is damaged, and left out")
    if len(found) > MOST_NOTES:
        gaps.append(f"of {len(found)} incidents the last {MOST_NOTES} are shown")
    return found[-MOST_NOTES:]


def choices_of(directory: Path, gaps: list[str]) -> dict[str, Any]:
    """Those of all stages of a pipeline as one."""
    together: dict[str, Any] = {}
    for path in sorted(directory.glob("choices*.json")):
        found = read_json(path, gaps)
        layers = found.pop("layers", None)
        known = together.setdefault("layers", {})
        known |= layers if isinstance(layers, dict) else {}
        for key, value in found.items():
            together.setdefault(key, value)
    return together


def read_config(path: Path, gaps: list[str]) -> dict[str, Any]:
    if not path.is_file():
        gaps.append("there is no config.toml: settings are not known")
        return {}
    try:
        return dict(flat(tomllib.loads(path.read_text(encoding="utf-8"))))
    except (ValueError, OSError, RecursionError) as error:
        gaps.append(f"config.toml cannot be read: {error}")
        return {}


def flat(tree: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def read_json(path: Path, gaps: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, OSError, RecursionError) as error:
        gaps.append(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(found, dict):
        gaps.append(f"{path.name} holds no table")
        return {}
    return found


def load_of(path: Path, gaps: list[str]) -> Load | None:
    if not path.is_file():
        gaps.append("there is no load.npz: the loads of experts are not known")
        return None
    try:
        return Load.read(path)
    except ConfigError as error:
        gaps.append(str(error))
        return None


def trace_of(path: Path, gaps: list[str]) -> dict[str, Any] | None:
    if not path.is_file():
        gaps.append("no step was traced: moeclipse train --trace 3 records steps 3 to 5 of all ranks")
        return None
    if path.stat().st_size > MOST_TRACE_BYTES:
        gaps.append(f"{path.name} is too large to be shown here; open it in ui.perfetto.dev")
        return None
    found = read_json(path, gaps)
    if not isinstance(found.get("traceEvents"), list):
        gaps.append(f"{path.name} holds no events")
        return None
    return found
