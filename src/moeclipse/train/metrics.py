"""What a run writes down: one line a step, a summary at the end.

Times come from our own annotations, split by `report/intervals` on each rank. A transfer counts from the
moment its last member launched it; who launched when is exchanged after the step, outside its window. Rank 0
writes; every rank's times are in each line.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from moeclipse.comm.flight.exchange import gather
from moeclipse.comm.flight.record import StepStamps
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.report.intervals import StepSplit, TransferInterval, split_step
from moeclipse.train.config import NO_TENSORBOARD

TIMES = ("step", "compute", "exposed", "straggle", "idle", "comm")


def split_of(stamps: StepStamps, mesh: Mesh, clock_s: float = 0.0) -> StepSplit:
    """This rank's step, after asking its peers when they launched each transfer.

    Hosts have clocks of their own: `clock_s` leads from this rank's to the one that all of them speak in.
    """
    transfers = transfers_of(stamps, mesh, clock_s)
    return split_step(stamps.window, compute=stamps.compute, waits=stamps.waits, transfers=transfers)


def transfers_of(stamps: StepStamps, mesh: Mesh, clock_s: float = 0.0) -> list[TransferInterval]:
    """All transfers of a step, with the moment when the last member of each launched it. Collective."""
    launches: dict[str, list[float]] = defaultdict(list)
    for group_name, _, launched, _ in stamps.transfers:
        launches[group_name].append(launched + clock_s)
    last: dict[str, list[float]] = {}
    for group in mesh.groups:
        mine = launches.get(group.name)
        if mine:  # all members launched the same transfers in the same order
            tensor = torch.tensor(mine, dtype=torch.float64, device=mesh.device)
            everyone = gather(mesh.grads, group, tensor, "exchange of launch times").get()
            last[group.name] = everyone.max(0).values.tolist()
    counted: dict[str, int] = defaultdict(int)
    transfers = []
    for group_name, label, launched, done in stamps.transfers:
        if group_name not in last:  # between stages: who waits there waits for the other stage's compute
            transfers.append(TransferInterval(label=label, launched=launched, last_launched=done, done=done))
            continue
        latest = last[group_name][counted[group_name]] - clock_s
        counted[group_name] += 1
        transfers.append(TransferInterval(label=label, launched=launched, last_launched=latest, done=done))
    return transfers


def gather_splits(split: StepSplit, mesh: Mesh) -> dict[str, list[float]]:
    """Milliseconds of every rank: {"compute_ms": [rank 0, rank 1, ...], ...}."""
    mine = torch.tensor([getattr(split, name) for name in TIMES], dtype=torch.float64, device=mesh.device)
    table = gather(mesh.grads, mesh.world, mine, "exchange of step times").get().mul(1e3).tolist()
    return {f"{name}_ms": [row[i] for row in table] for i, name in enumerate(TIMES)}


def mean_times(per_rank: dict[str, list[float]]) -> dict[str, float]:
    """Over ranks, with hidden time and its share of communication."""
    means = {name: sum(values) / len(values) for name, values in per_rank.items()}
    hidden = means["comm_ms"] - means["exposed_ms"]
    share = hidden / means["comm_ms"] if means["comm_ms"] > 0 else 0.0
    return means | {"hidden_ms": hidden, "hidden_fraction": share}


class Metrics:
    """Files of a run directory; on ranks other than 0 nothing is written."""

    def __init__(self, directory: Path, *, writes: bool, warmup_steps: int, tensorboard: bool) -> None:
        self.directory, self.writes, self.warmup_steps = directory, writes, warmup_steps
        self.records: list[dict[str, Any]] = []
        self._board = open_tensorboard(directory) if tensorboard and writes else None

    @property
    def path(self) -> Path:
        return self.directory / "metrics.jsonl"

    def continue_from(self, step: int) -> None:
        """Drop lines of steps that will be run again."""
        if not self.writes or not self.path.exists():
            return
        lines = self.path.read_text().splitlines()
        kept = [line for line in lines if is_before(line, step)]
        self.path.write_text("".join(f"{line}\n" for line in kept))

    def add(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        if not self.writes:
            return
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if self._board is not None:
            for key, value in record.items():
                if isinstance(value, int | float) and key != "step":
                    self._board.add_scalar(key, value, record["step"])

    def summary(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Means over the steps after warm-up; percentages never without their window."""
        window = self.records[self.warmup_steps :] or self.records[-1:]
        keys = ["tokens_per_s", *(f"{name}_ms" for name in (*TIMES, "hidden"))]
        means = {key: sum(r[key] for r in window) / len(window) for key in keys} if window else {}
        if window:
            means["tokens_per_s"] = 1e3 * window[0]["num_tokens"] / means["step_ms"]
            comm = means["comm_ms"]
            means["hidden_fraction"] = means["hidden_ms"] / comm if comm > 0 else 0.0
            experts = [r["mean_experts"] for r in window if "mean_experts" in r]
            if experts:
                means["mean_experts"] = sum(experts) / len(experts)
            load = [sum(layers) for layers in zip(*(sum_load(r["load"]) for r in window), strict=True)]
        summary: dict[str, Any] = {
            "loss_first": self.records[0]["loss"] if self.records else None,
            "loss_last": self.records[-1]["loss"] if self.records else None,
            **means,
            "window": f"steps {window[0]['step']} to {window[-1]['step']}" if window else "no steps",
            "load": load if window else [],
            "dropped": sum(r["dropped"] for r in window),
            "skipped": sum(r["skipped"] for r in self.records),
            "directory": str(self.directory),
            **extra,
        }
        if self.writes:
            (self.directory / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        if self._board is not None:
            self._board.close()
        return summary


def sum_load(load: list[list[int]]) -> list[int]:
    """Per expert, over layers."""
    return [sum(column) for column in zip(*load, strict=True)]


def is_before(line: str, step: int) -> bool:
    try:
        return bool(json.loads(line)["step"] < step)
    except (json.JSONDecodeError, KeyError, TypeError):
        return False  # a line cut short by a kill


def open_tensorboard(directory: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(NO_TENSORBOARD) from None
    return SummaryWriter(str(directory / "tensorboard"))
