"""What would have helped a run: a setting, what it would win, and from which numbers that follows.

Rules are small pure functions of a run and its measures; each looks at one cause. A gain is predicted from
what the run itself has measured, or, where it has measured nothing of the alternative, given as what it could
win at most. What wins less than WORTH of a step is not said, so no advice is a good sign.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from moeclipse.core.errors import ConfigError, ScheduleError
from moeclipse.core.program import command
from moeclipse.cost.file import load_costs
from moeclipse.report.cures import cures_of
from moeclipse.report.gain import short
from moeclipse.report.run import RunData, number
from moeclipse.report.skew import PLANNER, outlook, probe_of, skew_ms
from moeclipse.sim.compare import Question, ask

WORTH = 0.01
"""Of a step, at least: less is noise."""
UNEVEN = 0.95
"""Mean over fullest rank above which nobody has to move."""
SCHEDULES = ("1f1b", "zb-h1", "zb-v", "dualpipev")
Values = Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Advice:
    setting: str
    """As a flag of `moeclipse train`, or a command."""
    why: str
    gain_ms: float | None = None
    """Of a step; None where it wins no time."""
    at_most: bool = False
    """The gain is a bound, not a prediction."""

    def in_words(self, step_ms: float | None) -> str:
        if self.gain_ms is None or not step_ms:
            return f"{self.setting}: {self.why}"
        share = f"{'at most ' if self.at_most else ''}{100 * self.gain_ms / step_ms:.0f} % of a step"
        return f"{self.setting}: wins {share} ({short(self.gain_ms)} ms); {self.why}"


def advise_run(run: RunData, measures: Values) -> list[Advice]:
    """The largest gain first, what wins no time last."""
    step_ms = measures["step_ms"] or 0.0
    found = [advice for rule in RULES for advice in rule(run, measures)]
    worth = [one for one in found if one.gain_ms is None or one.gain_ms >= WORTH * step_ms > 0]
    return sorted(worth, key=lambda one: -(one.gain_ms or 0.0))


def overlap_exchange(run: RunData, measures: Values) -> Iterator[Advice]:
    """Rows that travel while nothing is computed."""
    schedule, exposed = run.config.get("moe.schedule"), measures["exposed_ms"]
    if run.num_ranks == 1 or schedule != "blocking" or not exposed:
        return
    yield Advice(
        setting="--moe.schedule auto",
        gain_ms=exposed,
        at_most=True,
        why=f"{exposed:.1f} ms of communication are exposed, and blocking exchanges hide nothing of it; "
        "auto tries units and keeps what is faster",
    )


def other_wire(run: RunData, measures: Values) -> Iterator[Advice]:
    """Rows through sockets, where ranks may have memory in common, or a host of their own to gather in."""
    exposed, hosts = measures["exposed_ms"], run.choices.get("hosts") or []
    if run.num_ranks == 1 or run.config.get("moe.transport") != "direct" or not exposed:
        return
    # A device has the wires of its library, and ranks that are alone on their hosts have no other.
    if run.steps.has("mfu") or (hosts and len(set(hosts)) == len(hosts)):
        return
    yield Advice(
        setting="--moe.transport auto",
        gain_ms=exposed,
        at_most=True,
        why=f"{exposed:.1f} ms of communication are exposed, and rows go from rank to rank by sockets; auto "
        "tries what ranks of one host share and keeps what is faster",
    )


def overlap_microbatches(run: RunData, measures: Values) -> Iterator[Advice]:
    """The same, where another microbatch could be computed meanwhile."""
    exposed, microbatches = measures["exposed_ms"], number(run.config.get("optim.accumulate"), 1)
    if run.num_ranks == 1 or run.config.get("pipeline.overlap") != "off" or microbatches < 2 or not exposed:
        return
    yield Advice(
        setting="--pipeline.overlap auto",
        gain_ms=exposed,
        at_most=True,
        why=f"a step has {microbatches:.0f} microbatches, and {exposed:.1f} ms of communication are exposed; "
        "auto lets one compute while rows of another travel, where that is predicted to be faster",
    )


def cut_less(run: RunData, _: Values) -> Iterator[Advice]:
    """Exchanges that were cut, and take longer than whole ones are predicted to."""
    layers = [one for one in run.summary.get("exchange") or [] if isinstance(one, dict)]
    pairs = [(number(one.get("measured_ms"), -1), number(one.get("blocking_ms"), -1)) for one in layers]
    lost = sum(measured - whole for measured, whole in pairs if measured > 0 and whole > 0)
    if lost > 0 and run.config.get("moe.schedule") == "smart":  # auto has tried whole ones, too
        yield Advice(
            setting="--moe.schedule auto",
            gain_ms=lost,
            at_most=True,  # a measurement against a prediction: that may be wrong, too
            why="exchanges in units were measured to take longer than whole ones are predicted to",
        )


def even_ranks(run: RunData, measures: Values) -> Iterator[Advice]:
    """Ranks that wait for the one with most rows: by the objective of planners, or by what rows cost."""
    straggle, balance = measures["straggle_ms"], measures["balance"]
    if not straggle or balance is None or balance > UNEVEN:
        return
    if run.config.get("placement.planner", "static") != "static":
        yield from measured_prices(run, balance)
        return
    see = f"see {command('place', run.directory)}"
    would = outlook(run)
    cures = cures_of(run)
    if cures is not None:
        see = f"replayed on the run's own loads: {cures.in_words()}; see {command('skew', run.directory)}"
    if would is not None:
        yield Advice(
            setting=f"--placement.planner {would.planner}",
            gain_ms=would.gain_ms,
            why=f"ranks at {balance:.2f}; planned placement predicts a step {would.faster:.2f} x faster; "
            f"{see}",
        )
        return
    gain = skew_ms(run)
    if (
        gain is not None and probe_of(run.choices) is None
    ):  # with costs, a planner has said that nothing helps
        yield Advice(
            setting=f"--placement.planner {PLANNER}",
            gain_ms=gain,
            at_most=True,
            why=f"ranks at {balance:.2f}: those with fewer rows wait for the fullest ({straggle:.1f} ms of "
            f"straggle, for whatever reason); {see}",
        )


def measured_prices(run: RunData, balance: float) -> Iterator[Advice]:
    """A planner that is on, decides by prices that are written down, and leaves ranks uneven."""
    cures = cures_of(run)
    if cures is None or not cures.by_the_book or cures.own.gain_ms <= 0:
        return
    yield Advice(
        setting="--run.deterministic false",
        gain_ms=cures.own.gain_ms,
        at_most=True,
        why=f"ranks at {balance:.2f} with a planner on, which decides by prices that are written down, not "
        f"by this machine's; {cures.in_words()}; see {command('skew', run.directory)}",
    )


def shorter_bubble(run: RunData, measures: Values) -> Iterator[Advice]:
    """Schedules of the same pipeline, simulated with F : I : W = 1 : 1 : 1."""
    pp, microbatches = (int(number(run.config.get(key), 1)) for key in ("parallel.pp", "optim.accumulate"))
    step_ms, now = measures["step_ms"], run.config.get("pipeline.schedule", "auto")
    if not 1 < pp <= 16 or microbatches > 256 or not step_ms:
        return
    if run.config.get("pipeline.overlap", "off") not in (
        "off",
        "auto",
    ):  # which decides between schedules by other costs
        return
    question = Question(ranks=pp, microbatches=microbatches, costs=load_costs("unit"))
    times = {}
    for name in (*SCHEDULES, str(now)):
        try:
            times[name] = ask(question, "1f1b" if name == "auto" else name).summary.makespan
        except (ScheduleError, ConfigError):
            continue
    if now not in times:
        return
    best = min(times, key=lambda name: times[name])
    if best != now:
        yield Advice(
            setting=f"--pipeline.schedule {best}",
            # A schedule computes as much as another: it wins what is not compute, at most.
            gain_ms=min(step_ms * (1 - times[best] / times[now]), step_ms - (measures["compute_ms"] or 0.0)),
            why=f"{microbatches} microbatches through {pp} stages, simulated with equal F, dX and dW",
        )


def save_beside(run: RunData, measures: Values) -> Iterator[Advice]:
    saves = run.summary.get("saves")
    begun, stall = (number((saves or {}).get(key), 0) for key in ("begun", "stall_ms"))
    steps = measures["steps"] or 0
    waits = run.config.get("checkpoint.asynchronous", run.config.get("checkpoint.beside"))  # its name in 0.1
    if waits is False and begun and steps:
        yield Advice(
            setting="--checkpoint.asynchronous true",
            gain_ms=begun * stall / steps,
            at_most=True,
            why=f"training stood still for {begun:.0f} checkpoints, {stall:.0f} ms each",
        )


def keep_rows(_: RunData, measures: Values) -> Iterator[Advice]:
    if measures["dropped"]:
        yield Advice(
            setting="--gate.capacity-factor 0",
            why=f"{measures['dropped']:,.0f} rows were dropped over capacity: their tokens learned less",
        )


def calmer_steps(_: RunData, measures: Values) -> Iterator[Advice]:
    skipped, steps = measures["skipped"] or 0, measures["steps"] or 1
    if skipped / steps > WORTH:
        yield Advice(
            setting="--optim.lr (lower)",
            why=f"{skipped:.0f} of {steps:.0f} steps were not finite and changed nothing",
        )


def keep_best(run: RunData, measures: Values) -> Iterator[Advice]:
    last, best = measures["eval_loss"], measures["eval_best"]
    if last is not None and best is not None and last > best + WORTH and not run.config.get("eval.keep_best"):
        yield Advice(
            setting="--eval.keep-best true",
            why=f"held-out loss was {best:.3f} and rose to {last:.3f}: the best state is not the last",
        )


RULES: tuple[Callable[[RunData, Values], Iterator[Advice]], ...] = (
    overlap_exchange,
    other_wire,
    overlap_microbatches,
    cut_less,
    even_ranks,
    shorter_bubble,
    save_beside,
    keep_rows,
    calmer_steps,
    keep_best,
)
