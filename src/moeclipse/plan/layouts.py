"""Which layout fits, and how fast it is: all of them by formulas, the best by simulation.

    axes        divisors of the GPUs: pp x dp x ep x tp, tp inside a node, experts shared evenly
    choices     sequences of a microbatch, schedule, stages per rank, recompute, overlap; of zb-m as many
                microbatches as there is room for; state on the host, as much as must leave the device, and
                where nothing fits without, inputs of layers, and weights of experts on one GPU
    dropped     by bytes, by what schedules need, and by whatever rules the caller has
    ranked      by a bound: the busiest rank's work, the bubble by its formula, the end of the step
    simulated   the best few dozen, with their stages cut evenly and their bytes counted action by action

Contract: a pure function of what it is given: no clock and no randomness, so equal questions have equal
answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from moeclipse.cost.step_bytes import Again
from moeclipse.plan.layout import Layout
from moeclipse.plan.question import Nearest, Plan, Request, SearchResult
from moeclipse.plan.rank_bytes import Rough, counted, on_device, roughly
from moeclipse.plan.step import Step
from moeclipse.schedule.input_travel import WEIGHTS_AT_ONCE
from moeclipse.schedule.legal import broken_rules

SAMPLES = (1, 2, 4, 8)
MORE_SAMPLES, MOST_TOKENS = (16, 32, 64), 64 * 1024
"""Of a microbatch, as long as it has no more tokens than that."""
STAGES = (2, 3, 4, 6, 8)
FOLDS, MOST_ORDERED = (1, 2, 3), 16
"""Of zb-m: stages a rank, and ranks beyond which its search takes longer than all the rest."""
MOST_STAGES = 64
LADDER: tuple[Again, ...] = ("off", "attn", "mlp", "full")
SIMULATED = 40
ALIKE = 4
"""Of layouts that differ in schedule or recompute alone, so many are simulated at most."""


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
        elif reason := plan.host_problem(request.terms.place.host_room) or request.refuse(plan):
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
                for samples in samples_of(request.terms.sequence):
                    microbatches, rest = divmod(request.batch, dp * ep * samples)
                    if rest == 0 and microbatches:
                        yield Layout(pp=pp, dp=dp, ep=ep, tp=tp, samples=samples, microbatches=microbatches)


def samples_of(sequence: int) -> tuple[int, ...]:
    return SAMPLES + tuple(each for each in MORE_SAMPLES if each * sequence <= MOST_TOKENS)


def schedules_of(layout: Layout, num_layers: int, *, by_layer: bool = False) -> Iterator[Layout]:
    """`by_layer`: one rank updates a layer as soon as its gradients are there, or its experts may travel."""
    if layout.pp == 1:
        yield layout
        if by_layer and layout.num_ranks == 1 and layout.microbatches > 1:
            yield replace(layout, schedule="layers", stages_per_rank=num_layers)
        if layout.microbatches > 1 and layout.ep * layout.tp > 1:
            yield replace(layout, schedule="pp1", overlap="pair")
        return
    for name in ("1f1b", "zb-h1", "zb-h2", "zb-m", "zb-v", "vpp", "vpp+1", "1f1b-pairs", "dualpipev"):
        for stages in stages_of(name, layout.pp):
            if layout.pp * stages > num_layers or broken_rules(name, layout.pp, layout.microbatches, stages):
                continue
            paired = name in ("vpp+1", "1f1b-pairs", "dualpipev")
            yield replace(layout, schedule=name, stages_per_rank=stages, overlap="pair" if paired else "off")


def stages_of(name: str, pp: int) -> tuple[int, ...]:
    """That a rank may have."""
    if name == "zb-m":
        return FOLDS if pp <= MOST_ORDERED else ()
    if name.startswith("vpp"):
        return STAGES
    return (2,) if name in ("zb-v", "dualpipev") else (1,)


def candidates_of(request: Request) -> Iterator[Candidate]:
    """Of each axes and schedule, the fastest recompute that fits, or the one that takes least."""
    known: dict[tuple[object, ...], Step] = {}
    for layout in layouts_of(request):
        fit: list[Candidate] = []
        least: Candidate | None = None
        place = request.terms.place
        for again, inputs, weights in ladder_of(request, layout):
            asked = (inputs and place.inputs == "auto") or (weights and place.weights == "auto")
            if fit and asked:
                break
            each = replace(layout, recompute=again, inputs=inputs, weights=weights)
            once = weights and each.schedule == "layers" and each.microbatches
            key = (each.tp, each.ep, each.samples, again, inputs, weights, once, each.overlap)
            if key not in known:
                known[key] = Step(request.terms, each)
                known[key].layers  # noqa: B018 (priced once)
            rough = roughly(request, each)
            seconds = bound(known[key], rough.layout) + copies_bound(request, known[key], rough)
            found = Candidate(layout=rough.layout, bound=seconds, peak=rough.peak)
            if rough.peak <= request.room(each):
                fit.append(found)
            elif least is None or rough.peak < least.peak:
                least = found
        if fit:
            yield min(fit, key=lambda each: (each.bound, LADDER.index(each.layout.recompute)))
        elif least is not None:
            yield least


def layouts_of(request: Request) -> Iterator[Layout]:
    place = request.terms.place
    one_by_one = place.by_layer or place.weights != "device"
    for axes in axes_of(request):
        yield from schedules_of(axes, request.terms.model.num_layers, by_layer=one_by_one)


def ladder_of(request: Request, layout: Layout) -> list[tuple[Again, bool, bool]]:
    """What is recomputed, and whether inputs of layers, and weights of experts, lie on the host.

    Layer by layer what layers keep of all microbatches is there at once.
    """
    place, num_layers = request.terms.place, request.terms.model.num_layers
    asked, levels = place.inputs, ("full",) if layout.schedule == "layers" else LADDER
    inputs: list[tuple[Again, bool]] = [(again, False) for again in levels] if asked != "host" else []
    if asked != "device" and num_layers > 2 and layout.schedule in WEIGHTS_AT_ONCE:
        inputs.append(("full", True))
    found = [(*one, False) for one in inputs] if place.weights != "host" else []
    if place.weights != "device" and layout.num_ranks == 1 and layout.overlap == "off":
        found += [(again, leave, True) for again, leave in inputs if again == "full"]
    return found


def fits(request: Request) -> bool:
    """Whether any layout does, by the rough count."""
    return any(
        roughly(request, replace(layout, recompute=again, inputs=inputs, weights=weights)).peak
        <= request.room(layout)
        for layout in layouts_of(request)
        for again, inputs, weights in ladder_of(request, layout)
    )


def bound(priced: Step, layout: Layout) -> float:
    """Seconds: the busiest rank's work as if layers were even, a bubble by its formula."""
    head = sum(priced.parts["head"])
    name = "pair" if layout.overlap != "off" else ""
    each = [prices.pair if name else prices.F + prices.B for prices in priced.layers]
    if layout.schedule == "layers":
        return layout.microbatches * (sum(each) + head)
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
    if layout.budget:  # a microbatch is held over two thirds of a way there and back, in a fold half as long
        held = (2 * layout.pp + 1) / 3 / min(layout.stages_per_rank, 2)
        rank *= max(held / layout.budget, 1.0)
    wires = priced.work.transfer(layout.dp * layout.ep * layout.tp) * layout.stages_per_rank
    return layout.microbatches * (rank + (wires if layout.pp > 1 else 0.0)) + ramp


def copies_bound(request: Request, priced: Step, rough: Rough) -> float:
    """Seconds of state's way that nothing hides, as if stages were even."""
    layout, terms = rough.layout, request.terms
    if not layout.host:
        return 0.0
    beside = priced.work.kernels.stream(terms.state.update * rough.owned)
    seconds = terms.cluster.host.seconds
    way = seconds(layout.host * terms.place.each * rough.owned)
    return terms.place.left(way, seconds(request.ring(layout)), beside + priced.window(layout))


def plan_of(request: Request, layout: Layout, stages: Sequence[int] | None = None) -> Plan:
    """With its budget and its share of state on the host as the exact count has room for them."""
    step, room = Step(request.terms, layout, stages), request.room(layout)
    found = counted(request, step)
    over = max(each.peak for each in found) - room
    if layout.budget > 1 and over > 0:
        less = replace(layout, budget=max(int(layout.budget * (1 - over / room)), 1))
        step = Step(request.terms, less, step.stages)
        found = counted(request, step)
    place, (peaks, owned, beside) = request.terms.place, zip(*found, strict=True)
    share = place.share(peaks, owned, request.ring(layout), room, max(beside)) or 0.0
    if share != layout.host:
        step = Step(request.terms, replace(step.layout, host=share), step.stages)
    return Plan(
        layout=step.layout,
        stages=step.stages,
        time=step.time(),
        bytes_of=on_device(request, step.layout, found),
        room=room,
        host_bytes=max(share * place.each * mine + more for mine, more in zip(owned, beside, strict=True)),
    )


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
