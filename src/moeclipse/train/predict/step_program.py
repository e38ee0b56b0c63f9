"""The program of a run's step: what layers launch, which buckets there are, and who meets on which axis.

A pipeline executes this program. Without one, autograd runs the same ops in the same order, microbatch by
microbatch; then the program is there to be checked (`parallel.check_launches`) and to be simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from torch import nn

from moeclipse.comm.async_ops.ledger import Ledger
from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.model.count import expert_matrices
from moeclipse.model.launches import LayerLaunches
from moeclipse.model.passes import layer_shapes
from moeclipse.model.transformer import Transformer
from moeclipse.pipeline.overlap import StageLayout, make_program
from moeclipse.schedule.check import Verified
from moeclipse.schedule.launch import BucketShape, StepShape
from moeclipse.schedule.op import Program
from moeclipse.schedule.shape import LayerShape
from moeclipse.train.config import TrainConfig
from moeclipse.train.optim.buckets import TURNS, Buckets
from moeclipse.train.optim.memory_config import trains_experts
from moeclipse.train.optim.parameter_groups import ParameterGroups
from moeclipse.train.placement.may_move import as_far_as_it_goes
from moeclipse.train.predict.model_sizes import BITS, first_trained

ON_MESH = (
    "world",
    "stage",
    "experts",
    "replicas",
    "tensor",
    "data",
    "dense_grads",
    "cut_grads",
    "shard_experts",
)


EMBEDDING = "embedding"
"""Its name among a model's parameters."""


def one_stage(num_layers: int) -> StageLayout:
    """All layers on one rank, microbatch by microbatch: what runs without a pipeline."""
    return StageLayout(schedule="1f1b", stages=(range(num_layers),), rank_of=(0,))


def step_program(
    config: TrainConfig, mesh: Mesh, layout: StageLayout, model: Transformer, buckets: Buckets, chunks: int
) -> Verified:
    """Verified. Collective over all ranks: each tells the others its buckets."""
    axes = (mesh.dp, mesh.ep, mesh.tp)
    layers, step = shapes_of_run(config, axes, layout)
    layers = with_host_inputs(layers, config, axes, model.dtype.itemsize)
    layers = with_host_weights(layers, weights_on_host(model, buckets))
    frozen = ParameterGroups.of(config.optim, config.lora).is_frozen
    tied = config.model.tie_embeddings and not frozen(EMBEDDING)
    mine = [list(shape) for shape in bucket_shapes(model, buckets, layout, mesh.pp_index, tied=tied)]
    everyone = mesh.gather_objects(mine) if mesh.pp > 1 else [mine]
    copies = len(everyone) // mesh.pp
    listed = tuple(tuple(map(_bucket, everyone[place * copies])) for place in range(mesh.pp))
    ends = layout.rank_of[0], layout.rank_of[-1]
    step = replace(step, buckets=listed, tied=tied and ends[0] != ends[1], slots=config.memory.buffers)
    step = with_weight_ring(replace(step, input_slots=input_buffers(config)), config)
    step = when_updated(step, config, mesh.num_ranks, mesh.pp)
    accumulate = config.optim.accumulate
    return make_program(config.pipeline, layout, layers, mesh.pp, accumulate, chunks, step=step)


def updates_in_backward(config: TrainConfig, num_ranks: int, pp: int) -> bool:
    """Whether a layer is updated as soon as its gradients are there (`train/step/clip`)."""
    plain = not config.runs_program(pp, num_ranks)
    return config.optim.clip == "layer" and num_ranks == 1 and (plain or by_layers(config))


def updates_in_next_forward(config: TrainConfig, num_ranks: int, pp: int) -> bool:
    """Whether state that travels does so under the next step's forward (`train/optim/deferred`)."""
    alone = num_ranks == 1 and not config.runs_program(pp, num_ranks)
    travels = config.memory.travels or config.memory.main_grad == "host"
    return travels and config.optim.clip == "global" and alone


def when_updated(step: StepShape, config: TrainConfig, num_ranks: int, pp: int) -> StepShape:
    """The step with its buckets, and where the updates of these stand."""
    travels = any(bucket.host_bytes or bucket.turn >= 0 for mine in step.buckets for bucket in mine)
    return replace(
        step,
        by_layer=updates_in_backward(config, num_ranks, pp),
        next_forward=travels and updates_in_next_forward(config, num_ranks, pp),
    )


def first_layers(program: Program) -> list[int]:
    """Of each bucket of a rank that has all layers, the first of them that reads its weights."""
    step = program.pipeline().step
    assert step is not None
    return [min((layer for _, layer in bucket.places), default=0) for bucket in step.buckets[0]]


def by_layers(config: TrainConfig) -> bool:
    """Whether all microbatches go through a layer before the next."""
    return config.pipeline.schedule == "layers"


def one_layer_at_a_time(config: TrainConfig, num_ranks: int, pp: int) -> bool:
    """Whether gradients of a layer are complete and used before those of the next begin."""
    once = config.optim.accumulate == 1 or by_layers(config)
    return once and updates_in_backward(config, num_ranks, pp)


def grads_take_turns(config: TrainConfig, num_ranks: int, pp: int) -> int:
    """Buffers that layers share for gradients; 0: each has its own."""
    if config.memory.main_grad == "host":
        return config.memory.buffers
    return TURNS if one_layer_at_a_time(config, num_ranks, pp) else 0


def shapes_of_run(
    config: TrainConfig, axes: tuple[int, int, int], layout: StageLayout
) -> tuple[list[LayerShape], StepShape]:
    """Layers with what they launch, and the step without buckets; `axes` are dp, ep and tp."""
    dp, ep, tp = axes
    config, _ = as_far_as_it_goes(config, ep if config.moe.expert_tp == "sharded" else ep * tp)
    launches = LayerLaunches(
        model=config.model,
        moe=config.moe,
        gate=config.gate,
        dp=dp,
        ep=ep,
        tp=tp,
        parts_tokens=config.parallel.sequence_parallel and tp > 1,
        replicas=config.placement.used_by(ep * tp),
        lora=config.lora,
        frozen=ParameterGroups.of(config.optim, config.lora).is_frozen,
    )
    shapes = layer_shapes(config.model, config.moe)
    found = launches.of(layout.first_copy.stages, layout.first_copy.rank_of)
    layers = [replace(shape, launches=mine) for shape, mine in zip(shapes, found, strict=True)]
    loads = config.num_expert_layers > 0
    mirrored = layout.num_chains > 1
    return layers, StepShape(dp=dp, ep=ep, tp=tp, rows=launches.rows, loads=loads, mirrored=mirrored)


def input_bytes(config: TrainConfig, axes: tuple[int, int, int], width: float) -> float:
    """Of a layer, for the largest microbatch on a rank; `width`: bytes of a value."""
    dp, ep, tp = axes
    samples = -(-config.data.batch_size // config.optim.accumulate)
    tokens = -(-samples // (dp * ep)) * config.data.seq_len
    rows = -(-tokens // tp) if config.parallel.sequence_parallel else tokens
    return rows * config.model.d_model * width


def with_host_inputs(
    layers: Sequence[LayerShape], config: TrainConfig, axes: tuple[int, int, int], width: float
) -> list[LayerShape]:
    """Those whose inputs travel say so."""
    size, leave = input_bytes(config, axes, width), leaving_inputs(config, axes)
    return [replace(layer, host_bytes=size * (index in leave)) for index, layer in enumerate(layers)]


def with_host_weights(
    layers: Sequence[LayerShape], sizes: Mapping[int, tuple[float, float]]
) -> list[LayerShape]:
    """Those whose experts travel say so; `sizes`: bytes of a layer's weights, and of those it trains."""
    moved = [sizes.get(index, (0.0, 0.0)) for index in range(len(layers))]
    return [
        replace(layer, weight_bytes=size, stored_bytes=trained)
        for layer, (size, trained) in zip(layers, moved, strict=True)
    ]


def weights_on_host(model: Transformer, buckets: Buckets) -> dict[int, tuple[float, float]]:
    """Of each layer (bytes of its experts' weights on the host, of those that are trained)."""
    found: dict[int, tuple[float, float]] = {}
    layer_of = {id(p): layer.index for layer in model.all_layers for p in layer.parameters()}
    for bucket in (*buckets, *buckets.frozen):
        if bucket.lent is not None:
            layer, size = layer_of[id(bucket.parameters[0])], bucket.lent.held.nbytes
            whole, trained = found.get(layer, (0.0, 0.0))
            found[layer] = whole + size, trained + size * (not bucket.frozen)
    return found


def estimated_weights(config: TrainConfig, width: float) -> dict[int, tuple[float, float]]:
    """The same of a run that nobody has started; `width`: bytes of a weight that is in no fewer bits."""
    if config.memory.weights != "host":
        return {}
    each = sum(rows * columns for rows, columns in expert_matrices(config.model, config.moe).values())
    size = config.moe.num_experts * each * (BITS[config.model.base] / 8 or width)
    trained = trains_experts(config.optim.frozen, config.model, config.lora, config.moe.expert_bias)
    return dict.fromkeys(config.model.expert_layers, (size, size * trained))


def weights_saved(config: TrainConfig, width: float) -> float:
    """Bytes of a device that weights on the host do not take, the ring's counted."""
    sizes = [size for size, _ in estimated_weights(config, width).values()]
    return sum(sizes) - config.memory.buffers * max(sizes, default=0.0)


def with_weight_ring(step: StepShape, config: TrainConfig) -> StepShape:
    """Where weights from the host visit, and the first layer that they come to for backward."""
    if config.memory.weights != "host":
        return step
    # A program sends gradients through all layers.
    first = 0 if by_layers(config) else first_trained(config)
    return replace(step, weight_slots=config.memory.buffers, first_backward=first)


def input_buffers(config: TrainConfig) -> int:
    """Of the device, each way. Layer by layer those of all microbatches come between the state of two layers,
    which waits for its ring: nobody's input should wait behind it."""
    least = config.memory.buffers
    return max(least, config.optim.accumulate + 1) if by_layers(config) else least


def leaving_inputs(config: TrainConfig, axes: tuple[int, int, int]) -> list[int]:
    """Layers whose inputs lie on the host between forward and backward: those that are recomputed whole.

    Not the first, whose input is held on to by the embedding, or as the end of backward; autograd on one rank
    has that end at the first layer with something to train. Nor the last: backward begins with it.
    """
    if config.memory.activations != "host":
        return []
    num_ranks = prod(axes) * config.parallel.pp
    alone = num_ranks == 1 and not config.runs_program(config.parallel.pp, 1)
    first = first_trained(config) if alone else 0
    return [
        index for index in range(first + 1, config.model.num_layers - 1) if config.pipeline.runs_again(index)
    ]


def estimated_buckets(
    layout: StageLayout, sizes: Sequence[tuple[float, float]], ends: tuple[float, float], *, tied: bool
) -> tuple[tuple[BucketShape, ...], ...]:
    """Buckets of a run that nobody has started: for each place, one for a layer and one for its experts.

    `sizes` are parameters of each layer, dense and of experts, `ends` those of embedding and head.
    """
    apart = layout.rank_of[0] != layout.rank_of[-1]
    num_layers = max(layers.stop for layers in layout.stages)
    found: list[tuple[BucketShape, ...]] = []
    for place in range(max(layout.rank_of) + 1):
        mine: list[BucketShape] = []
        # From the last layer to the first, alike at both places that hold them.
        for stage, layers in sorted(layout.held_by(place).items(), key=lambda held: -held[1].start):
            at = ((stage, len(layers) - 1),)
            if layers.stop == num_layers and ends[1]:
                mine.append(BucketShape("head", "dense_grads", at, tied and apart, 4 * ends[1]))
            for index in reversed(layers):
                where = ((stage, index - layers[0]),)
                for axis, size in zip(("dense_grads", "replicas"), sizes[index], strict=True):
                    if size:
                        mine.append(BucketShape(f"{index}.{axis}", axis, where, False, 4 * size))
            if layers.start == 0 and ends[0]:
                mine.append(
                    BucketShape("embedding", "dense_grads", ((stage, 0),), tied and apart, 4 * ends[0])
                )
        found.append(tuple(mine))
    return tuple(found)


def _bucket(told: list[Any]) -> BucketShape:
    name, axis, places, *rest = told
    return BucketShape(name, axis, tuple((stage, layer) for stage, layer in places), *rest)


def bucket_shapes(
    model: nn.Module, buckets: Buckets, layout: StageLayout, place: int, *, tied: bool
) -> list[BucketShape]:
    """Of this rank, with the layers that fill each; `tied`: the head is the embedding."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    apart = layout.rank_of[0] != layout.rank_of[-1]
    found = []
    for bucket in buckets:
        names = [name_of[id(parameter)] for parameter in bucket.parameters]
        places = sorted({at for name in names for at in _filled_by(name, layout, place, tied)})
        both = tied and apart and EMBEDDING in names
        size = bucket.grads.numel() * bucket.grads.itemsize
        before = bucket.waits_for if buckets.grads_leave else None
        turn = -1 if before is None else buckets.buckets.index(before)
        rest = (both, float(size), bucket.host_bytes, bucket.layer_name, turn, float(size))
        visits = bucket.lent is not None
        found.append(BucketShape(bucket.name, bucket.group.name, tuple(places), *rest, visits))
    return found


def _filled_by(name: str, layout: StageLayout, place: int, tied: bool) -> list[tuple[int, int]]:
    """(stage, layer in it) of the ops of this place that compute a parameter's gradient."""
    held = layout.held_by(place)
    if name.startswith("layers."):
        index = int(name.split(".")[1])
        return [(stage, index - layers[0]) for stage, layers in held.items() if index in layers]
    num_layers = max(layers.stop for layers in layout.stages)
    begin = [(stage, 0) for stage, layers in held.items() if layers.start == 0]
    end = [(stage, len(layers) - 1) for stage, layers in held.items() if layers.stop == num_layers]
    if name == EMBEDDING:
        return begin + end if tied else begin
    return end


def ledger_of(verified: Verified, mesh: Mesh) -> Ledger:
    """What this rank has to launch."""
    groups: dict[str, Group] = {axis: getattr(mesh, axis) for axis in ON_MESH}
    groups["line"] = mesh.line
    if mesh.pp > 1 and verified.program.pipeline().step.tied:  # type: ignore[union-attr]
        groups["ends"] = mesh.ends()
    if "expert_grads" in mesh.partitions:
        groups["expert_grads"] = mesh.expert_grads()
    return Ledger(verified.program, mesh.pp_index, groups)
