"""Which layout fits, and how fast it is: all of them by formulas, the best by simulation.

    axes        divisors of the GPUs: pp x dp x ep x tp, tp inside a node, experts shared evenly
    choices     sequences of a microbatch, schedule, stages per rank, recompute, overlap
    dropped     by bytes, by what schedules need, and by whatever rules the caller has
    ranked      by a bound: the busiest rank's work, the bubble by its formula, the end of the step
    simulated   the best few dozen, with their stages cut evenly and their bytes counted action by action

Contract: a pure function of what it is given: no clock and no randomness, so equal questions have equal
answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from moeclipse.cost.sizes import ModelSizes
from moeclipse.cost.step_bytes import ALONE, APART, Again, Sharing, StateBytes, beside, standing
from moeclipse.plan.step import Layout, Step, StepTime, Terms
from moeclipse.schedule import kinds
from moeclipse.schedule.interleaved import group_sizes
from moeclipse.schedule.legal import broken_rules
from moeclipse.schedule.op import Op, Program

SAMPLES = (1, 2, 4, 8)
STAGES = (2, 3, 4, 6, 8)
MOST_STAGES = 64
LADDER: tuple[Again, ...] = ("off", "attn", "mlp", "full")
VALUE_BYTES = 2.0
SIMULATED = 40
ALIKE = 4
"""Of layouts that differ in schedule or recompute alone, so many are simulated at most."""


@dataclass(frozen=True, kw_only=True)
class Request:
    terms: Terms
    num_gpus: int
    batch: int
    """Sequences of a step."""
    state: StateBytes = field(default_factory=StateBytes)
    imbalance: float = 1.1
    """Rows of the busiest rank, in mean ranks, that memory must have room for."""
    refuse: Callable[[Plan], str] = lambda _: ""
    """Why a plan cannot be run; empty: it can."""

    @property
    def fused(self) -> bool:
        """Whether experts run in our kernels."""
        return self.terms.cluster.device.name != "cpu"

    def room(self, layout: Layout) -> float:
        """Bytes of a device that may be taken."""
        return self.terms.cluster.device.memory * (APART if layout.ep * layout.tp > 1 else ALONE)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One layout with what it takes."""

    layout: Layout
    stages: tuple[int, ...]
    time: StepTime
    bytes_of: tuple[float, ...]
    """At the peak of each rank of the pipeline."""
    room: float

    @property
    def peak(self) -> float:
        return max(self.bytes_of)


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """The layout that takes least, where none fits."""

    layout: Layout
    peak: float
    room: float


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    plans: tuple[Plan, ...]
    """Fastest first."""
    considered: int
    dropped: dict[str, int]
    """How many, by reason."""
    nearest: Nearest | None = None


@dataclass(frozen=True, kw_only=True)
class Candidate:
    layout: Layout
    bound: float
    peak: float


def search(request: Request, progress: Callable[[int, int], None] = lambda *_: None) -> SearchResult:
    """`progress` is told how many of the simulated ones are done."""
    dropped: Counter[str] = Counter()
    nearest: Nearest | None = None
    candidates: list[Candidate] = []
    considered = 0
    for candidate in candidates_of(request):
        considered += 1
        layout, room = candidate.layout, request.room(candidate.layout)
        if candidate.peak <= room:
            candidates.append(candidate)
            continue
        dropped["memory"] += 1
        if nearest is None or candidate.peak / room < nearest.peak / nearest.room:
            nearest = Nearest(layout=layout, peak=candidate.peak, room=room)
    plans: list[Plan] = []
    chosen = shortlist(candidates)
    for number, candidate in enumerate(chosen):
        progress(number, len(chosen))
        plan = plan_of(request, candidate.layout)
        if plan.peak > plan.room:
            dropped["memory"] += 1
        elif reason := request.refuse(plan):
            dropped[reason] += 1
        else:
            plans.append(plan)
    progress(len(chosen), len(chosen))
    plans.sort(key=lambda plan: (plan.time.seconds, plan.layout.title))
    return SearchResult(
        plans=tuple(plans),
        considered=considered,
        dropped=dict(dropped),
        nearest=None if plans else nearest,
    )


def shortlist(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The best by their bound, not too many of one kind."""
    ordered = sorted(candidates, key=lambda each: (each.bound, each.layout.title))
    seen: Counter[tuple[int, ...]] = Counter()
    chosen = []
    for each in ordered:
        axes = each.layout
        key = (axes.pp, axes.dp, axes.ep, axes.tp, axes.samples)
        seen[key] += 1
        if seen[key] <= ALIKE:
            chosen.append(each)
        if len(chosen) == SIMULATED:
            break
    return chosen


def axes_of(request: Request) -> Iterator[Layout]:
    """Axes and sequences of a microbatch, as far as sizes divide each other."""
    model, cluster, gpus = request.terms.model, request.terms.cluster, request.num_gpus
    heads = model.num_heads if model.kv_rank else model.kv_heads
    for pp in divisors(gpus):
        if pp > min(model.num_layers, MOST_STAGES):
            continue
        for tp in divisors(gpus // pp):
            if tp > cluster.gpus_per_node or heads % tp or request.terms.sequence % tp:
                continue
            for ep in divisors(gpus // (pp * tp)):
                if any(model.moe_layers) and model.experts.num_experts % (ep * tp):
                    continue
                if not any(model.moe_layers) and ep > 1:
                    continue
                dp = gpus // (pp * tp * ep)
                for samples in SAMPLES:
                    microbatches, rest = divmod(request.batch, dp * ep * samples)
                    if rest == 0 and microbatches:
                        yield Layout(pp=pp, dp=dp, ep=ep, tp=tp, samples=samples, microbatches=microbatches)


def schedules_of(layout: Layout, num_layers: int) -> Iterator[Layout]:
    if layout.pp == 1:
        yield layout
        if layout.microbatches > 1 and layout.ep * layout.tp > 1:
            yield replace(layout, schedule="pp1", overlap="pair")
        return
    for name in ("1f1b", "zb-h1", "zb-h2", "zb-v", "vpp", "vpp+1", "1f1b-pairs", "dualpipev"):
        per_rank = STAGES if name.startswith("vpp") else (2 if name in ("zb-v", "dualpipev") else 1,)
        for stages in per_rank:
            if layout.pp * stages > num_layers or broken_rules(name, layout.pp, layout.microbatches, stages):
                continue
            paired = name in ("vpp+1", "1f1b-pairs", "dualpipev")
            yield replace(layout, schedule=name, stages_per_rank=stages, overlap="pair" if paired else "off")


def candidates_of(request: Request) -> Iterator[Candidate]:
    """Of each axes and schedule, the fastest recompute that fits, or the one that takes least."""
    model = request.terms.model
    known: dict[tuple[object, ...], Step] = {}
    for axes in axes_of(request):
        for layout in schedules_of(axes, model.num_layers):
            fit: list[Candidate] = []
            least: Candidate | None = None
            for again in LADDER:
                each = replace(layout, recompute=again)
                key = (each.tp, each.ep, each.samples, again, each.overlap)
                if key not in known:
                    known[key] = Step(request.terms, each)
                    known[key].layers  # noqa: B018 (priced once)
                peak = rough_peak(request, each)
                found = Candidate(layout=each, bound=bound(known[key], each), peak=peak)
                if peak <= request.room(each):
                    fit.append(found)
                elif least is None or peak < least.peak:
                    least = found
            if fit:
                yield min(fit, key=lambda each: (each.bound, LADDER.index(each.layout.recompute)))
            elif least is not None:
                yield least


def fits(request: Request) -> bool:
    """Whether any layout does, by the rough count."""
    model = request.terms.model
    return any(
        rough_peak(request, replace(layout, recompute=again)) <= request.room(layout)
        for axes in axes_of(request)
        for layout in schedules_of(axes, model.num_layers)
        for again in LADDER
    )


def bound(priced: Step, layout: Layout) -> float:
    """Seconds: the busiest rank's work as if layers were even, a bubble by its formula, the update."""
    head = sum(priced.parts["head"])
    name = "pair" if layout.overlap != "off" else ""
    each = [prices.pair if name else prices.F + prices.B for prices in priced.layers]
    longest = max(each)
    stages = layout.num_stages
    stage = max(-(-(sum(each) + head) // (stages * longest)) * longest - longest / 2, head + longest)
    stage = max(stage, (sum(each) + head) / stages)
    rank = stage * layout.stages_per_rank
    ramp = (layout.pp - 1) * stage
    if layout.schedule in ("1f1b-pairs",):
        ramp *= 2
    if layout.schedule.startswith(("zb", "dual")):
        ramp /= 2
    wires = priced.work.transfer(layout.dp * layout.ep * layout.tp) * layout.stages_per_rank
    return layout.microbatches * (rank + (wires if layout.pp > 1 else 0.0)) + ramp


def rough_peak(request: Request, layout: Layout) -> float:
    """Bytes of the fullest rank, with layers as even as numbers allow."""
    model = request.terms.model
    sharing = Sharing(
        dp=layout.dp, ep=layout.ep, tp=layout.tp, imbalance=request.imbalance, fused=request.fused
    )
    tokens = layout.samples * request.terms.sequence
    per_stage = -(-model.num_layers // layout.num_stages)
    layers = min(per_stage * layout.stages_per_rank, model.num_layers)
    last = range(model.num_layers - layers, model.num_layers)
    moe, part = any(model.moe_layers), model.training(model.num_layers - 1)
    kept = per_stage * sharing.layer(model, moe, tokens, VALUE_BYTES, layout.recompute, part)
    tables = (layout.pp == 1 and not model.tied, True)
    state = state_of_layers(request.state, model, sharing, last, tables)
    rest = beside(model, sharing, tokens, VALUE_BYTES, program=runs_program(layout), head=True)
    return state + kept * in_flight(layout) + rest


@lru_cache(maxsize=4096)
def state_of_layers(
    state: StateBytes, model: ModelSizes, sharing: Sharing, layers: range, tables: tuple[bool, bool]
) -> float:
    """Kept: a sum over layers, and the same whatever the schedule and the microbatches."""
    return state.of(model, sharing.held(model, layers, tables))


def runs_program(layout: Layout) -> bool:
    several = layout.num_ranks > 1 and layout.recompute != "off"
    return layout.pp > 1 or layout.overlap != "off" or several


def in_flight(layout: Layout) -> int:
    """Most activations that a rank holds, in those of a stage for one microbatch."""
    P, V, M = layout.pp, layout.stages_per_rank, layout.microbatches
    G = max(group_sizes(P, M))
    most = {
        "1f1b": P,
        "zb-h1": P,
        "zb-h2": 2 * P - 1,
        "pp1": 1,
        "1f1b-pairs": 2 * P - 1,
        "zb-v": 2 * P,
        "dualpipev": 2 * P + 1,
        "vpp": 2 * (P - 1) + (V - 1) * G + 1,
        "vpp+1": 2 * (P - 1) + (V - 1) * G + 1,
    }[layout.schedule]
    return min(most, M * V)


def plan_of(request: Request, layout: Layout, stages: Sequence[int] | None = None) -> Plan:
    step = Step(request.terms, layout, stages)
    return Plan(
        layout=layout,
        stages=step.stages,
        time=step.time(),
        bytes_of=peak_bytes(request, step),
        room=request.room(layout),
    )


def peak_bytes(request: Request, step: Step) -> tuple[float, ...]:
    """Of each rank of the pipeline, action by action."""
    layout, model = step.layout, request.terms.model
    sharing = Sharing(
        dp=layout.dp * layout.copies,
        ep=layout.ep,
        tp=layout.tp,
        imbalance=request.imbalance,
        fused=request.fused,
    )
    tokens = layout.samples * request.terms.sequence
    firsts = [sum(step.stages[:number]) for number in range(len(step.stages))]
    held = [range(first, first + count) for first, count in zip(firsts, step.stages, strict=True)]
    kinds_of = [(moe, model.training(layer)) for layer, moe in enumerate(model.moe_layers)]
    sizes = {
        kind: sharing.layer(model, kind[0], tokens, VALUE_BYTES, layout.recompute, kind[1])
        for kind in set(kinds_of)
    }
    kept = [sum(sizes[kinds_of[i]] for i in layers) for layers in held]
    program = step.program(min(layout.microbatches, 3 * layout.pp))
    placement = program.pipeline().placement
    found = []
    for rank, most in enumerate(most_kept(program, kept)):
        mine = [stage % len(step.stages) for stage in placement.stages_of(rank)]
        rest = standing(
            model,
            sharing,
            request.state,
            held,
            mine,
            tokens,
            VALUE_BYTES,
            program=runs_program(layout),
        )
        found.append(most + rest)
    return tuple(found)


def most_kept(program: Program, kept: Sequence[float]) -> Iterator[float]:
    """Of each rank, by what its stages keep of a microbatch.

    In a pair one microbatch keeps a layer while another gives one back: what is beside them has room for it.
    """
    for ops in program.ranks:
        now = most = 0.0
        for op in ops:
            now += sum(_change(leaf, kept) for leaf in op.leaves)
            most = max(most, now)
        yield most


def _change(action: Op, kept: Sequence[float]) -> float:
    assert action.stage is not None
    sign = {kinds.F: 1.0, kinds.B: -1.0, kinds.W: -1.0, kinds.I: 0.0}[action.kind]
    return sign * kept[action.stage % len(kept)]


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
