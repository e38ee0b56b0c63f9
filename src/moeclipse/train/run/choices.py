"""Tuned settings of a run: measured costs, and how rows are cut. `choices.json` in its directory.

Idea. Two runs on the same machine measure other numbers, so they may cut rows, lend experts and place them
otherwise, and sums round otherwise. Whatever is decided from a time is written down before it acts; a run
that goes on reads it and measures nothing again. Equal bits are promised for equal choices: `run.tuned_from`
takes those of another run.

    settled      keys that were left at "auto", and what was chosen (`train/run/resolve_auto`)
    layers       of each layer: the costs that were measured, the cuts that were tried, and the one that stays
    placement    the costs that planners are told, where no layer has measured any
    search       seconds of a step, and of looking for one layer's plan (`train/placement/search_budget`)
    hosts        the host of each rank that shares a layer's experts, for those who plan from these costs
    experts      whether they move and are lent, in words; it follows from the configuration alone

Contract. All ranks of a stage know the same choices: the first of them reads and writes. Every stage of a
pipeline has a file of its own (choices.json, choices-1.json, ...). Choices of other ranks are left alone and
made again, and so is what all stages settle or search together, where a kill left it in the files of some.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import keys_of
from moeclipse.core.errors import ConfigError
from moeclipse.core.outside import read_table
from moeclipse.core.values import Mismatch, convert, convert_table
from moeclipse.moe.layer import MoE
from moeclipse.moe.tune.cut_choice import LayerChoice
from moeclipse.moe.tune.fixed_prices import fixed_prices
from moeclipse.moe.tune.probe import Probe
from moeclipse.moe.tune.stopwatch import CannotMeasure
from moeclipse.report.choices_form import misfits
from moeclipse.train.config import TrainConfig
from moeclipse.train.run.run_files import write_atomic

FILE = "choices.json"
UNEVEN = 0.95
"""Mean over fullest rank below which it is worth knowing what a planner would have won."""
TRIAL_SHARE = 0.1
"""Of a run's steps, at most ..."""
SHORTEST = 60
"""... and nothing of a run with fewer steps: it would be over before what was chosen has paid."""


MOST_UNITS = 4096
"""Of an exchange that was tried."""


@dataclass(frozen=True, kw_only=True)
class SearchTimes:
    step_s: float
    search_s: float

    def __post_init__(self) -> None:
        if min(self.step_s, self.search_s) <= 0:
            raise ValueError(f"steps of {self.step_s!r} s and searches of {self.search_s!r} s take no time")


class Choices:
    """Of one stage; `directory` is None where nothing is written down."""

    def __init__(self, mesh: Mesh, directory: Path | None = None) -> None:
        self.mesh, self.directory = mesh, directory
        self.layers: dict[str, LayerChoice] = {}
        self.placement: dict[str, Any] | None = None
        self.settled: dict[str, Any] | None = None
        self.search: dict[str, float] | None = None
        self.hosts: tuple[int, ...] = ()
        self.experts: list[str] = []

    @property
    def _name(self) -> str:
        stage = self.mesh.pp_index
        return FILE if stage == 0 else f"choices-{stage}.json"

    def read(self, given: str, resumed: bool) -> None:
        """Those of this run, where it goes on, or those that it was given. Collective; writes nothing."""
        path = self.directory / self._name if resumed and self.directory is not None else None
        if (path is None or not path.is_file()) and given:
            path = Path(given).with_name(self._name) if Path(given).name == FILE else Path(given) / self._name
        mine: dict[str, Any] = {}
        if self.mesh.stage.index == 0 and path is not None:
            mine = _read(path, needed=bool(given))
        stages = self.mesh.gather_objects(mine)[:: self.mesh.stage.size]
        if problems := [found["problem"] for found in stages if "problem" in found]:
            raise ConfigError(problems)
        stages = [found if found.get("ranks") == self._ranks else {} for found in stages]
        if found := stages[self.mesh.pp_index]:
            self.layers = {name: convert_table(one, LayerChoice) for name, one in found["layers"].items()}
            self.placement = found["placement"]
            self.hosts = tuple(found["hosts"])
            if all(other.get("settled") == found["settled"] for other in stages):
                self.settled = found["settled"]
            if all((other.get("search") or {}).keys() == (found["search"] or {}).keys() for other in stages):
                self.search = found["search"]

    @property
    def _ranks(self) -> list[int]:
        return [self.mesh.dp, self.mesh.ep, self.mesh.tp, self.mesh.pp]

    def bind(self, layers: Iterable[MoE], calls: int = 0) -> None:
        """Let layers take what is known of them, and tell what they choose; `calls` of each may be trials."""
        for layer in layers:
            name = str(layer.layer)
            self.hosts = layer.schedule.hosts
            self._check_cuts(name, layer.schedule.num_ranks)
            layer.schedule.cuts.most_calls = calls
            layer.schedule.take_choice(self.layers.get(name))

            def chosen(choice: LayerChoice, name: str = name) -> None:
                self.layers[name] = choice
                self.write()

            layer.schedule.on_choice = chosen

    def _check_cuts(self, name: str, num_ranks: int) -> None:
        if name in self.layers:
            for cut in self.layers[name].cuts:
                if cut.num_ranks != num_ranks or cut.num_units > MOST_UNITS:
                    raise ConfigError(
                        f"{self._name} cuts layer {name}, which {num_ranks} ranks share, into "
                        f"{cut.num_units} units of {cut.num_ranks} ranks; remove it to choose anew"
                    )

    def costs_for_planners(self, layer: MoE) -> Probe:
        """What a layer has measured, or what was measured for planners; measured now where nothing was."""
        if layer.schedule.probe is not None:
            return layer.schedule.probe
        if self.placement is None:
            by_the_book = layer.schedule.by_the_book
            self.placement = asdict(layer.measure_costs(*([fixed_prices] if by_the_book else [])))
            self.write()
        return Probe(**self.placement)

    def price_skew(self, layers: Sequence[MoE], balance: float | None) -> list[str]:
        """At the end of a run whose ranks were uneven: measure what a planner needs to say what would help.

        Collective over all ranks; those of a stage know the same balance. Returns why something is not known:
        the run is over and well, and experts that do not bear it are no reason to lose its summary.
        """
        problems = self.mesh.gather_objects(self._price_skew(layers, balance))
        return list(dict.fromkeys(filter(None, problems)))

    def _price_skew(self, layers: Sequence[MoE], balance: float | None) -> str:
        known = self.placement is not None or any(layer.schedule.probe is not None for layer in layers)
        if known or not layers or balance is None or balance > UNEVEN:
            return ""
        try:
            with self.mesh.recorder.apart("costs of an exchange"):
                self.placement = asdict(layers[0].measure_costs())
        except CannotMeasure as error:
            return f"what experts and wires cost could not be measured: {error}"
        try:
            self.write()
        except OSError as error:
            return f"{self._name} cannot be written: {error.strerror or error}"
        return ""

    def write(self) -> None:
        """Nothing, as long as nothing was chosen."""
        chosen = self.layers or self.placement or self.settled is not None or self.experts or self.search
        if chosen and self.directory is not None and self.mesh.stage.index == 0:
            layers = {name: asdict(choice) for name, choice in self.layers.items()}
            text: dict[str, Any] = {"ranks": self._ranks, "layers": layers, "placement": self.placement}
            text |= {"hosts": list(self.hosts), "settled": self.settled, "experts": self.experts}
            text |= {} if self.search is None else {"search": self.search}
            write_atomic(self.directory / self._name, json.dumps(text, indent=1) + "\n")


def trial_calls(config: TrainConfig) -> int:
    """Calls of a layer that a run may spend on trying how rows are cut."""
    steps = config.run.steps
    return int(TRIAL_SHARE * steps) * config.optim.accumulate if steps >= SHORTEST else 0


def _read(path: Path, needed: bool) -> dict[str, object]:
    if not path.is_file():
        return {"problem": f"run.tuned_from: there is no file {path}"} if needed else {}
    try:
        found = read_table(path, numbers=False)
        if bad := misfits(found):
            raise ValueError(f"{', '.join(bad)} in it")
        check(found)
        needed_keys = {key: found[key] for key in ("ranks", "layers", "placement")}
        # The first of these files lack the others.
        others = {key: found.get(key) for key in ("settled", "search")}
        return {**needed_keys, "hosts": found.get("hosts", []), **others}
    except (OSError, ValueError, KeyError, TypeError, Mismatch) as error:
        return {"problem": f"{path} does not hold the choices of a run ({error!r}); remove it to choose anew"}


def check(found: Mapping[str, Any]) -> None:
    """Mismatch, ValueError or TypeError where what was found is nothing that a run writes."""
    for layer in found["layers"].values():
        convert_table(layer, LayerChoice)
    if found["placement"] is not None:
        convert_table(found["placement"], Probe)
    known = keys_of(TrainConfig)
    for key, value in (found.get("settled") or {}).items():
        if key in known:  # others are nobody's choice
            convert(value, known[key])
    if search := found.get("search"):
        convert_table({"search_s": 1.0, **search}, SearchTimes)
