"""Activation recompute on several ranks: a policy for each layer, chosen before anything is built.

On one rank the model is there and is asked (`train/step/recompute`). On several, running a layer's attention
or all of it again takes a program instead of autograd, and which it is must be known first. So

    state          is counted from the configuration (`train/predict/state_bytes`),
    a layer        is built alone, on a mesh of one rank, with as many experts as it will have here: one
                   sample goes through it, and what it keeps is counted in each way,
    the program    of each way says how much of that a rank holds at its peak (`schedule/memory`).

The first of LADDER that fits the rank with least memory left is taken by all, and kept in `choices.json`.

Where ranks share experts, rows that arrive are kept beside a layer's own, experts have up to UNEVEN times
their share of them, and they are never as many as in the step before: memory that is given back does not fit
the next. So more of a device stays free than on one rank (APART).

Hazard. What tp ranks keep is taken to be their share of it. Where part of a model is frozen or adapters are
trained, state is not known, and nothing is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from moeclipse.comm.mesh import Mesh
from moeclipse.core.auto import Chosen
from moeclipse.core.config import with_values
from moeclipse.model.passes import layer_shapes
from moeclipse.model.recompute import Again
from moeclipse.model.transformer import Transformer
from moeclipse.moe.config import GateConfig
from moeclipse.moe.validate import expert_group
from moeclipse.pipeline.overlap import StageLayout, lay_out, make_program
from moeclipse.schedule.shape import Activation
from moeclipse.tensor.vocab import CHUNK_BYTES
from moeclipse.train.config import TrainConfig
from moeclipse.train.predict.state_bytes import state_bytes
from moeclipse.train.predict.step_sizes import attention_sizes
from moeclipse.train.step.dtype import choose_dtype
from moeclipse.train.step.memory_bytes import memory_left
from moeclipse.train.step.partial_graphs import obstacle_in_config
from moeclipse.train.step.pipelined import chunks_for
from moeclipse.train.step.recompute import LADDER, kept_by, pick, told

KEY = "pipeline.recompute"
VOCABULARY = 64
SCORE_BYTES = 8
"""Of each expert's score, there and back."""
HEADS, HIDDEN = 4, 3
"""Values that are kept of each: queries, keys, values and what attention gave; gate, value, their product."""
UNEVEN = 1.1
"""Rows of the busiest rank, in mean ranks."""
APART = 0.85
"""Of a device that may be taken where ranks share experts: sizes that change leave holes."""
BY_AUTOGRAD, IN_PROGRAM = 2.0, 5.5
"""What backward in one layer takes, in what it keeps. Seen: 1.0 to 2.0, and 2.8 to 5.3: a program keeps
operands of weight gradients until their turn, and what another stream reads until it has."""
ROUNDS = 4
"""Microbatches, in ranks of the pipeline, behind which a program holds no more than before."""


def left_open(config: TrainConfig, mesh: Mesh) -> bool:
    """Whether it is left to us, and can be counted; on CPUs memory is not what runs out."""
    counted = not (config.model.memory or config.lora.rank or config.optim.frozen)
    several = mesh.num_ranks > 1 and mesh.device.type == "cuda"
    return config.pipeline.recompute == "auto" and several and counted


def choose_recompute(config: TrainConfig, mesh: Mesh) -> Chosen:
    """Where something has to be recomputed. Collective."""
    if not left_open(config, mesh):
        return {}, []
    expected = peaks(config, mesh)
    room = min(mesh.gather_objects(memory_left(mesh)))
    room *= APART if expert_group(mesh, config.moe).size > 1 else 1.0
    level = pick(expected, room)
    return ({KEY: level} if level != "off" else {}), told(expected, room, level)


def peaks(config: TrainConfig, mesh: Mesh) -> dict[Again, float]:
    """The most memory that a step is expected to take on any rank, by recompute policy."""
    pipeline, model = config.pipeline, config.model
    layout = lay_out(pipeline, model.num_layers, mesh.pp, config.optim.accumulate)
    dtype = choose_dtype(model.dtype, mesh.device)
    state_P = state_bytes(config, mesh, layout, dtype)
    samples = -(-config.data.batch_size // (config.optim.accumulate * mesh.num_data))
    kinds = {model.is_dense(index) for index in range(model.num_layers)}
    kept = {dense: layer_keeps(config, mesh, samples, dense) for dense in kinds}
    logits = samples * config.data.seq_len * model.vocab_size * dtype.itemsize // mesh.tp
    most = max(of_kind["off"] for of_kind in kept.values())
    found: dict[Again, float] = {}
    for level in LADDER:
        if level == "norms":
            continue
        changed = with_values(config, {KEY: level})
        working = IN_PROGRAM if changed.runs_program(mesh.pp, mesh.num_ranks) else BY_AUTOGRAD
        beside = 2 * min(logits, CHUNK_BYTES) + working * most
        held_P = held_at_peak(changed, mesh, layout, kept)
        found[level] = beside + max(map(sum, zip(state_P, held_P, strict=True)))
    # Without a program autograd may forget what norms gave; with one there is no such way.
    apart = [kept[model.is_dense(index)] for index in range(model.num_layers) if pipeline.runs_again(index)]
    less = 0.0 if pipeline.runs_program(mesh.pp, 1) else sum(k["off"] - k["norms"] for k in apart)
    found["norms"] = found["off"] - less
    if not obstacle_in_config(with_values(config, {KEY: "off"}), mesh):  # graphs have their inputs copied
        found["off"] += model.num_layers * samples * config.data.seq_len * model.d_model * dtype.itemsize
    return found


def held_at_peak(
    config: TrainConfig, mesh: Mesh, layout: StageLayout, kept: Mapping[bool, Mapping[Again, float]]
) -> tuple[float, ...]:
    """Bytes of activations on each rank of the pipeline."""
    model, pipeline, microbatches = config.model, config.pipeline, config.optim.accumulate
    few = ROUNDS * mesh.pp
    if layout.schedule != "gpipe" and microbatches > few and microbatches % few == 0:
        microbatches = few
    shapes = [
        replace(shape, activation=activation_of(kept[model.is_dense(index)]))
        for index, shape in enumerate(layer_shapes(model, config.moe))
    ]
    chunks = chunks_for(config, mesh.num_data)
    return make_program(pipeline, layout, shapes, mesh.pp, microbatches, chunks).peak


def activation_of(kept: Mapping[Again, float]) -> Activation:
    """What a layer keeps, by part: what is not kept where a part is recomputed is that part's."""
    attn = kept["off"] - kept["attn"]
    return Activation(input=kept["full"], attn=attn, shared=0.0, mlp=kept["off"] - kept["full"] - attn)


def layer_keeps(config: TrainConfig, mesh: Mesh, samples: int, dense: bool) -> dict[Again, float]:
    """Bytes that one layer keeps of a microbatch on this rank, by recompute policy."""
    alone, length, moe = Mesh.single(mesh.device), config.data.seq_len, config.moe
    here = max(-(-moe.num_experts // expert_group(mesh, moe).size), config.gate.top_k)
    model = Transformer(
        replace(
            config.model,
            num_layers=1,
            num_dense_layers=int(dense),
            dense_layers=(),
            vocab_size=VOCABULARY,
        ),
        replace(moe, num_experts=here, schedule="blocking", transport="auto", shadow="off"),
        GateConfig(top_k=config.gate.top_k),
        mesh=alone,
        dtype=choose_dtype(config.model.dtype, mesh.device),
    )
    kept: dict[Again, float] = {level: kept_by(model, alone, length, level) for level in LADDER}
    scores = 0 if dense else SCORE_BYTES * length * (moe.num_experts - here)
    more = 0.0 if dense else arriving_bytes(config, mesh, model)
    if more and expert_group(mesh, moe).size > 1:
        more += (UNEVEN - 1) * (kept["attn"] - kept["full"])
    found: dict[Again, float] = {}
    for level, size in kept.items():
        size += scores if level != "full" else 0
        cut = size if config.parallel.sequence_parallel else min(size, inner_bytes(config, model, dense))
        found[level] = samples * (size - cut * (1 - 1 / mesh.tp) + (more if level != "full" else 0.0))
    return found


def arriving_bytes(config: TrainConfig, mesh: Mesh, model: Transformer) -> float:
    """Rows that experts keep of one sample, where they are not the layer's own."""
    moe, ranks = config.moe, expert_group(mesh, config.moe).size
    if ranks == 1 and not config.runs_program(mesh.pp, mesh.num_ranks):
        return 0.0
    # A token goes once to each rank that has an expert of its choice.
    visited = ranks * (1 - (1 - 1 / ranks) ** config.gate.top_k)
    tokens = config.data.seq_len / (1 if moe.expert_tp == "sharded" else mesh.tp)
    return tokens * visited * config.model.d_model * model.dtype.itemsize


def inner_bytes(config: TrainConfig, model: Transformer, dense: bool) -> float:
    """What is cut over tp where tokens are not: heads, and hidden values of blocks, of one sample."""
    _, heads = attention_sizes(config.model)
    hidden = config.model.d_ff if dense else config.gate.top_k * config.moe.d_ff + config.moe.shared_width
    return config.data.seq_len * model.dtype.itemsize * (HEADS * heads + HIDDEN * hidden)
