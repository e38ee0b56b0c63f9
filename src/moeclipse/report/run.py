"""A run as its directory tells it: one plain structure, whole or with gaps that are named.

    run = read_run(Path("runs/mine"))
    run.steps.column("loss")          # one number a step, NaN where a line has none
    run.gaps                          # what is missing, in words

Contract. Files are data of somebody else's making: lines that were cut, columns that an older version did not
write, a summary that never came. None of it raises; it is left out and said in `gaps`. Only a folder that
holds nothing of a run is refused. Memory grows neither with steps (`report/step_table`) nor with experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moeclipse.balance.load import Load
from moeclipse.core.errors import ConfigError
from moeclipse.core.outside import MOST_BYTES, lines_of, open_file, parse_json, read_table, read_text, told_of
from moeclipse.core.steps import WINDOW
from moeclipse.core.toml import parse_toml
from moeclipse.report.choices_form import fitting, misfits
from moeclipse.report.metric_lines import number
from moeclipse.report.step_table import MOST_NOTES, MetricsFile, StepTable

TRACE = "trace.json"
MOST_TRACE_BYTES = 200 << 20
WARMUP_STEPS = 3
"""First steps left out of means where the configuration does not say."""


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
        steps = self.steps.steps if len(self.steps.steps) else np.ones(len(step))
        late = np.cumsum(steps) > warm
        return late if late.any() else np.ones(len(step), dtype=bool)


def layers_with_experts(dense_first: int, dense: Collection[int], count: int) -> list[int]:
    """The numbers in the model of so many layers with experts, where the first and some others are dense."""
    last = dense_first + count + len(dense)
    return [layer for layer in range(dense_first, last) if layer not in dense][:count]


def read_run(directory: Path, metrics: MetricsFile | None = None) -> RunData:
    """`metrics`: what was read of its file before, to go on from."""
    if not directory.is_dir():
        raise ConfigError(f"{directory}: there is no such folder; give that of a run, like runs/NAME")
    gaps: list[str] = []
    metrics = metrics or MetricsFile(directory / "metrics.jsonl")
    read_metrics(metrics, gaps)
    steps = metrics.table()
    summary = read_json(directory / "summary.json", gaps)
    if not len(steps.step) and not summary and not (directory / "config.toml").is_file():
        raise ConfigError(f"{directory} holds no run: neither metrics.jsonl nor summary.json nor config.toml")
    if not summary:
        gaps.append("there is no summary yet: the run is under way, or it was cut")
    config = read_config(directory / "config.toml", gaps)
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
        notes=sorted(metrics.notes),
        incidents=incidents_of(directory, gaps),
        choices=choices_of(directory, gaps),
        load=load_of(directory / "load.npz", gaps),
        trace=trace_of(directory / TRACE, gaps),
        gaps=gaps,
    )


def read_metrics(metrics: MetricsFile, gaps: list[str]) -> None:
    try:
        metrics.read()
    except FileNotFoundError:
        gaps.append("there is no metrics.jsonl: no step was recorded")
    except OSError as error:
        gaps.append(told_of("metrics.jsonl", error))
    damaged = metrics.damaged + metrics.unfinished
    if damaged:
        gaps.append(f"{damaged} lines of metrics.jsonl were cut or damaged, and are left out")
    if metrics.num_notes > len(metrics.notes):
        gaps.append(f"of {metrics.num_notes} notes the first {len(metrics.notes)} are shown")


def incidents_of(directory: Path, gaps: list[str]) -> list[dict[str, Any]]:
    path, count, damaged = directory / "incidents.jsonl", 0, 0
    found: deque[dict[str, Any]] = deque(maxlen=MOST_NOTES)
    try:
        with open_file(path) as file:
            for line in lines_of(file):
                try:
                    record = None if line is None else parse_json(line, numbers=False)
                except ValueError:
                    record = None
                if isinstance(record, dict):
                    found.append(record)
                    count += 1
                else:
                    damaged += line is None or bool(line.strip())
    except FileNotFoundError:
        return []
    except OSError as error:
        gaps.append(told_of(path.name, error))
    if damaged:
        gaps.append(f"{damaged} lines of incidents.jsonl are damaged, and left out")
    if count > len(found):
        gaps.append(f"of {count} incidents the last {len(found)} are shown")
    return list(found)


def choices_of(directory: Path, gaps: list[str]) -> dict[str, Any]:
    """Those of all stages of a pipeline as one."""
    together: dict[str, Any] = {}
    for path in sorted(directory.glob("choices*.json")):
        told = read_json(path, gaps)
        found = fitting(told)
        gaps += [f"{name} in {path.name} has another form, and is left out" for name in misfits(told)]
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
        return dict(flat(parse_toml(read_text(path), path.name)))
    except (ValueError, OSError) as error:
        gaps.append(f"config.toml cannot be read: {error}")
        return {}


def flat(tree: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def read_json(path: Path, gaps: list[str], most: int = MOST_BYTES) -> dict[str, Any]:
    try:
        return read_table(path, most=most, numbers=False)
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        gaps.append(f"{path.name} cannot be read: {error}")
        return {}


def load_of(path: Path, gaps: list[str]) -> Load | None:
    if not path.is_file():
        gaps.append("there is no load.npz: the loads of experts are not known")
        return None
    try:
        return Load.read(path)
    except (ConfigError, OSError) as error:
        gaps.append(str(error))
        return None


def trace_of(path: Path, gaps: list[str]) -> dict[str, Any] | None:
    if not path.is_file():
        gaps.append("no step was traced: moeclipse train --trace 3 records steps 3 to 5 of all ranks")
        return None
    if path.stat().st_size > MOST_TRACE_BYTES:
        gaps.append(f"{path.name} is too large to be shown here; open it in ui.perfetto.dev")
        return None
    found = read_json(path, gaps, MOST_TRACE_BYTES)
    if not isinstance(found.get("traceEvents"), list):
        gaps.append(f"{path.name} holds no events")
        return None
    return found
