"""What lies on the host, of state, inputs of layers, gradients and experts: as little as lets the step fit.

    peak      weights, gradients, state that stays, buffers, kept activations, what backward makes
    seconds   the run's own program with FETCH and STORE, simulated over the wire between host and device,
              one step behind the other: the last stores of one go on under the forward of the next

Idea. For each recompute policy that is open, the smallest share of state that must leave for the peak to fit;
of these the one whose simulated step is shortest. Where all fits, nothing leaves. Inputs of layers that are
recomputed whole, and gradients that wait for the norm of all, leave where nothing fits without, and experts
where nothing fits without these: no microbatch is a CUDA graph then.

Contract. Decided before anything is built, by all ranks alike, from the smallest memory among them; told in
one line.

Hazard. Bytes of activations are those of `cost/step_bytes`; what other programs take is not foreseen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import NamedTuple

import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.cost.cluster import cluster
from moeclipse.cost.hardware import LINKS, Device, Link, device
from moeclipse.cost.sizes import ModelSizes
from moeclipse.cost.step_bytes import ALONE, Again, Sharing, StateBytes, beside
from moeclipse.model.flops import device_of
from moeclipse.plan.state_place import StatePlace
from moeclipse.schedule.kinds import TO_DEVICE, TO_HOST
from moeclipse.sim.compare import Answer
from moeclipse.sim.step_costs import StepCosts
from moeclipse.train.config import TrainConfig
from moeclipse.train.optim.buckets import summed_type
from moeclipse.train.optim.memory_config import activation_problems, expert_weight_problems
from moeclipse.train.predict.model_sizes import sizes_of, sizes_of_run, unpriced
from moeclipse.train.predict.run_step import RunStep, StepPrices
from moeclipse.train.predict.state_bytes import each_element
from moeclipse.train.predict.step_program import (
    by_layers,
    estimated_weights,
    grads_take_turns,
    input_buffers,
    input_bytes,
    leaving_inputs,
    updates_in_next_forward,
    weights_saved,
)
from moeclipse.train.predict.step_sizes import cluster_costs, step_work
from moeclipse.train.step.dtype import choose_dtype
from moeclipse.train.step.memory_bytes import memory_left

LEVELS: tuple[Again, ...] = ("off", "attn", "full")


@dataclass(frozen=True, kw_only=True)
class Placing:
    """What one share comes to."""

    share: float
    again: Again
    peak: float
    room: float
    host_bytes: float
    step_s: float
    copies_s: float
    """Each way."""
    exposed_s: float
    """Of both ways, not under compute."""
    input_bytes: float = 0.0
    """Inputs of layers on the host ..."""
    grad_bytes: float = 0.0
    """... and gradients ..."""
    weight_bytes: float = 0.0
    """... and weights of experts."""

    @property
    def fits(self) -> bool:
        return self.peak <= self.room

    def line(self) -> str:
        room = f"{self.peak / 1e9:.3g} of {self.room / 1e9:.3g} GB"
        away = [f"{100 * self.share:.0f} % of the optimizer state, {self.host_bytes / 1e9:.3g} GB,"]
        away = away if self.share else []
        if self.input_bytes:
            away.append(f"inputs of layers, {self.input_bytes / 1e9:.3g} GB,")
        if self.grad_bytes:
            away.append(f"gradients, {self.grad_bytes / 1e9:.3g} GB,")
        if self.weight_bytes:
            away.append(f"weights of experts, {self.weight_bytes / 1e9:.3g} GB,")
        if not away:
            return f"memory: all state stays on the device, {room}"
        found = (
            f"memory: {' and '.join(away)} on the host, for {room} on the device; copies take "
            f"{self.copies_s:.2g} s each way, and {self.exposed_s:.2g} s of them are not hidden in a step of "
            f"{self.step_s:.2g} s (predicted)"
        )
        return found if self.fits else f"{found}; it may not fit: see optim.state, optim.clip = 'layer'"


def share_for(config: TrainConfig, mesh: Mesh) -> tuple[TrainConfig, float, list[str]]:
    """(the configuration, which says where inputs of layers lie; the share of state that lies on the host;
    what is to be said of it). Collective where it is auto."""
    memory = config.memory
    if memory.place != "auto":
        return config, (memory.share if memory.travels else 0.0), []
    room = 1e9 * memory.device_gb or ALONE * memory_left(mesh)
    if mesh.num_ranks > 1:
        room = min(mesh.gather_objects(room))
    dtype = choose_dtype(config.model.dtype, mesh.device)
    found = best_placing(config, (mesh.dp, mesh.ep, mesh.tp), room, hardware_of(mesh.device), dtype)
    there = found.input_bytes > 0, found.grad_bytes > 0, found.weight_bytes > 0
    return _with(config, *there), found.share, [found.line()]


def _with(config: TrainConfig, inputs: bool, grads: bool, weights: bool) -> TrainConfig:
    """Whether they lie on the host."""
    places, there = ("device", "host"), {"activations": inputs, "main_grad": grads, "weights": weights}
    return with_values(config, {f"memory.{name}": places[on_host] for name, on_host in there.items()})


def hardware_of(there: torch.device) -> Device:
    if there.type != "cuda":
        return device("cpu")
    return device_of(torch.cuda.get_device_name(there)) or device("h200")


def best_placing(
    config: TrainConfig, axes: tuple[int, int, int], room: float, hardware: Device, dtype: torch.dtype
) -> Placing:
    """Of all recompute policies that are open; `axes` are dp, ep and tp."""
    asked = config.pipeline.recompute
    levels: tuple[Again, ...] = LEVELS if asked == "auto" else (("off" if asked == "norms" else asked),)
    kinds = product(inputs_open(config, axes), grads_open(config, axes), weights_open(config, axes))
    ways = [_with(config, *on_host) for on_host in kinds]
    found = [placing(way, axes, room, hardware, dtype, level) for level in levels for way in ways]

    def rank(one: Placing) -> tuple[bool, bool, int, float]:
        more = (one.input_bytes > 0) + (one.grad_bytes > 0)
        # Weights last: they come twice a microbatch, and a step of few tokens waits for them.
        return (False, one.weight_bytes > 0, more, one.step_s) if one.fits else (True, False, 0, one.peak)

    return min(found, key=rank)


def inputs_open(config: TrainConfig, axes: tuple[int, int, int]) -> Sequence[bool]:
    """Whether inputs of layers may lie on the host."""
    asked = config.memory.activations
    wrong = list(activation_problems(config.pipeline, config.model))
    if asked == "device" or wrong or not leaving_inputs(_with(config, True, False, False), axes):
        return (False,)
    return (True,) if asked == "host" else (False, True)


def grads_open(config: TrainConfig, axes: tuple[int, int, int]) -> Sequence[bool]:
    """Whether gradients may; where not all is trained, whoever wants that says so."""
    asked, model = config.memory.main_grad, config.model
    dense = sum(map(model.is_dense, range(model.num_layers)))
    alike = max(dense, model.num_layers - dense) > config.memory.buffers
    whole = alike and not (config.lora.rank or config.optim.frozen)
    later = updates_in_next_forward(_with(config, False, True, False), prod(axes), config.parallel.pp)
    if asked == "auto" and whole and later and config.optim.accumulate == 1:
        return (False, True)
    return (asked == "host",)


def weights_open(config: TrainConfig, axes: tuple[int, int, int]) -> Sequence[bool]:
    """Whether weights of experts may."""
    if config.memory.weights != "auto":
        return (config.memory.weights == "host",)
    given = (config.memory, config.optim, config.placement, config.pipeline, config.model, config.lora)
    wrong = list(expert_weight_problems(*given, config.moe.expert_bias, config.parallel.pp))
    return (False,) if wrong or prod(axes) > 1 else (False, True)


def placing(
    config: TrainConfig,
    axes: tuple[int, int, int],
    room: float,
    hardware: Device,
    dtype: torch.dtype,
    again: Again,
    share: float | None = None,
) -> Placing:
    """With the smallest share that fits, or with the one that is given."""
    fused = hardware.name != "cpu" and dtype.itemsize < 4
    state, here = state_and_rest(config, axes, dtype, again, fused=fused)
    travel = each_element(config.optim, config.memory.states, dtype) / each_element(
        config.optim, "all", dtype
    )
    buffers = buffer_bytes(config, axes, dtype)
    if share is None:
        over = here + state - room
        share = 0.0 if over <= 0 else min(-(-100 * (over + buffers) // max(travel * state, 1.0)) / 100, 1.0)
    leaves = share * travel * state
    inputs = num_inputs(config, axes) * input_bytes(config, axes, float(dtype.itemsize))
    times = simulated(with_values(config, {"pipeline.recompute": again}), axes, hardware, dtype, share)
    link = host_link(config)
    grads = grads_away(config, axes, dtype)
    weights = sum(size for size, _ in estimated_weights(config, float(dtype.itemsize)).values())
    return Placing(
        share=share,
        again=again,
        peak=here + state - leaves + (buffers if share else 0.0),
        room=room,
        host_bytes=leaves,
        step_s=times.step,
        grad_bytes=grads,
        copies_s=link.seconds(
            leaves + grads + (inputs + 2 * weights) * (1 if by_layers(config) else config.optim.accumulate)
        ),
        exposed_s=times.exposed if leaves + inputs + grads + weights else 0.0,
        input_bytes=inputs,
        weight_bytes=weights,
    )


def state_and_rest(
    config: TrainConfig, axes: tuple[int, int, int], dtype: torch.dtype, again: Again, *, fused: bool = False
) -> tuple[float, float]:
    """Bytes on a rank at its peak: (optimizer state, all else). `fused`: our kernels compute the experts."""
    dp, ep, tp = axes
    sizes = _sizes(config)
    turns = grads_take_turns(config, dp * ep * tp, 1)
    pp = config.parallel.pp
    sharing = Sharing(dp=dp, ep=ep, tp=tp, pp=pp, fused=fused, by_layer=turns > 0, at_once=turns)
    layers, tables = range(config.model.num_layers), (True, not config.model.tie_embeddings)
    parameters = sharing.held(sizes, layers, tables)
    grad = summed_type(config.optim.main_grad, dtype).itemsize
    held = StateBytes(weight=dtype.itemsize, gradient=grad, shard=0.0).of(sizes, parameters)
    tokens = config.data.batch_size * config.data.seq_len / (config.optim.accumulate * dp * ep)
    width = float(dtype.itemsize)
    leave = leaving_inputs(config, axes)
    kept = sum(
        sharing.layer(sizes, sizes.moe_layers[index], tokens, width, again, sizes.training(index))
        for index in layers
        if index not in leave
    )
    kept *= config.optim.accumulate if by_layers(config) else 1
    if leave:  # those that wait for their way out, and the ring
        kept += 2 * input_buffers(config) * input_bytes(config, axes, width)
    most = beside(sizes, sharing, tokens, width, program=by_layers(config), head=True)
    state = parameters.owned * each_element(config.optim, "all", dtype)
    return state, held + kept + most - weights_saved(config, width)


def _sizes(config: TrainConfig) -> ModelSizes:
    """What is frozen counts as trained where nobody knows its price."""
    if unpriced(config.model):
        return sizes_of(config.model, config.moe, config.gate)
    return sizes_of_run(config)


def num_inputs(config: TrainConfig, axes: tuple[int, int, int]) -> int:
    """That lie on the host at a time."""
    return len(leaving_inputs(config, axes)) * (config.optim.accumulate if by_layers(config) else 1)


def grads_away(config: TrainConfig, axes: tuple[int, int, int], dtype: torch.dtype) -> float:
    """Bytes of gradients on the host."""
    if config.memory.main_grad != "host":
        return 0.0
    sizes, turns = _sizes(config), grads_take_turns(config, prod(axes), 1)
    layers = range(config.model.num_layers)
    trained = sum(sizes.trained_dense(layer) + sizes.trained_experts(layer) for layer in layers)
    part = max(1 - turns / config.model.num_layers, 0.0)
    return part * trained * summed_type(config.optim.main_grad, dtype).itemsize


def buffer_bytes(config: TrainConfig, axes: tuple[int, int, int], dtype: torch.dtype) -> float:
    """Of the ring."""
    each = each_element(config.optim, config.memory.states, dtype)
    place = StatePlace(each=each, buffers=config.memory.buffers)
    return place.ring(_sizes(config), axes[0] * axes[1] * axes[2])


def host_link(config: TrainConfig) -> Link:
    rate, usual = 1e9 * config.memory.copy_gb_s, LINKS["host-copies"]
    return replace(usual, bandwidth=rate, efficiency=1.0) if rate else usual


class SteadyStep(NamedTuple):
    """One of many steps, in seconds."""

    step: float
    exposed: float
    """Copies that are not under compute."""


def simulated(
    config: TrainConfig, axes: tuple[int, int, int], hardware: Device, dtype: torch.dtype, share: float
) -> SteadyStep:
    """The step with this share of state on the host, in one stage: there is one rank."""
    dp, ep, _ = axes
    prices = prices_of(config, axes, hardware, dtype)
    config = with_values(config, {"pipeline.layers": (), "pipeline.layers_per_virtual_stage": "auto"})
    run = RunStep(config=config, dp=dp, ep=ep, costs=None, step_costs=prices, host_share=share)
    return one_of_many(run.answer("layers" if by_layers(config) else "1f1b"))


def prices_of(
    config: TrainConfig, axes: tuple[int, int, int], hardware: Device, dtype: torch.dtype
) -> StepPrices:
    """Those of `moeclipse plan`; on CPUs, and where these have none, one rate and one link."""
    dp, ep, _ = axes
    if hardware.name != "cpu" and not unpriced(config.model):
        machine = replace(cluster(hardware.name), host=host_link(config))
        return cluster_costs(config, machine, (dp, ep), 1.0, dtype)
    wire = LINKS["nvlink4" if hardware.name != "cpu" else "loopback"]
    return StepCosts(step_work(config, dp, ep, float(dtype.itemsize)), hardware, wire, host_link(config))


def one_of_many(answer: Answer) -> SteadyStep:
    """Behind the last compute of a step only stores are left, and these run beside the next step."""
    last, busy = 0.0, {TO_HOST: 0.0, TO_DEVICE: 0.0}
    starts, ends = answer.result.start, answer.result.finish
    ops = [op for ops in answer.result.program.ranks for op in ops]
    for op, start, end in zip(ops, starts.tolist(), ends.tolist(), strict=True):
        if op.lane in busy:
            busy[op.lane] += end - start
        if op.lane != TO_HOST:
            last = max(last, end)
    step = max(last, *busy.values())
    left = answer.summary.makespan - step
    return SteadyStep(step, max(answer.summary.ranks[0].exposed - left, 0.0))
