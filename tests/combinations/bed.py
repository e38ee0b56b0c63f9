"""Trains a case and its reference for three steps, and says how far apart they are.

Compared are the summed gradients of every step, the optimizer's state behind each, losses and norms, and the
loads of experts. A case that hands over saves a checkpoint behind its second step, and goes on from it: on
its own ranks again, on those of the reference, or the reference's goes on here. The reference saves and loads
at the same place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from factors import Case, Setting
from plans import FREE

from moeclipse.balance import asking
from moeclipse.comm.group import number_hosts
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.exchange import plan
from moeclipse.moe.tune.probe import Probe
from moeclipse.ops.sending import MOST_CHOICES
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.checkpoints.checkpoint import Checkpoint
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner
from pieces import Pieces, gradient_pieces, join

STEPS, SAVED_AFTER = 3, 2
BOUND = 1e-12
NOISE = 1e-3
LATER_BOUND = 1e-10
"""Behind the first update: Adam divides by roots of gradients, and some are nothing but rounding."""
LOW_BOUNDS = {"float32": 2e-3, "bfloat16": 0.2, "float16": 0.2}
"""Of the norm of what differs, in the first step alone: then tokens begin to choose other experts."""
SLOW_EXPERTS = Probe(
    link=1e9,
    row_forward=1e-2,
    row_backward=2e-2,
    kernel=1e-5,
    latency=1e-6,
    bandwidth=1e9,
    shared_wire=False,
    row_bytes=128,
    parameter_bytes=1e3,
    gradient_bytes=1e3,
    num_ranks=4,
)
"""Costs that make it pay to lend: a row takes as long as ten thousand bytes."""


def watch_gradients(learner: Learner) -> list[Pieces]:
    """The gradients of each step, as the optimizer is given them, are added to the list that is returned."""
    seen: list[Pieces] = []
    sum_of_squares = learner.optim.sum_of_squares

    def look(shards: list[torch.Tensor]) -> torch.Tensor:
        seen.append(gradient_pieces(learner, shards))
        return sum_of_squares(shards)

    learner.optim.sum_of_squares = look  # type: ignore[method-assign]
    return seen


def trained(
    mesh: Mesh,
    config: TrainConfig,
    hosts: tuple[int, ...],
    span: tuple[int, int],
    load_from: str,
    save_to: str,
) -> dict[str, Any]:
    """Some steps of one rank, from a checkpoint or to one where paths are given.

    From a checkpoint on exchanges are planned as kernels plan them, by their references: of a combination
    that is handed over one half is as on a device.
    """
    mesh.hosts = number_hosts(hosts, mesh.num_ranks)
    if load_from:
        plan.plans_on_device = lambda scores_TK: scores_TK.shape[1] <= MOST_CHOICES
    learner = Learner(config, mesh)
    gradients = watch_gradients(learner)
    if config.moe.shadow == "auto":
        asking.LOOK = 0  # there are few calls
        for moe in learner.layers:
            moe.schedule.probe = SLOW_EXPERTS
    learner.placement.costs = FREE  # planners move whatever makes ranks more even
    if load_from:
        assert learner.load(Checkpoint.open(load_from, mesh)) == span[0]
    steps, lent, asked, proposals = [], 0, 0, []
    move = learner.placement.move
    learner.placement.move = lambda plan: (proposals.append(plan), move(plan))[1]  # type: ignore[method-assign, func-returns-value]
    for step in range(*span):
        record = learner.step(step)
        state = [(p.name, p.start, list(p.shape), p.data.clone()) for p in learner.optim.pieces()]
        numbers = [record["loss"], record["aux_loss"], record["grad_norm"]]
        steps.append([gradients[-1], state, numbers, record["load"]])
        plans = [moe.schedule.shadow_plan for moe in learner.layers]
        lent += sum(len(plan.shadows) for plan in plans if plan is not None)
        rests = [moe.schedule.shadows.asking.rest > 0 for moe in learner.layers]  # they have asked in vain
        asked += sum(rests) + sum(plan is not None for plan in plans)
    saved = str(learner.save(Path(save_to), span[1])) if save_to else ""
    happened = {"lent": lent, "asked": asked, "plans": learner.placement.plans_taken}
    happened["proposals"] = len(proposals)
    return {"steps": steps, "saved": saved, **happened}


def run(
    setting: Setting, corpus: str, span: tuple[int, int], load_from: str = "", save_to: str = ""
) -> list[dict[str, Any]]:
    layout, config = setting.layout, setting.config(corpus)
    return run_ranks(
        layout.num_ranks,
        trained,
        config,
        setting.hosts,
        span,
        load_from,
        save_to,
        **layout.axes,
        mirrored=config.pipeline.mirrored,
        deadline_s=180.0,
    )


HAPPENED = ("lent", "asked", "plans", "proposals")
"""Experts lent, calls that asked whether to, plans taken, and those looked at: some leave all as it is."""


def whole(
    first: Setting, second: Setting, corpus: str, folder: Path
) -> tuple[list[list[Any]], dict[str, int]]:
    """(what every rank says of each step, how often what happened), with a hand-over behind the second."""
    before = run(first, corpus, (0, SAVED_AFTER), save_to=str(folder))
    after = run(second, corpus, (SAVED_AFTER, STEPS), load_from=before[0]["saved"])
    return steps_of(before) + steps_of(after), counted([*before, *after])


def steps_of(results: list[dict[str, Any]]) -> list[list[Any]]:
    return [list(ranks) for ranks in zip(*(result["steps"] for result in results), strict=True)]


def counted(results: list[dict[str, Any]]) -> dict[str, int]:
    return {what: max(result[what] for result in results) for what in HAPPENED}


def compare(case: Case, corpus: str, folder: Path) -> dict[str, int]:
    """Train both; raise where they differ. Returns counts of what happened on the way."""
    mine, reference = case.setting, case.reference
    hand_over = case.row["hand-over"]
    if hand_over == "none":
        expected = steps_of(run(reference, corpus, (0, STEPS)))
        results = run(mine, corpus, (0, STEPS))
        found, happened = steps_of(results), counted(results)
    else:
        expected, _ = whole(reference, reference, corpus, folder / "reference")
        ends = {"to one": (mine, reference), "from one": (reference, mine), "again": (mine, mine)}
        found, happened = whole(*ends[hand_over], corpus, folder / "case")
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if case.dtype == "float64":
            same_step(number, ours, theirs)
        elif number == 0:
            similar_step(ours, theirs, LOW_BOUNDS[case.dtype])
    return happened


def same_step(number: int, ours: list[Any], theirs: list[Any]) -> None:
    bound = BOUND if number == 0 else LATER_BOUND
    for place, what in enumerate(("gradient", "optimizer state")):
        found, expected = (join([rank[place] for rank in ranks]) for ranks in (ours, theirs))
        assert found.keys() == expected.keys(), (what, found.keys() ^ expected.keys())
        largest = largest_of(expected)
        apart = {
            name: relative(found[name], value, largest[kind_of(name)]) for name, value in expected.items()
        }
        limit = LATER_BOUND if what == "optimizer state" else bound
        bad = {name: value for name, value in apart.items() if not value <= limit}
        assert not bad, f"{what} behind step {number}: {bad}"
    for rank in ours:
        apart = difference(rank[2], theirs[0][2])
        assert apart <= bound, f"loss, auxiliary loss, norm of step {number}: {rank[2]}, {theirs[0][2]}"
        assert rank[3] == theirs[0][3], f"loads of step {number}"


def kind_of(name: str) -> str:
    """Gradients, weights and each kind of moment are of different size."""
    return name.partition("/")[0] if "/" in name else ""


def largest_of(tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    largest: dict[str, float] = {}
    for name, tensor in tensors.items():
        found = float(tensor.abs().max()) if tensor.numel() else 0.0
        largest[kind_of(name)] = max(found, largest.get(kind_of(name), 0.0))
    return largest


def relative(value: torch.Tensor, reference: torch.Tensor, largest: float) -> float:
    """As `difference`, but what is nothing but rounding is held against the model's largest element.

    Queries and keys of a single token, say, have the gradient zero, of which only rounding is left.
    """
    assert value.shape == reference.shape, f"shapes differ: {tuple(value.shape)}, {tuple(reference.shape)}"
    if not value.numel():
        return 0.0
    apart = float((value.double() - reference.double()).abs().max())
    scale = max(float(reference.abs().max()), NOISE * largest)
    return apart / scale if apart else 0.0


def similar_step(ours: list[Any], theirs: list[Any], bound: float) -> None:
    found, expected = (join([rank[0] for rank in ranks]) for ranks in (ours, theirs))
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    mine, other = (
        torch.cat([side[name].double().flatten() for name in sorted(expected)]) for side in (found, expected)
    )
    apart = float((mine - other).norm() / other.norm())
    assert apart <= bound, f"gradients of step 0 are {apart:.3g} of their norm apart"
