"""Schedules side by side on equal terms: the same model, ranks, microbatches and costs for each.

Every rank holds the same number of layers, whatever the number of stages they are cut into; DualPipe keeps
two copies of the model, so each of its stages holds a whole rank's share. Memory is counted in activations
of one rank's share of the model for one microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from moeclipse.core.errors import ScheduleError
from moeclipse.cost.model import Costs
from moeclipse.schedule import kinds
from moeclipse.schedule.catalogue import IN_GROUPS, build
from moeclipse.schedule.check import verify
from moeclipse.schedule.kinds import Part
from moeclipse.schedule.legal import SCHEDULES, default_stages_per_rank
from moeclipse.schedule.op import Program, overlap_alone
from moeclipse.schedule.shape import Activation, LayerShape, Recompute
from moeclipse.schedule.templates import Expansion, expand
from moeclipse.sim.durations import tells_self_overlap
from moeclipse.sim.engine import Simulation, simulate
from moeclipse.sim.measure import Summary, summarise

CLOSE = 1.10
"""Makespans within this factor count as equal when memory decides."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be simulated, apart from the schedule."""

    ranks: int
    microbatches: int
    costs: Costs
    stages_per_rank: int | None = None
    group_size: int = 0
    """Of vpp and vpp+1; 0: the usual one."""
    budget: int = 0
    """Of zb-m."""
    layers: int = 4
    """Per rank (only where costs speak of layer ops)."""
    recompute: Recompute = "off"
    memory_limit: float | None = None
    """Most activations a rank may hold, in those of its layers for one microbatch."""
    expansion: Expansion = field(default_factory=lambda: Expansion(chunks=2))

    @property
    def by_layer(self) -> bool:
        return kinds.ATTN_F.name in self.costs.seconds


@dataclass(frozen=True, kw_only=True)
class Answer:
    name: str
    result: Simulation
    summary: Summary
    model_copies: int
    stages_per_rank: int
    bytes_of: tuple[float, ...] = ()
    """Of each rank at its peak, state and all; empty: nobody counted them."""

    @property
    def exchange_hidden(self) -> float | None:
        """Part of dispatch and combine that is hidden; None without any."""
        exchange = self.summary.communication(Part.DISPATCH, Part.COMBINE)
        return exchange.hidden / exchange.total if exchange.total else None


def ask(question: Question, schedule: str, program: Program | None = None) -> Answer:
    """Simulate one schedule (or a given program of whole actions)."""
    if program is None:
        stages, orders = _stages(question, schedule), orders_of(question, schedule)
        program = build(schedule, question.ranks, question.microbatches, stages, **orders)
    placement = program.pipeline().placement
    per_rank = max(len(placement.stages_of(rank)) for rank in range(placement.num_ranks))
    share = per_rank // placement.num_chains  # stages that together hold one rank's share of the model
    if question.by_layer:
        verified = verify(_layers(question, program, share), question.memory_limit)
        result = simulate(verified, question.costs)
    else:
        if tells_self_overlap(question.costs):
            program = overlap_alone(program)
        seconds = {kind: value / share for kind, value in question.costs.seconds.items()}
        verified = verify(_shared_memory(program, share), question.memory_limit)
        result = simulate(verified, replace(question.costs, seconds=seconds))
    return Answer(
        name=schedule,
        result=result,
        summary=summarise(result),
        model_copies=placement.num_chains,
        stages_per_rank=per_rank,
    )


def _stages(question: Question, schedule: str) -> int | None:
    """In a comparison, stages per rank apply where a schedule has a choice."""
    return question.stages_per_rank if default_stages_per_rank(schedule) > 1 else None


def orders_of(question: Question, schedule: str) -> dict[str, int]:
    """Groups and budget, of schedules that have them."""
    given = {"group_size": question.group_size if schedule in IN_GROUPS else 0}
    return given | {"budget": question.budget if schedule == "zb-m" else 0}


def _layers(question: Question, program: Program, share: int) -> Program:
    if question.layers % share:
        raise ScheduleError(
            f"{program.name} cuts the {question.layers} layers of a rank into {share} stages; "
            f"choose a number of layers that {share} divides"
        )
    whole = Activation()
    size = Activation(
        input=whole.input / question.layers,
        attn=whole.attn / question.layers,
        shared=whole.shared / question.layers,
        mlp=whole.mlp / question.layers,
    )
    shared = kinds.SHARED_F.name in question.costs.seconds
    if not shared:
        size = replace(size, mlp=size.mlp + size.shared, shared=0.0)
    layer = LayerShape(shared=shared, recompute=question.recompute, activation=size)
    return expand(program, [layer] * (question.layers // share), question.expansion)


def _shared_memory(program: Program, share: int) -> Program:
    if share == 1:
        return program
    ranks = tuple(
        tuple(op._replace(alloc=op.alloc / share, free=op.free / share) for op in ops)
        for ops in program.ranks
    )
    return replace(program, ranks=ranks, shape=replace(program.pipeline(), unit=1 / share))


def ask_all(question: Question, schedules: Sequence[str] = SCHEDULES) -> tuple[list[Answer], dict[str, str]]:
    """Answers, fastest first, and why the others were refused."""
    answers, refused = [], {}
    for name in schedules:
        try:
            answers.append(ask(question, name))
        except ScheduleError as error:
            refused[name] = str(error)
    return sorted(answers, key=lambda answer: answer.summary.makespan), refused


def advise(answers: Sequence[Answer]) -> list[str]:
    """Which one, and why, in sentences; `answers` are sorted by makespan."""
    if len(answers) < 2:
        return []
    best, second = answers[0], answers[1]
    lines = [f"{best.name} is fastest: {_why(best, second)}."]
    close = [
        answer
        for answer in answers
        if answer.summary.makespan <= CLOSE * best.summary.makespan
        and answer.model_copies <= best.model_copies
    ]
    lean = min(close, key=lambda a: (max(a.summary.peak), a.summary.makespan))
    if lean is not best and max(lean.summary.peak) < 0.98 * max(best.summary.peak):
        slower = lean.summary.makespan / best.summary.makespan - 1
        less = 1 - max(lean.summary.peak) / max(best.summary.peak)
        lines.append(
            f"{lean.name} is {slower:.1%} slower and holds {less:.0%} less activation memory: "
            "take it if memory is short."
        )
    if best.model_copies > 1:
        single = next((a for a in answers if a.model_copies == 1), None)
        if single is not None:
            lines.append(
                f"{best.name} keeps two copies of the parameters; with one copy {single.name} is fastest."
            )
    return lines


def _why(best: Answer, second: Answer) -> str:
    """The part of the makespan in which the fastest gains most over the next."""
    gain = second.summary.makespan - best.summary.makespan
    ahead = gain / second.summary.makespan
    if ahead < 0.002:
        return f"level with {second.name}"
    parts = {}
    for label, attribute in (("less exposed communication", "exposed"), ("less idle time", "idle")):
        means = [
            sum(getattr(rank, attribute) for rank in a.summary.ranks) / len(a.summary.ranks)
            for a in (best, second)
        ]
        parts[label] = means[1] - means[0]
    reason = max(parts, key=lambda label: parts[label])
    return f"{ahead:.1%} ahead of {second.name}, mostly by {reason}"
