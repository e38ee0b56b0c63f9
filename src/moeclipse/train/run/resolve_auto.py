"""What a run settles before it builds anything: its wire, overlap, recompute, and how many slots it has.

Idea. These shape the program and the model's place on ranks, so they cannot be tried step by step. Wires are
tried alone, for some milliseconds (`comm/transports/fastest`). Pipelines are simulated: the program of each
that this run could take, with the speed of its own products and the bytes per second of the wire, both
measured on all ranks together. The plain choice (direct; overlap off) stays unless another wins by a margin:
more than trials scatter, and more than simulations were seen to be wrong by (docs/measured.md#predicted).

A wire changes no bit, so that it may always be timed. Pipelines and slots do: runs that promise equal bits
(`run.deterministic`) choose them by the book (`moe/tune/fixed_prices`). A wire whose trials could not tell
what a byte takes leaves the pipeline as it is.

Contract. Only what the configuration leaves at "auto" is settled, by all ranks alike, and is in
`choices.json` before the first step: a run that goes on, or repeats another's, takes it from there. A run too
short for trials keeps the plain choices and measures nothing, but for the recompute that it takes to fit.

Hazard. A second microbatch in flight takes memory. On a device, where that is what runs out, nothing is
chosen that holds more activations than the plain program does; name `pipeline.overlap` where there is room.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.transports.fastest import PLAIN, SIZES, fastest, wire_times, wires_to_try
from moeclipse.core.auto import Auto, Chosen
from moeclipse.core.config import problems_of, to_flat, with_values
from moeclipse.core.errors import MoEclipseError
from moeclipse.cost.hardware import Device, Link, device, link
from moeclipse.model.flops import device_of
from moeclipse.moe.tune.cut_choice import affordable
from moeclipse.moe.tune.fixed_prices import BOOKS, rate
from moeclipse.moe.tune.stopwatch import clock
from moeclipse.moe.validate import expert_group
from moeclipse.pipeline.config import PAIRED
from moeclipse.sim.step_costs import StepCosts
from moeclipse.train.config import TrainConfig
from moeclipse.train.placement.spare_slots import KEY as SLOTS
from moeclipse.train.placement.spare_slots import choose_slots, left_open
from moeclipse.train.predict.run_step import RunStep
from moeclipse.train.predict.step_sizes import step_work, value_bytes
from moeclipse.train.run.choices import Choices, trial_calls
from moeclipse.train.step.dtype import repeats
from moeclipse.train.step.recompute_ranks import choose_recompute

KEYS = ("moe.transport", "parallel.peer", "pipeline.overlap", "pipeline.recompute")
"""Peer memory is tried by `train/run/tune` alone."""
LEAST_HIDDEN = 0.10
"""Of a step, at least, is predicted to be won by hiding exchanges: a program of ops has its own cost."""
LEAST_REORDERED = 0.25
"""The same, where a schedule only fills its bubble otherwise. That wins on paper: smaller ops, and others
that compute on the same cores meanwhile, take much of it back."""
MOST_HELD = {"cpu": 2.5, "cuda": 1.0}
"""Times the activations of the plain program."""
MOST_LAYERS = 2048
"""Layers times microbatches of a step up to which programs are simulated: more take long to write."""
SCHEDULES = ("1f1b", "zb-h1", "vpp", "zb-v", "1f1b-pairs", "vpp+1", "dualpipev")
LEAST_LONGER = 1.2
"""Times as long as few bytes that many must take, or what a wire carries is not known."""
ROWS = 512
PRODUCTS = 3
"""Of each weight: forward, and in backward for rows and weights."""


def settle(config: TrainConfig, mesh: Mesh, choices: Choices) -> tuple[TrainConfig, list[str]]:
    """The configuration without what was chosen being "auto", and a line for each choice. Collective."""
    lines: list[str] = []
    if choices.settled is None and mesh.num_ranks > 1:
        if affordable(trial_calls(config))[0]:
            by_the_book = repeats(config.run.deterministic, mesh.device)
            choices.settled, lines = choose(config, mesh, by_the_book)
        else:
            values, lines = choose_recompute(config, mesh)
            choices.settled = values or None
    left = left_to_choose(config)
    known = {key: value for key, value in (choices.settled or {}).items() if key in left}
    wrong = next(iter(problems_of(with_values(config, known))), None)
    if wrong is not None and choices.settled is not None:  # chosen for a run with other settings
        apart = [key for key in known if key.startswith("pipeline.")]
        known = {key: value for key, value in known.items() if key not in apart}
        choices.settled = {key: value for key, value in choices.settled.items() if key not in apart}
        lines = [*lines, f"pipeline: as without a choice, for {wrong}"]
    settled = with_values(config, known)
    return (config, lines) if any(problems_of(settled)) else (settled, lines)


def left_to_choose(config: TrainConfig) -> set[str]:
    """Keys that are "auto" and that a run settles; a schedule is left with the overlap that it goes with."""
    values = to_flat(config)
    found = {key for key in KEYS if values[key] == "auto"}
    if values["pipeline.overlap"] == values["pipeline.schedule"] == "auto":
        found.add("pipeline.schedule")
    return found | ({SLOTS} if left_open(config) else set())


def choose(config: TrainConfig, mesh: Mesh, by_the_book: bool = False) -> Chosen:
    """What is left to choose, each knowing what those before it chose. Collective.

    `by_the_book`: nothing that changes a bit is timed.
    """
    chosen: dict[str, Any] = {}
    lines: list[str] = []
    overlap = partial(choose_overlap, by_the_book=by_the_book)
    for setting in (choose_wire, overlap, choose_slots, choose_recompute):
        values, said = setting(with_values(config, chosen), mesh)
        chosen |= values
        lines += said
    return chosen, lines


def choose_wire(config: TrainConfig, mesh: Mesh) -> Chosen:
    group = expert_group(mesh, config.moe)
    several = config.moe.transport == "auto" and len(wires_to_try(mesh, group)) > 1
    if not several or not config.num_expert_layers:
        return {}, []
    times = wire_times(mesh, group)
    kind = fastest(times)
    if kind == PLAIN:
        return {"moe.transport": kind}, []
    ratio, size = sum(times[PLAIN]) / sum(times[kind]), SIZES[mesh.device.type][1] >> 10
    line = f"wire: {kind}: {size} KiB to each rank in {1e3 * times[kind][1]:.2f} ms; "
    return {"moe.transport": kind}, [f"{line}{PLAIN} takes {ratio:.1f} x"]


def choose_overlap(config: TrainConfig, mesh: Mesh, by_the_book: bool) -> Chosen:
    """Simulated by one rank, with what all ranks have measured."""
    group, usual = expert_group(mesh, config.moe), "nvlink4" if mesh.device.type == "cuda" else "loopback"
    if config.pipeline.overlap != "auto" or not any(programs_of(config, group.size)):
        return {}, []
    if config.pipeline.recompute == "norms":
        return {}, ["pipeline: without overlap, which pipeline.recompute = 'norms' cannot go with"]
    wire: Link | None = link(usual)
    if not by_the_book and group.size > 1 and config.num_expert_layers:
        times = wire_times(mesh, group)
        wire = link_of(times.get(config.moe.transport, times[PLAIN]), group.size, mesh.device.type)
    hardware = counted_device(mesh) if by_the_book else measured_device(config, mesh)
    mine: Chosen = {}, []
    if not shares_cores(mesh) and mesh.rank == 0 and wire is not None:  # which all ranks ask together
        mine = choose_pipeline(config, mesh, hardware, wire)
    values, lines = mesh.gather_objects(mine)[0]
    return values, lines


# the wire and the device, as the simulator sees them


def link_of(times: list[float], num_ranks: int, kind: str) -> Link | None:
    """Two sizes give a fixed part and a slope; None where more bytes were not seen to take longer."""
    if times[1] < LEAST_LONGER * times[0]:
        return None
    sent = [(num_ranks - 1) * size for size in SIZES[kind]]
    bandwidth = (sent[1] - sent[0]) / (times[1] - times[0])
    latency = max(times[0] - sent[0] / bandwidth, 0.1 * times[0])
    return Link(name="wire", bandwidth=bandwidth, latency=latency, efficiency=1.0, source="measured at start")


def counted_device(mesh: Mesh) -> Device:
    """What equal runs take a rank to compute with."""
    return replace(BOOKS[mesh.device.type].chip, flops=rate(mesh), efficiency=1.0, source="by the book")


def measured_device(config: TrainConfig, mesh: Mesh) -> Device:
    """What the slowest rank makes of rows through an expert, all ranks computing at once.

    Norm, activation and backward are part of it: a product alone is two to three times as fast on a CPU, and
    with steps that short there would seem to be nothing to hide exchanges behind.
    """
    cuda = mesh.device.type == "cuda"
    known = device_of(torch.cuda.get_device_name(mesh.device)) if cuda else None
    if known is not None:
        return known
    width, inner = config.model.d_model, config.moe.d_ff
    shapes = ((ROWS, width), (width, 2 * inner), (inner, width))
    x, up, down = (torch.ones(shape, device=mesh.device, requires_grad=True) for shape in shapes)

    def there_and_back() -> None:
        gate, value = (F.rms_norm(x, (width,)) @ up).chunk(2, dim=1)
        ((F.silu(gate) * value) @ down).sum().backward()

    work = PRODUCTS * 2 * ROWS * (up.numel() + down.numel())
    rate = min(mesh.gather_objects(work / clock(there_and_back, mesh.device)))
    return replace(device("h200" if cuda else "cpu"), flops=rate, efficiency=1.0, source="measured at start")


# pipelines


def programs_of(config: TrainConfig, expert_ranks: int) -> Iterator[tuple[str, str]]:
    """(schedule, overlap) of what this run could take instead of the plain one."""
    named, pp, microbatches = config.pipeline.schedule, config.parallel.pp, config.optim.accumulate
    if config.model.num_layers * microbatches > MOST_LAYERS or microbatches == 1:
        return
    overlaps = ("pair", "pair+self") if expert_ranks > 1 else ()
    names = (named,) if named != "auto" or pp == 1 else SCHEDULES
    for name in names:
        if name not in ("auto", "1f1b", named):
            yield name, "off"
        for overlap in overlaps:
            if overlap == "pair+self" or name in ("auto", *PAIRED):
                yield name, overlap


def shares_cores(mesh: Mesh) -> bool:
    """Whether ranks of this machine compute in turns: then one computes while another waits. Collective."""
    return mesh.device.type == "cpu" and mesh.ranks_here > (os.cpu_count() or 1)


def choose_pipeline(config: TrainConfig, mesh: Mesh, hardware: Device, wire: Link) -> Chosen:
    """The fastest by simulation, where that wins enough and holds little more; nothing otherwise."""
    width = value_bytes(config.model.dtype, hardware)
    costs = StepCosts(step_work(config, mesh.dp, mesh.ep, width), hardware, wire)

    def simulated(schedule: str, overlap: str) -> tuple[str, float, float] | None:
        """What it is called, its seconds, and what the fullest rank holds."""
        taken = with_values(config, {"pipeline.schedule": schedule, "pipeline.overlap": overlap})
        if any(problems_of(taken)):
            return None
        step = RunStep(config=taken, dp=mesh.dp, ep=mesh.ep, costs=None, step_costs=costs)
        with suppress(MoEclipseError):
            answer = step.answer(schedule)
            return answer.name, answer.summary.makespan, max(answer.summary.peak)
        return None

    as_it_is = (config.pipeline.schedule, "off")
    plain = simulated(*as_it_is)
    if plain is None:
        return {}, []
    plain_name, plain_s, plain_held = plain
    answers = {one: answer for one in programs_of(config, mesh.experts.size) if (answer := simulated(*one))}

    def wins(one: tuple[str, str]) -> bool:
        _, seconds, held = answers[one]
        least = LEAST_REORDERED if one[1] == "off" else LEAST_HIDDEN
        return held <= MOST_HELD[mesh.device.type] * plain_held and seconds < (1 - least) * plain_s

    seconds = {one: seconds for one, (_, seconds, _) in answers.items()}
    schedule, overlap = chosen = Auto(costs=seconds, plain=as_it_is, wins=wins).choice
    if chosen == as_it_is:
        return {}, []
    name = answers[chosen][0] + (f", overlap {overlap}" if overlap != "off" else "")
    ratio = plain_s / seconds[chosen]
    line = f"pipeline: {name}: {plain_name} without overlap is predicted to take {ratio:.2f} x"
    return {"pipeline.schedule": schedule, "pipeline.overlap": overlap}, [line]
