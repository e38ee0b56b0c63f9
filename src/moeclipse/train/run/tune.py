"""`moeclipse train --tune`: longer trials over more choices, a table, and a `choices.json` for runs to come.

    moeclipse train my.toml --tune --run.name tuned
    moeclipse train my.toml --run.tuned_from runs/tuned

Idea. A run tries what costs it little: some cuts of its exchange, for some calls. Here nothing else is done:
whole steps of the real model on its real data, over every wire and way to reduce gradients that these ranks
can have, with the cuts that are predicted to be best. Cuts take turns step by step, wires pass by pass, so
that all see the same weather. What is judged is the step of the slowest rank. The plain choice (direct, peer
memory where it can be had, one go) stays unless another is faster by more than LEAST_GAIN, in each of its
steps faster than the median of plain ones: few steps of many settings have a fast one among them by chance.

Contract. Only what the configuration leaves at "auto" is tried. Steps are thrown away: no checkpoint, no
metrics. All ranks know the same times and write the same choice, each stage of a pipeline its own file.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.transports.fastest import PLAIN, wire_times
from moeclipse.core.auto import Auto
from moeclipse.core.config import problems_of, with_values
from moeclipse.moe.tune.cut_choice import LEAST_GAIN, LayerChoice
from moeclipse.moe.tune.granularity import Granularity, cut_in_words
from moeclipse.moe.validate import expert_group
from moeclipse.train.config import TrainConfig
from moeclipse.train.run.choices import Choices
from moeclipse.train.run.resolve_auto import choose
from moeclipse.train.step.learner import Learner

PASSES = 2
ROUNDS = 3
"""Steps of each cut in a pass; the first of them builds programs and does not count."""
MOST_CUTS = 6
ONE_GO = (1, 1)
Cut = tuple[int, int]
"""Steps and chunks."""


@dataclass(frozen=True, kw_only=True)
class TriedSetting:
    """What is compared; cuts are the same in all layers."""

    transport: str
    peer: str
    cut: Cut

    @property
    def plain(self) -> bool:
        return (self.transport, self.cut) == (PLAIN, ONE_GO) and self.peer != "off"


class Tuning:
    """Step times of each setting, and what is needed to repeat its cut."""

    def __init__(self, config: TrainConfig, mesh: Mesh) -> None:
        self.mesh = mesh
        self.settled, self.lines = self._settled(config)
        self.config = with_values(config, self.settled)
        self.times: dict[TriedSetting, list[float]] = {}
        self.layers: dict[TriedSetting, dict[str, LayerChoice]] = {}

    def _settled(self, config: TrainConfig) -> tuple[dict[str, object], list[str]]:
        """What is not tried: pipelines, which are simulated, and slots, for which memory counts."""
        found, lines = choose(config, self.mesh)
        found = {key: value for key, value in found.items() if key.startswith(("pipeline.", "placement."))}
        if any(problems_of(with_values(config, found))):
            return {}, []
        return found, [line for line in lines if line.startswith(("pipeline", "placement"))]

    def wires(self) -> Iterator[tuple[str, str]]:
        """(transport, peer): those that these ranks can have, the plain ones first."""
        config, mesh = self.config, self.mesh
        group, transports = expert_group(mesh, config.moe), [str(config.moe.transport)]
        if transports == ["auto"]:
            exchanges = group.size > 1 and config.num_expert_layers > 0
            transports = list(map(str, wire_times(mesh, group))) if exchanges else [PLAIN]
        near = len(set(mesh.hosts)) < mesh.num_ranks
        peers = ["auto", "off"] if config.parallel.peer == "auto" and near else [config.parallel.peer]
        return ((transport, peer) for transport in transports for peer in peers)

    def run(self, tell: Callable[[str], None]) -> None:
        """All settings, in passes. Collective."""
        wires = list(self.wires())
        for number in range(PASSES):
            for transport, peer in wires if number % 2 == 0 else reversed(wires):
                tell(f"pass {number + 1} of {PASSES}: transport {transport}, peer memory {peer}")
                self.steps(transport, peer)
                gc.collect()

    def steps(self, transport: str, peer: str) -> None:
        """Some steps of each cut over one wire, in turns."""
        config = with_values(self.config, {"moe.transport": transport, "parallel.peer": peer})
        learner = Learner(config, self.mesh)
        for layer in learner.layers:
            layer.schedule.by_the_book = False  # what is tuned is written down, and equal runs take it
            layer.schedule.cuts.most_calls = None if learner.pipelined is None else 0
        for step in range(2):
            learner.step(step)
        cuts, step = cuts_of(learner), 2
        for layer in learner.layers:
            layer.schedule.cuts.trials = layer.schedule.cuts.watch = None
        for lap in range(ROUNDS):
            for cut in cuts:
                setting = TriedSetting(transport=transport, peer=peer, cut=cut)
                self.layers[setting] = use_cut(learner, cut)
                learner.step(step)
                step += 1
                learner.times.settle()
                told = learner.times.take()
                if lap > 0:
                    self.times.setdefault(setting, []).append(max(told[-1].times["ranks"]["step_ms"]))

    def chosen(self) -> TriedSetting:
        """The fastest; the plain one, where nothing is faster by enough."""
        medians = self.medians()
        order = sorted(medians, key=lambda setting: medians[setting])
        plain = next((setting for setting in order if setting.plain), order[0])
        least = medians[plain] / (1 + LEAST_GAIN)

        def wins(one: TriedSetting) -> bool:
            return medians[one] < least and max(self.times[one]) < medians[plain]

        return Auto(costs=medians, plain=plain, wins=wins).choice

    def medians(self) -> dict[TriedSetting, float]:
        return {setting: statistics.median(times) for setting, times in self.times.items()}

    def write(self, choices: Choices) -> None:
        best = self.chosen()
        choices.settled = {**self.settled, "moe.transport": best.transport, "parallel.peer": best.peer}
        choices.layers = self.layers[best]
        choices.write()

    def table(self) -> list[str]:
        """The fastest first."""
        medians, best = self.medians(), self.chosen()
        plain = next((ms for setting, ms in medians.items() if setting.plain), medians[best])
        head = (
            f"{'transport':<10} {'peer':<5} {'rows in':<22} {'step ms':>9} {'of plain':>9} {'from - to':>15}"
        )
        lines = [
            f"{one.transport:<10} {one.peer:<5} {cut_in_words(*one.cut):<22} {ms:>9.1f} {ms / plain:>9.2f} "
            f"{min(self.times[one]) / plain:>8.2f} - {max(self.times[one]) / plain:.2f}"
            + ("  <- chosen" if one == best else "")
            for one, ms in sorted(medians.items(), key=lambda item: item[1])
        ]
        return [*self.lines, head, *lines]


def cut_of(granularity: Granularity) -> Cut:
    return len(granularity.groups), granularity.chunks


def cuts_of(learner: Learner) -> list[Cut]:
    """One go, and those that are predicted to be the best for the first layer that can be cut."""
    ranked = next((layer.schedule.cuts.ranked for layer in learner.layers if layer.schedule.cuts.ranked), [])
    found = [cut for cut in dict.fromkeys(map(cut_of, ranked)) if cut != ONE_GO]
    whole = [ONE_GO] if not ranked or any(one.plain for one in ranked) else []
    return [*whole, *found[:MOST_CUTS]]


def use_cut(learner: Learner, cut: Cut) -> dict[str, LayerChoice]:
    """Cut the rows of all layers so, where they can be; returns what repeats it, layer by layer."""
    written: dict[str, LayerChoice] = {}
    for layer in learner.layers:
        schedule = layer.schedule
        use = next((one for one in schedule.cuts.ranked if cut_of(one) == cut), None)
        if use is None or schedule.probe is None:
            continue
        schedule.cuts.use = use
        written[str(layer.layer)] = schedule.cuts.record(schedule.probe, use)
    return written
