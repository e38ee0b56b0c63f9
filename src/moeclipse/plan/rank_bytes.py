"""Bytes of the ranks of a layout: roughly, for all; action by action, for those that are simulated.

    roughly      layers as even as numbers allow, activations in flight by a formula for each schedule; with
                 the budget of zb-m that there is room for, and the share of state that must leave the device
    counted      stages as they are cut, activations as the program takes and gives them

In both: weights, gradients and state of what a rank holds, and what is beside them (`cost/step_bytes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from moeclipse.cost.sizes import ModelSizes
from moeclipse.cost.step_bytes import HeldParameters, Sharing, beside, held_of_stages
from moeclipse.plan.layout import Layout
from moeclipse.plan.question import Request
from moeclipse.plan.step import Step
from moeclipse.schedule import kinds
from moeclipse.schedule.interleaved import group_sizes
from moeclipse.schedule.op import Op, Program


class Rough(NamedTuple):
    layout: Layout
    """With the budget and the share of state on the host that there is room for."""
    peak: float
    """Bytes of the fullest rank, with layers as even as numbers allow."""
    owned: float
    """Parameters whose state it has."""


def roughly(request: Request, layout: Layout) -> Rough:
    model, place = request.terms.model, request.terms.place
    sharing, tokens = request.sharing(layout), layout.samples * request.terms.sequence
    per_stage = -(-model.num_layers // layout.num_stages)
    layers = min(per_stage * layout.stages_per_rank, model.num_layers)
    last = range(model.num_layers - layers, model.num_layers)
    moe, part, width = any(model.moe_layers), model.training(model.num_layers - 1), request.terms.value_bytes
    kept = per_stage * sharing.layer(model, moe, tokens, width, layout.recompute, part)
    held = held_of(sharing, model, last, (layout.pp == 1 and not model.tied, True))
    rest = beside(model, sharing, tokens, width, program=runs_program(layout), head=True)
    rest += request.terms.state.of(model, held)
    room = request.room(layout)
    if layout.schedule == "zb-m":
        most = int((room - rest) / (kept * layout.stages_per_rank))
        layout = replace(layout, budget=max(min(most, most_budget(layout)), 1))
    peak, owned, away = rest + kept * in_flight(layout), held.owned, 0.0
    if layout.inputs:
        away = kept * in_flight(layout) * max(1 - (2 if layout.pp == 1 else 1) / layers, 0.0)
        peak += input_buffers(request, layout) - away
    if layout.weights:
        on_host, spared = place.away(model)
        peak, away = peak - spared, away + on_host
    share = place.share((peak,), (owned,), request.ring(layout), room, away)
    if share is None:  # all of it, where the host has room
        share = 1.0 if place.state and place.each * owned + away <= place.host_room else 0.0
    if share:
        layout = replace(layout, host=share)
        peak += request.ring(layout) - share * place.each * owned
    return Rough(layout, peak, owned)


def input_buffers(request: Request, layout: Layout) -> float:
    """Bytes of a device: for inputs of layers on their way out, and for those that come back."""
    each = request.terms.place.buffers
    if layout.schedule == "layers":
        each = max(each, layout.microbatches + 1)
    return 2 * each * request.terms.input_bytes(layout)


def most_budget(layout: Layout) -> int:
    """Of zb-m: with more its orders are no shorter."""
    return min(2 * layout.pp - 1 if layout.stages_per_rank == 1 else layout.pp, layout.microbatches)


@lru_cache(maxsize=4096)
def held_of(sharing: Sharing, model: ModelSizes, layers: range, tables: tuple[bool, bool]) -> HeldParameters:
    """Kept: a sum over layers, and the same whatever the schedule and the microbatches."""
    return sharing.held(model, layers, tables)


def runs_program(layout: Layout) -> bool:
    several = layout.num_ranks > 1 and layout.recompute != "off"
    return layout.pp > 1 or layout.overlap != "off" or layout.schedule == "layers" or several


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
        "zb-m": layout.budget * V,
        "layers": M * V,
        "zb-v": 2 * P,
        "dualpipev": 2 * P + 1,
        "vpp": 2 * (P - 1) + (V - 1) * G + 1,
        "vpp+1": 2 * (P - 1) + (V - 1) * G + 1,
    }[layout.schedule]
    return min(most, M * V)


def peak_bytes(request: Request, step: Step) -> tuple[float, ...]:
    """Of each rank of the pipeline, action by action, with the part of its state that does not travel."""
    return on_device(request, step.layout, counted(request, step))


def on_device(request: Request, layout: Layout, counts: Sequence[Counted]) -> tuple[float, ...]:
    ring = request.ring(layout) if layout.host else 0.0
    away = layout.host * request.terms.place.each
    return tuple(each.peak - away * each.owned + ring for each in counts)


class Counted(NamedTuple):
    """Of a rank of the pipeline."""

    peak: float
    """Bytes of its device with all of its state ..."""
    owned: float
    """... parameters of that ..."""
    beside: float
    """... and bytes of the host, of inputs of layers and weights of experts."""


def counted(request: Request, step: Step) -> list[Counted]:
    """Of each rank of the pipeline."""
    layout, model, width = step.layout, request.terms.model, request.terms.value_bytes
    sharing, tokens = request.sharing(layout), layout.samples * request.terms.sequence
    firsts = [sum(step.stages[:number]) for number in range(len(step.stages))]
    held = [range(first, first + count) for first, count in zip(firsts, step.stages, strict=True)]
    kinds_of = [(moe, model.training(layer)) for layer, moe in enumerate(model.moe_layers)]
    sizes = {
        kind: sharing.layer(model, kind[0], tokens, width, layout.recompute, kind[1])
        for kind in set(kinds_of)
    }
    stays = {0, model.num_layers - 1} if layout.inputs else range(model.num_layers)
    kept = [sum(sizes[kinds_of[i]] for i in layers if i in stays) for layers in held]
    away = [sum(sizes[kinds_of[i]] for i in layers if i not in stays) for layers in held]
    buffers = input_buffers(request, layout) if layout.inputs else 0.0
    weights, spared = request.terms.place.away(model) if layout.weights else (0.0, 0.0)
    whole = layout.schedule == "layers"
    program = step.program(layout.microbatches if whole else min(layout.microbatches, 3 * layout.pp))
    placement = program.pipeline().placement
    found = []
    for rank, (most, inputs) in enumerate(
        zip(most_kept(program, kept), most_kept(program, away), strict=True)
    ):
        mine = [stage % len(step.stages) for stage in placement.stages_of(rank)]
        parts = held_of_stages(model, sharing, held, mine)
        rest = beside(model, sharing, tokens, width, program=runs_program(layout), head=len(held) - 1 in mine)
        state = sum(request.terms.state.of(model, part) for part in parts)
        here, owned = most + buffers + rest + state - spared, sum(part.owned for part in parts)
        found.append(Counted(here, owned, inputs + weights))
    return found


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
