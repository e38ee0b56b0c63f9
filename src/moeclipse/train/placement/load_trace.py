"""The load of a run: who sent how many rows to which expert, kept as an average and as `load.npz`.

Idea. At the end of a step every rank tells all others how many of its tokens wanted each expert of each
layer. Their sums move the gates; the table, source by source, feeds a moving average (for planners) and a
trace of single steps of bounded size (for people): `balance/load`.

Contract. All ranks have the same table and the same average. Rank 0 writes the file beside and renames it, so
a reader never sees half of it: every 20 steps, later whenever the run has grown by a twentieth, at every
checkpoint and at the end. A checkpoint holds the average; a resumed run takes single steps from the file,
those before its first step, so it ends with the file that the uninterrupted run would have written.

Hazard. Loads count what gates wanted, before anything was dropped; steps that were skipped are left out.

Shapes: P source ranks, L layers with experts, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from moeclipse.balance.drift import NUMBERS, Drift
from moeclipse.balance.load import Load, LoadAverage, LoadTrace, spread
from moeclipse.balance.regimes import NUMBERS as REGIME_NUMBERS
from moeclipse.balance.regimes import Regimes
from moeclipse.balance.split import balance_of, pour
from moeclipse.comm.async_ops.exchange import total
from moeclipse.comm.async_ops.lane import gather
from moeclipse.comm.async_ops.reading import Reading
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.moe.layer import MoE
from moeclipse.train.checkpoints.checkpoint import Checkpoint, Piece
from moeclipse.train.run.background_writer import Scribe

FILE = "load.npz"
FIRST_WRITES = 20  # steps between writes of a young run


@dataclass(frozen=True, kw_only=True)
class StepLoad:
    """One step's loads, the same on every rank."""

    counts_PLE: torch.Tensor
    """int64, on the host: tokens of each source rank that wanted each expert."""
    seen_L3: torch.Tensor
    """int64: what dynamic gates saw, over all ranks."""
    load_LE: torch.Tensor
    """int64: the sum of the counts; this and `seen_L3` stay where they were summed."""
    balance: float | None = None
    """Mean over fullest rank, as this stage's layers are placed, on average over them; None on one rank."""

    def rebalance(self, layers: Mapping[int, MoE]) -> None:
        """Move what gates adapt by the load of all ranks."""
        for number, layer in layers.items():
            if layer.gate.adapts:
                layer.gate.rebalance(self.load_LE[number], self.seen_L3[number])

    def record(self, num_tokens: int) -> dict[str, object]:
        """For a line of metrics: rows by layer and expert, and experts per token over all layers."""
        load_LE = self.counts_PLE.sum(0)
        if not load_LE.numel():
            return {"load": []}
        mean = int(load_LE.sum()) / (len(load_LE) * max(num_tokens, 1))
        told = {} if self.balance is None else {"balance": round(self.balance, 4)}
        return {"load": load_LE.tolist(), "mean_experts": mean, **told}


class AskedLoad:
    """A step's loads on their way, an `InFlight`."""

    def __init__(self, layers: Mapping[int, MoE], shape: tuple[int, int], mesh: Mesh, sharded: bool) -> None:
        """Ask everyone. Collective; `layer.load_E` holds what this rank saw since the step began.

        `layers` are this rank's, by their number among the layers with experts; `shape` is (layers, experts)
        of the whole model; `sharded`: its experts are cut over tp.
        """
        self._layers = layers
        num_layers = shape[0]
        mine = counts_of(layers, *shape, mesh.device)
        everyone = mine[None]
        if num_layers:
            everyone = gather(mesh.grads, mesh.stage, mine, "exchange of expert loads").get()
        if num_layers and mesh.pp > 1:  # each stage knows its own layers
            everyone = total(mesh.grads, mesh.line, everyone.flatten(0, 1), "loads of all stages").get()
            everyone = everyone.view(-1, *mine.shape)
        if sharded:
            everyone = everyone[:: mesh.tp]  # the tp ranks share their tokens, and the first of them counted
        self._sums = everyone.sum(0)
        self._reading = Reading(everyone, mesh.watch, "exchange of expert loads", mesh.world.ranks)

    def get(self) -> StepLoad:
        counts_PLE = self._reading.tensor()[..., :-3].contiguous()
        return StepLoad(
            counts_PLE=counts_PLE,
            seen_L3=self._sums[:, -3:],
            load_LE=self._sums[:, :-3],
            balance=balance_over_ranks(self._layers, counts_PLE.sum(0).numpy()),
        )


def counted_together(layers: Sequence[MoE], num_experts: int, device: torch.device) -> torch.Tensor:
    """Tokens that wanted each expert since the step began: layers count in rows of one tensor."""
    load_LE = torch.zeros(len(layers), num_experts, dtype=torch.int64, device=device)
    for layer, load_E in zip(layers, load_LE, strict=True):
        layer.load_E = load_E
    return load_LE


def counts_of(
    layers: Mapping[int, MoE], num_layers: int, num_experts: int, device: torch.device
) -> torch.Tensor:
    """Of each layer its experts' load and what its gate saw; zeros of others' layers.

    Two launches for all layers, and those of gates that adapt.
    """
    nothing = torch.zeros(num_experts + 3, dtype=torch.int64, device=device)
    loads, seen = [nothing[3:]] * num_layers, [nothing[:3]] * num_layers
    for number, layer in layers.items():
        loads[number] = layer.load_E
        if layer.gate.adapts:
            seen[number] = layer.gate.take_seen()
    both = [each for pair in zip(loads, seen, strict=True) for each in pair]
    return torch.cat([nothing[:0], *both]).view(num_layers, num_experts + 3)


def balance_over_ranks(layers: Mapping[int, MoE], load_LE: np.ndarray) -> float | None:
    """Mean over fullest rank under the placements that hold now; lent experts count where they live."""
    found = []
    for number, layer in layers.items():
        if layer.dispatcher.group.size == 1:
            continue
        placement, table = layer.dispatcher.placement, layer.dispatcher.table
        if table is None:
            level = np.bincount(placement.primary, load_LE[number], placement.num_ranks)
        else:
            level = np.array(pour(load_LE[number], table)[1])
        found.append(balance_of(level))
    return sum(found) / len(found) if found else None


class LoadHistory:
    """The loads of a run up to now."""

    def __init__(self, decay: float | Literal["auto"] = "auto") -> None:
        """`decay`: what a step leaves of the average; auto: as the drift of the loads asks for."""
        self.trace = LoadTrace(drift=Drift())
        if decay != "auto":
            self.trace = LoadTrace(average=LoadAverage(decay=decay))
        self._written = 0

    @property
    def average(self) -> LoadAverage:
        """The moving average that planners read; the same on every rank."""
        return self.trace.average

    def add(self, step: int, load: StepLoad, layers: Sequence[MoE] = ()) -> None:
        """`layers`: those of this rank, which ask for shadows anew where loads have jumped."""
        if not load.counts_PLE.numel():
            return
        self.trace.add(step, load.counts_PLE.transpose(0, 1).numpy())
        if self.trace.jumped:
            for layer in layers:
                layer.schedule.shadows.asking.look_again()

    def average_by_layer(self) -> list[list[float]]:
        """Rows per step of each layer's experts, from all ranks."""
        return [] if self.average.sum_LPE is None else self.average.rows_LPE.sum(1).tolist()

    def write(self, directory: Path, done: int, scribe: Scribe, *, now: bool = False) -> None:
        """After `done` steps: write the file if it is time, or at once."""
        if self.average.sum_LPE is not None and (
            now or done - self._written >= max(FIRST_WRITES, done // 20)
        ):
            load = self.trace.load()  # arrays of its own: the trace goes on
            scribe.do(FILE, lambda: load.save(directory / FILE))
            self._written = done

    def continue_from(self, directory: Path, start: int) -> None:
        """Take over the single steps before `start` that an earlier part of the run wrote down."""
        if not start or not (directory / FILE).exists():
            return
        try:
            load = Load.read(directory / FILE)
        except ConfigError:
            return  # a trace is for people: a damaged one is begun anew
        known = self.average.sum_LPE
        if known is not None and load.average_LPE.shape[::2] != known.shape[::2]:
            return
        kept = load.steps_N < start
        self.trace.steps = load.steps_N[kept].tolist()
        self.trace.rows_LE = list(load.rows_NLE[kept])
        self.trace.every = load.every
        self._written = start

    def pieces(self) -> Iterator[Piece]:
        """What a checkpoint holds; for one rank to write."""
        if self.average.sum_LPE is not None:
            total = torch.from_numpy(self.average.sum_LPE).contiguous()
            yield Piece(name="load/sum_LPE", shape=tuple(total.shape), start=0, data=total.flatten())
            weight = torch.tensor([self.average.weight], dtype=torch.float64)
            yield Piece(name="load/weight", shape=(1,), start=0, data=weight)
        drift = self.trace.drift
        if drift is not None and drift.last_LE is not None and drift.anchor_LE is not None:
            seen = torch.from_numpy(np.stack([drift.last_LE, drift.anchor_LE]))
            yield Piece(name="load/drift_2LE", shape=tuple(seen.shape), start=0, data=seen.flatten())
            numbers = torch.tensor(drift.numbers(), dtype=torch.float64)
            yield Piece(name="load/drift", shape=(NUMBERS,), start=0, data=numbers)
            lasted = torch.tensor(self.trace.regimes.numbers(), dtype=torch.float64)
            yield Piece(name="load/regimes", shape=(REGIME_NUMBERS,), start=0, data=lasted)

    def load(self, checkpoint: Checkpoint, num_ranks: int) -> None:
        """The average of a checkpoint; another number of ranks shares its rows evenly."""
        if "load/sum_LPE" not in checkpoint:
            return
        saved_LPE = checkpoint.read("load/sum_LPE").view(checkpoint.shape("load/sum_LPE")).numpy()
        total_LPE = np.stack([spread(saved_PE, num_ranks) for saved_PE in saved_LPE])
        weight = float(checkpoint.read("load/weight")[0])
        self.trace.average = replace(self.trace.average, sum_LPE=total_LPE, weight=weight)
        if self.trace.drift is not None and "load/drift" in checkpoint:
            shape = checkpoint.shape("load/drift_2LE")
            last_LE, anchor_LE = checkpoint.read("load/drift_2LE").view(shape).numpy()
            numbers = checkpoint.read("load/drift").tolist()
            self.trace.drift = Drift.from_numbers(numbers, last_LE, anchor_LE)
        if self.trace.drift is not None and "load/regimes" in checkpoint:
            self.trace.regimes = Regimes.from_numbers(checkpoint.read("load/regimes").tolist())
