"""What each cure of uneven gates would bring a run, replayed on the loads that it has recorded.

    found = cures_of(run)            # None where loads or prices are not known
    for line in found.in_words(): ...

A run records the loads of up to 256 steps, evenly spread (`balance/load`). All cures are replayed over them
(`balance/cures`), at the prices that the run has measured or planned by, in some of its layers: the others
are taken to be like them. Loads do not depend on where experts stand, so what `static` would have cost is
known of a run that moved its experts, too.

Contract. Pure. A gain is never more than the layers' part of a real step, nor more than ranks waited for
each other and for rows. `low` and `high` are the gain in the worst and the best quarter of the steps, with
prices as far off as the run has found them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moeclipse.balance.config import PlacementConfig
from moeclipse.balance.cures import CURES, EVEN, Bed, CureSeconds, replay
from moeclipse.balance.load import Load
from moeclipse.core.errors import ConfigError
from moeclipse.report.gain import cost_of_a_row, short
from moeclipse.report.run import RunData, number
from moeclipse.report.skew import probe_of, problems_of

MOST_STEPS, MOST_LAYERS = 32, 2
"""Replayed for the page of a run, which has to be there at once; `moeclipse skew` takes more."""
QUARTERS = 4
WORTH, NEARLY = 0.01, 0.9
"""Of a step, and of what the best wins: the first that wins so much is simple enough to be advised."""
LEAST_OF_STEP = 0.01
"""That a plan of auto has to win of a step (`train/placement/model_placement`)."""
FLAGS = {
    "static": "--placement.planner static --moe.shadow off",
    "shadows": "--moe.shadow auto",
    "replicas": "--placement.slots TABLE",
    "planned": "--placement.planner incremental",
    "auto": "--placement.planner auto --moe.shadow auto",
}


@dataclass(frozen=True, kw_only=True)
class Cure:
    way: str
    throughput: float
    """Of the layers, over that of an even gate."""
    gain_ms: float
    """Of a step, over experts that stay; below 0: it would lose."""
    share: float
    """The same as a part of the step."""
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Cures:
    steps: int
    layers: tuple[int, int]
    """Replayed, of all."""
    step_ms: float
    cost_ms: float
    """Of a step, with experts that stay, over an even gate."""
    doubt: float
    """Part by which prices may be off."""
    now: str
    """The cure that the run had, by its configuration."""
    by_the_book: bool
    """Whether the run decided by prices that are written down, which may be far from what rows cost it."""
    prices: str
    """Where they are from, in words."""
    found: tuple[Cure, ...]

    @property
    def best(self) -> Cure:
        return max(self.found, key=lambda cure: cure.gain_ms)

    @property
    def own(self) -> Cure:
        """What the cure that the run had should win of a step with experts that stay."""
        return next(cure for cure in self.found if cure.way == self.now)

    def advice(self) -> str:
        """What to do, and what it wins beside what the run has already."""
        best, own = self.best, self.own
        if best.share < WORTH:
            return "nothing of it wins 1 % of a step: experts can stay where they are"
        simple = next(cure for cure in self.found if cure.share >= NEARLY * best.share)
        if own.share >= NEARLY * best.share:
            has = f"the run has the best of these on already ({FLAGS[self.now]})"
            if self.by_the_book:
                return (
                    f"{has}, but decides by prices that are written down, so it may do less: try "
                    f"--run.deterministic false, which measures them, up to {100 * own.share:.0f} % of a step"
                )
            return f"{has}: {100 * own.share:.0f} % of a step, already in its times"
        of_it = "" if own.way == "static" else f"; the run should have {100 * own.share:.0f} % now"
        how = " (TABLE: moeclipse place RUN --out plan.json)" if simple.way == "replicas" else ""
        book = " --run.deterministic false" if self.by_the_book else ""
        wins = f"wins {short(simple.gain_ms)} ms, {100 * simple.share:.0f} % of a step with experts that stay"
        return f"try {FLAGS[simple.way]}{book}{how}: {wins}{of_it}"

    def in_words(self) -> str:
        """What each would win, in one line."""
        told = [
            f"{cure.way} {100 * cure.share:+.0f} % ({100 * cure.low:+.0f} to {100 * cure.high:+.0f})"
            for cure in self.found
            if cure.way != "static"
        ]
        return f"uneven gates cost {short(self.cost_ms)} ms of a step; of it win {', '.join(told)}"


def cures_of(run: RunData, most_steps: int = MOST_STEPS, most_layers: int = MOST_LAYERS) -> Cures | None:
    """Replayed once for so many steps and layers."""
    key = f"cures {most_steps} {most_layers}"
    if key not in run.kept:
        try:
            run.kept[key] = _cures(run, most_steps, most_layers)
        except (ConfigError, KeyError, TypeError, ValueError, AttributeError):
            run.kept[key] = None  # files of another version, or of somebody else's making
    found: Cures | None = run.kept[key]
    return found


def _cures(run: RunData, most_steps: int, most_layers: int) -> Cures | None:
    load, probe = run.load, probe_of(run.choices)
    problems = list(problems_of(run))
    step = run.steps.column("step_ms")[run.window]
    if load is None or probe is None or not problems or not np.isfinite(step).any():
        return None
    step_s, doubt = 1e-3 * float(np.nanmean(step)), float(probe.get("doubt") or 0.0)
    config = PlacementConfig(planner="incremental", lifetime=problems[0].costs.every)
    calls = int(number(run.config.get("optim.accumulate"), 1))
    # Prices that were written down say nothing of this machine; what its own steps say of rows is better.
    row_ms = cost_of_a_row(run) if probe.get("fixed") else None
    chosen = some_layers(load, most_layers)
    replays = []
    for layer in chosen:
        problem = problems[layer]
        bed = Bed(
            costs=problem.costs if row_ms is None else replace(problem.costs, row_seconds=1e-3 * row_ms),
            slots=max(problem.slots_P),
            node_P=problem.node_P,
            calls=calls,
            config=config,
            look=calls * float(probe.get("look") or 0.0),
            least_s=LEAST_OF_STEP * step_s / load.num_layers,
            apart=load.every,
        )
        steps = recorded(load, layer, problem.num_ranks, most_steps)
        copies = max(load.average_LPE.shape[1] // problem.num_ranks, 1)
        replays.append(replay([counts_PE // copies for counts_PE in steps], bed))
    if "row_doubt" in probe:  # rows and wires apart, as far as they are parts of a layer
        unsure = sum(sum(each.unsure) for each in replays)
        whole = sum(sum(each.seconds["static"]) for each in replays)
        doubt = unsure / whole if whole > 0 else doubt
    all_layers = load.num_layers / len(chosen)
    seconds = {
        way: all_layers * np.sum([each.seconds[way] for each in replays], axis=0) for way in (EVEN, *CURES)
    }
    waited = [run.steps.column(f"{part}_ms")[run.window] for part in ("straggle", "exposed")]
    known = [part for part in waited if np.isfinite(part).any()]
    most = 1e-3 * float(sum(np.nanmean(part) for part in known)) if known else np.inf
    return Cures(
        steps=len(seconds[EVEN]),
        layers=(len(chosen), load.num_layers),
        step_ms=1e3 * step_s,
        cost_ms=1e3 * _of_step(seconds, EVEN, step_s, most),
        doubt=doubt,
        now=way_of(run),
        by_the_book=bool(probe.get("fixed")),
        prices=prices_in_words(bool(probe.get("fixed")), row_ms is not None, doubt),
        found=tuple(cure_of(way, replays, seconds, step_s, most, doubt) for way in CURES),
    )


def way_of(run: RunData) -> str:
    """By its configuration."""
    lends = run.config.get("moe.shadow", "off") == "auto"
    if run.config.get("placement.planner", "static") != "static":
        return "auto" if lends else "planned"
    return "shadows" if lends else "replicas" if run.config.get("placement.slots") else "static"


def prices_in_words(fixed: bool, rows_known: bool, doubt: float) -> str:
    if not fixed:
        return f"prices are measured, give or take {100 * doubt:.0f} %"
    if rows_known:
        return "what a row costs follows from the run's own steps, wires are priced by the book"
    return "prices are written down, not measured"


def some_layers(load: Load, most: int) -> list[int]:
    """So many layers, evenly from the most uneven one to the least."""
    rows_LE = load.average_LPE.sum(1)
    uneven = rows_LE.max(1) / np.maximum(rows_LE.mean(1), 1e-300)
    order = np.argsort(-uneven, kind="stable")
    count = min(most, len(order))
    # The middle of each of so many equal parts.
    return sorted(int(order[(2 * i + 1) * len(order) // (2 * count)]) for i in range(count))


def recorded(load: Load, layer: int, num_ranks: int, most: int) -> list[np.ndarray]:
    """Counts [P, E] of the newest recorded steps, shared among sources as on average."""
    if not len(load.steps_N):
        raise ConfigError("the run recorded no single steps")
    first = max(len(load.steps_N) - most, 0)
    found = []
    for rows_LE in load.rows_NLE[first:]:
        one = replace(load, rows_NLE=rows_LE[None], steps_N=load.steps_N[:1])
        counts_PE = one.last_step(layer, num_ranks)
        assert counts_PE is not None
        if counts_PE.any():
            found.append(counts_PE)
    if not found:
        raise ConfigError("the recorded steps have no rows")
    return found


def _of_step(seconds: dict[str, np.ndarray], way: str, step_s: float, most: float) -> float:
    """Seconds of a step that a way takes less than experts that stay, as far as a real step allows."""
    static, other = float(seconds["static"].mean()), float(seconds[way].mean())
    return min((static - other) * min(1.0, step_s / static), most) if static > 0 else 0.0


def cure_of(
    way: str,
    replays: Sequence[CureSeconds],
    seconds: dict[str, np.ndarray],
    step_s: float,
    most: float,
    doubt: float,
) -> Cure:
    gain = _of_step(seconds, way, step_s, most)
    quarters = np.array_split(np.arange(len(seconds[way])), min(QUARTERS, len(seconds[way])))
    each = [_of_step({k: v[part] for k, v in seconds.items()}, way, step_s, most) for part in quarters]
    # Prices that are off make a gain larger or smaller; what loses may lose more.
    low, high = (min(each) - doubt * abs(min(each)), max(each) + doubt * abs(max(each)))
    even, other = (float(np.sum([one.seconds[key] for one in replays])) for key in (EVEN, way))
    return Cure(
        way=way,
        throughput=even / other if other > 0 else 1.0,
        gain_ms=1e3 * gain,
        share=gain / step_s,
        low=low / step_s,
        high=high / step_s,
    )
