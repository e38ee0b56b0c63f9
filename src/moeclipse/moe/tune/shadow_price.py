"""What it takes to ask for shadows, and to lend one: measured with the costs of the layer.

A shadow costs more than its bytes: weights are laid out for the wire, a product of few rows reads all of
them, gradients get a buffer and are added where they belong. None of it shows in the seconds of a row, and
on small experts it is most of the price. So every rank lends its first expert to the next rank, with few
rows, and what that takes beyond its bytes is the price of a loan (`Probe.loan`). In the same way all ranks
ask once for the counts of a call and choose from them (`Probe.look`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from moeclipse.balance.placement import Placement
from moeclipse.balance.shadow import Shadows
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.exchange.dispatch import Dispatcher
from moeclipse.moe.experts.pairwise import PairwiseExperts
from moeclipse.moe.experts.shadow import RankShadows, ShadowExperts, ShadowGrads, keep_shadowed
from moeclipse.moe.tune.probe import ROWS, Probe, measure
from moeclipse.moe.tune.shadow_choice import ShadowChoice
from moeclipse.moe.tune.stopwatch import slowest
from moeclipse.ops.precision import WIDE

WHERE = "probe of shadows"


def measured(
    choice: ShadowChoice, pairs: PairwiseExperts, dispatcher: Dispatcher, ids_TK: torch.Tensor, mesh: Mesh
) -> Probe:
    """What a layer costs, shadows included where it chooses them. Collective over the ranks of a stage."""
    probe = measure(pairs, dispatcher, mesh)
    return priced(probe, choice, pairs, dispatcher, ids_TK, mesh) if choice.automatic else probe


@torch.no_grad()
def priced(
    probe: Probe,
    choice: ShadowChoice,
    pairs: PairwiseExperts,
    dispatcher: Dispatcher,
    ids_TK: torch.Tensor,
    mesh: Mesh,
) -> Probe:
    """`probe` with both prices, of the slowest rank. Collective over the ranks of a stage."""
    if not probe.prices_rows:
        return probe
    costs = probe.shadow_costs(overlap=0.0)

    def look() -> None:
        counts_PE, rows_PE = choice.counts_and_rows(ids_TK, dispatcher, WHERE)
        choice.question(counts_PE, rows_PE, dispatcher, costs).best()

    look_s, both = slowest([look, lending(pairs, dispatcher, ids_TK)], mesh)
    wire = 2 * probe.latency + (probe.parameter_bytes + probe.gradient_bytes) / (probe.bandwidth or math.inf)
    return replace(probe, look=look_s.seconds, loan=max(both.seconds - wire, 0.0) / 2)


def lending(pairs: PairwiseExperts, dispatcher: Dispatcher, ids_TK: torch.Tensor) -> Callable[[], None]:
    """All that a call does for its shadows, forward and backward, where each rank lends to the next."""
    placement, experts = dispatcher.placement, pairs.experts
    mine = RankShadows.of(to_the_next(placement), placement, dispatcher.group.index)
    counts = [ROWS[ids_TK.device.type][0]] * len(mine.experts)
    inputs = [like.new_ones(sum(counts), *like.shape[1:]) for like in pairs.like]
    scores = torch.ones(sum(counts), 1, dtype=WIDE[pairs.like[0].dtype], device=ids_TK.device)
    place = torch.arange(sum(counts), device=ids_TK.device)
    sums = [torch.zeros_like(weight, dtype=WIDE[weight.dtype]) for weight in experts.weights]

    def lend() -> None:
        keep_shadowed(ids_TK, mine, placement.num_experts)
        there = ShadowExperts(mine, pairs, dispatcher.transport, place_m=place, counts=counts, where=WHERE)
        there.bind(inputs, scores)
        there.send_weights()
        back_TO = there.forward()
        back = ShadowGrads(there.kept)
        back.dgrad(back_TO)
        back.wgrad()
        back.return_grads()
        back.add_grads(sums)

    return lend


def to_the_next(placement: Placement) -> Shadows:
    """Each rank's first expert on the next rank, unless that holds it already."""
    found: dict[int, tuple[int, ...]] = {}
    for expert, owner in enumerate(placement.primary):
        borrower = (owner + 1) % placement.num_ranks
        lends = any(placement.primary[other] == owner for other in found)
        if not lends and not placement.holds_EP[expert, borrower]:
            found[expert] = (borrower,)
    return tuple(found.items())
