"""What plans won: by the rows that ranks have, and by the clock where the clock can tell.

    gain = gain_of(run)              # None where no plan changed anything
    gain.in_words()

    predicted   what planners say of a step without and with the first plan, and the last one
    rows        rows of the fullest rank above the mean before the first plan, less those after the last one,
                times what a row was measured to cost; at most the waiting that there was before
    clock       median step before the first plan less the median step after the last one

Idea. A step changes for many reasons, so each difference is held against the same difference at all places of
the run at which no plan was taken: *placebos*, of as many steps on both sides, as far apart. What nearly all
of them stay below is twice the noise. The clock is believed where its difference is larger than that, and
where what no plan can change (compute and idle time, in the mean over ranks) stood still meanwhile.

Contract. Pure. What cannot be known is None and is said to be unknown. Plans are told as a whole, first
"before" to last "after": loads drift between them, and gains of one after another would not add up.

Hazard: placebos lie beside each other and are no independent witnesses. Without LEAST_PLACEBOS that have no
step in common there is no noise, and the clock cannot tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from moeclipse.report.run import RunData

FEWEST_STEPS, MOST_STEPS = 5, 20
"""On each side: fewer say nothing, and more may be of another time."""
LEAST_PLACEBOS = 10
MOST_PLACEBOS = 4000
BELOW = 0.975
"""Of placebos, that stay below twice the noise. Rows and the clock are two chances to claim what is not
there: together at one place in twenty."""
STILL = 0.25
"""Of a difference by the clock: what compute and idle time may move by beside it."""


def short(number: float, digits: int = 3) -> str:
    """So many digits, and never an exponent of ten: `220`, not `2.2e+02`."""
    return f"{number:.0f}" if abs(number) >= 10**digits else f"{number:.{digits}g}"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Before less after, in milliseconds of a step."""

    ms: float
    noise_ms: float | None
    """None: too few places without a plan are known."""

    @property
    def stands_out(self) -> bool:
        return self.noise_ms is not None and abs(self.ms) > 2 * self.noise_ms

    @property
    def give_or_take(self) -> str:
        return "" if self.noise_ms is None else f" (give or take {short(2 * self.noise_ms, 2)})"


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Of plans that were taken and changed something."""

    plans: int
    predicted_ms: tuple[tuple[float, float], tuple[float, float]]
    """Of a step, by planners: (without, with) the first plan, and the last; each for its own loads."""
    above: tuple[float, float] | None
    """Rows of the fullest rank above the mean, before and after; None: too few steps."""
    rows: Difference | None
    """None: what a row costs is not known, or there are too few steps."""
    clock: Difference | None
    """None: too few steps."""
    moved_ms: float = 0.0
    """By how much compute and idle time fell meanwhile, by the clock."""

    @property
    def clock_tells(self) -> bool:
        clock = self.clock
        return clock is not None and clock.stands_out and abs(self.moved_ms) <= STILL * abs(clock.ms)

    def in_words(self) -> str:
        plans = "1 plan" if self.plans == 1 else f"{self.plans} plans"
        (without, taken), (last_without, last_taken) = (map(short, pair) for pair in self.predicted_ms)
        which = "" if self.plans == 1 else "the first "
        told = f"{plans} moved experts, {which}predicted to take {taken} ms a step instead of {without}"
        told += f", the last {last_taken} instead of {last_without}" if self.plans > 1 else ""
        if self.above is None:
            return f"{told}; what that won is not known, there are too few steps around"
        return f"{told}; {self._rows(*self.above)}; {self._clock()}"

    def _rows(self, before: float, after: float) -> str:
        told = f"the fullest rank had {before:,.0f} rows above the mean before and {after:,.0f} after"
        if self.rows is None:
            return f"{told} (what a row costs is not known)"
        if self.rows.noise_ms is not None and not self.rows.stands_out:
            return f"{told}, no more than they move by without a plan"
        less = f"{short(abs(self.rows.ms))} ms {'less' if self.rows.ms >= 0 else 'more'} to wait for it"
        if self.rows.noise_ms is None:
            return f"{told}: {less}, if it was the plans that moved them"
        return f"{told}: {less}{self.rows.give_or_take}"

    def _clock(self) -> str:
        clock = self.clock
        if clock is None or clock.noise_ms is None:
            return "the clock cannot tell, there are too few steps without a plan"
        if not clock.stands_out:
            return f"the clock cannot tell, steps differ by {short(2 * clock.noise_ms, 2)} ms without a plan"
        if not self.clock_tells:
            moved = f"{short(abs(self.moved_ms), 2)} ms {'shorter' if self.moved_ms > 0 else 'longer'}"
            return f"the clock cannot tell, compute and idle time became {moved} meanwhile"
        less = "less" if clock.ms > 0 else "more"
        return f"by the clock a step takes {short(abs(clock.ms))} ms {less}{clock.give_or_take}"


# --- what a row costs ------------------------------------------------------------------------------------


def cost_of_a_row(run: RunData) -> float | None:
    """Milliseconds, from how compute differs between ranks of a step where rows do; None: it does not.

    A slope within twice its error is none: with even ranks it is made of their jitter alone.
    """
    rows, compute = run.steps.ranks.get("rows"), run.steps.ranks.get("compute_ms")
    if rows is None or compute is None or rows.shape[1] < 2:
        return None
    whole = np.isfinite(rows).all(1) & np.isfinite(compute).all(1)
    warm = run.warm[np.isin(run.steps.step, run.steps.rank_step)]
    rows, compute = rows[whole & warm], compute[whole & warm]
    if len(rows) < 3:
        return None
    d_rows, d_compute = rows - rows.mean(1, keepdims=True), compute - compute.mean(1, keepdims=True)
    spread = float((d_rows**2).sum())
    if spread <= 0:
        return None
    cost = float((d_rows * d_compute).sum()) / spread
    free = len(rows) * (rows.shape[1] - 1) - 1
    error = float(np.sqrt(((d_compute - cost * d_rows) ** 2).sum() / (free * spread)))
    return cost if cost > 2 * error else None


# --- what was won ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Steps in which ranks were told apart, in their order; means over ranks, in milliseconds."""

    step: np.ndarray
    above: np.ndarray
    """Rows of the fullest rank above the mean."""
    step_ms: np.ndarray
    straggle_ms: np.ndarray
    rest_ms: np.ndarray
    """Compute and idle time, which no plan changes in the mean."""
    counts: np.ndarray
    """Warm, and nothing is missing."""

    @classmethod
    def of(cls, run: RunData) -> Lines | None:
        rows = run.steps.ranks.get("rows")
        if rows is None or rows.shape[1] < 2:
            return None
        told = np.isin(run.steps.step, run.steps.rank_step)  # of all starts: plans are kept by checkpoints
        step_ms, straggle, exposed = (
            run.steps.column(f"{name}_ms")[told] for name in ("step", "straggle", "exposed")
        )
        above, rest = rows.max(1) - rows.mean(1), step_ms - straggle - exposed
        whole = np.isfinite(above) & np.isfinite(rest)
        return cls(
            step=run.steps.rank_step,
            above=above,
            step_ms=step_ms,
            straggle_ms=straggle,
            rest_ms=rest,
            counts=whole & run.warm[told],
        )


@dataclass(frozen=True, kw_only=True)
class PlanTaken:
    """A plan: behind which step it was taken and asked for, and the first step without trials of cuts."""

    step: float
    asked: float
    since: float


def gain_of(run: RunData) -> Gain | None:
    predicted = [run.steps.column(f"plan_{when}_ms") for when in ("before", "after")]
    at = np.flatnonzero(np.isfinite(predicted[0]) & np.isfinite(predicted[1]))
    if not len(at):
        return None
    # What older runs do not tell is no number, and compares with none: nothing is left out.
    asked, since = (run.steps.column(f"plan_{name}") for name in ("step", "since"))
    plans = [PlanTaken(step=run.steps.step[k], asked=asked[k], since=since[k]) for k in at]
    first, last = ((float(predicted[0][k]), float(predicted[1][k])) for k in (at[0], at[-1]))
    return estimate(Lines.of(run), cost_of_a_row(run), plans, (first, last))


def estimate(
    lines: Lines | None,
    cost: float | None,
    plans: list[PlanTaken],
    predicted_ms: tuple[tuple[float, float], tuple[float, float]] = ((0, 0), (0, 0)),
) -> Gain:
    """`plans` in their order, one at least."""
    spans = [] if lines is None else list(spans_of(lines, plans))
    if lines is None or min(len(spans[0]), len(spans[-1])) < FEWEST_STEPS:
        return Gain(plans=len(plans), predicted_ms=predicted_ms, above=None, rows=None, clock=None)
    shape = shape_of(spans)
    left, right = spans[0][-shape.before :], spans[-1][: shape.after]

    def around(values: np.ndarray) -> tuple[float, float]:
        return float(np.median(values[left])), float(np.median(values[right]))

    def difference(values: np.ndarray) -> Difference:
        before, after = around(values)
        return Difference(ms=before - after, noise_ms=noise_of([values[span] for span in spans], shape))

    rows = None
    if cost is not None:
        waited, waits = around(lines.straggle_ms)
        found = difference(cost * lines.above)
        rows = Difference(ms=min(max(found.ms, -waits), waited), noise_ms=found.noise_ms)
    still, moved = around(lines.rest_ms)
    return Gain(
        plans=len(plans),
        predicted_ms=predicted_ms,
        above=around(lines.above),
        rows=rows,
        clock=difference(lines.step_ms),
        moved_ms=still - moved,
    )


def spans_of(lines: Lines, plans: list[PlanTaken]) -> Iterator[np.ndarray]:
    """Lines that count before the first plan, between it and the second, ..., after the last one.

    Steps that move experts are left out, and those beside which a plan was made or cuts of rows were tried:
    they are slow for that.
    """
    begin = -np.inf
    for plan in plans:
        beside = (lines.step > plan.asked) | (lines.step < plan.since)
        yield np.flatnonzero(lines.counts & (lines.step > begin) & (lines.step < plan.step) & ~beside)
        begin = plan.step
    yield np.flatnonzero(lines.counts & (lines.step > begin))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a place: lines on both sides, and those in between that count on neither."""

    before: int
    gap: int
    after: int

    @property
    def length(self) -> int:
        return self.before + self.gap + self.after


def shape_of(spans: list[np.ndarray]) -> Shape:
    """As many steps on both sides as leave enough placebos; without those, as many as there are."""
    first, last = spans[0], spans[-1]
    gap = int(last[0] - first[-1]) - 1
    shapes = [
        Shape(before=min(most, len(first)), gap=gap, after=min(most, len(last)))
        for most in range(MOST_STEPS, FEWEST_STEPS - 1, -1)
    ]
    told = (shape for shape in shapes if sum(len(span) // shape.length for span in spans) >= LEAST_PLACEBOS)
    return next(told, shapes[0])


def noise_of(spans: list[np.ndarray], shape: Shape) -> float | None:
    """Half of what most placebos stay below; None: there are too few."""
    if sum(len(span) // shape.length for span in spans) < LEAST_PLACEBOS:
        return None
    found = [placebos(values, shape) for values in spans if len(values) >= shape.length]
    return float(np.quantile(np.abs(np.concatenate(found)), BELOW)) / 2


def placebos(values: np.ndarray, shape: Shape) -> np.ndarray:
    """Differences at all places of such a shape, or at many of them."""
    windows = sliding_window_view(values, shape.length)
    windows = windows[:: -(-len(windows) // MOST_PLACEBOS)]
    before, after = windows[:, : shape.before], windows[:, shape.length - shape.after :]
    return np.asarray(np.median(before, axis=1) - np.median(after, axis=1))
