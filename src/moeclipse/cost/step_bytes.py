"""Bytes of a step on one rank, in closed form.

    state         weights and gradients of all that a rank holds, master weights and moments of its shard
    kept          what a layer keeps of one token, by part; recompute keeps the part's input instead
    arriving      rows that other ranks' tokens send to this rank's experts
    beside        what one layer's backward takes while it runs, logits, communicators

What a layer keeps is counted on CPU in float32, where it is exact; narrow types keep a few wide copies more,
and kernels on a GPU may keep less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from moeclipse.cost.layer_seconds import UPDATE_BYTES
from moeclipse.cost.sizes import ModelSizes, TrainedLayer

Again = Literal["off", "attn", "mlp", "moe", "full"]
CHOICE_BYTES, SCORE_BYTES = 32.0, 4.0
"""Of one choice of a token (numbers and scores, there and back), and of one expert's score."""
LOGIT_CHUNK = 1 << 29
"""Logits are made and forgotten in pieces of so many bytes; their gradients beside them."""
CONTEXT, COMMUNICATORS = 0.5 * 2**30, 1.0 * 2**30
"""Of a device's context, and of the buffers of collectives where there are several ranks; assumed."""
BY_AUTOGRAD, IN_PROGRAM = 2.0, 5.5
"""What backward in one layer takes, in what it keeps (`train/step/recompute_ranks`, seen on an H200)."""
ALONE, APART = 0.95, 0.85
"""Of a device that may be taken: where ranks share experts, sizes that change leave holes."""
AT_ONCE = 2
"""Layers whose gradients are there together, where each layer is updated before the next has its own."""


class Kept(NamedTuple):
    """Bytes of one token in one layer."""

    input: float
    attn: float
    """What attention keeps, the norm behind it included."""
    mlp: float
    """What the dense block, or shared and routed experts keep."""
    normed: float
    """The input of the latter, which is in attn and outlives it where attention is recomputed."""

    def under(self, again: Again) -> float:
        """With recompute of some parts."""
        return {
            "off": self.input + self.attn + self.mlp,
            "attn": self.input + self.normed + self.mlp,
            "mlp": self.input + self.attn,
            "moe": self.input + self.attn,
            "full": self.input,
        }[again]


class ActivationBytes(NamedTuple):
    """Of one layer for one microbatch on one rank, by the part whose backward releases them."""

    input: float
    """Until the layer's backward ends, whatever is recomputed."""
    attn: float
    shared: float
    mlp: float


def kept_by(
    model: ModelSizes, moe: bool, width: float, part: TrainedLayer | None = None, *, fused: bool = False
) -> Kept:
    """On one rank alone; `width` is that of a value in bytes, `part` what is trained, where that is not all.

    `fused`: kernels gather rows while they load and sum them while they store, so experts keep hidden values
    alone; plain operations keep a copy of the row for each choice, there and back.

    Products keep their inputs, whoever of them and their adapters needs those; what is frozen beside them
    keeps less: norms their normed inputs, a gate its input, which shared experts would need.
    """
    D, H = model.d_model, model.num_heads
    if model.kv_rank:
        nope = model.d_qk - model.d_rope
        heads = H * (3 * nope + 2 * model.d_rope + 3 * model.d_v)
        heads += 3 * (model.q_rank + model.kv_rank) + 2 * model.d_rope
    else:  # queries, keys, values for each head, what attention gave, and what goes into the last product
        heads = 5 * H * model.d_qk + 3 * model.gate_width
    attn = width * (5 * D + heads) + 4.0 * H
    if model.qk_norm:
        normed = H + model.kv_heads
        attn += 2 * width * normed * model.d_qk + 4.0 * normed
    normed_values = 2 * D + model.q_rank + model.kv_rank
    normed_values += (H + model.kv_heads) * model.d_qk if model.qk_norm else 0
    if part is not None:
        attn += width * part.rank * len(part.attn_adapters) - (0 if part.norms else width * normed_values)
    if moe:
        copies = 0 if fused else 2 * D
        mlp = model.experts.top_k * (width * (copies + model.up_width) + CHOICE_BYTES)
        mlp += SCORE_BYTES * model.experts.num_experts + 2 * width * model.shared_width
        if part is not None:
            mlp += width * model.experts.top_k * part.rank * len(part.expert_adapters)
            mlp -= 0 if part.route or model.shared_width else width * D
    else:
        mlp = 4 * width * model.dense_width
    return Kept(width * D, attn, mlp, width * D)


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Of one parameter."""

    weight: float = 2.0
    gradient: float = 4.0
    shard: float = 12.0
    """Master weight and both moments, on the rank that owns it."""
    update: float = UPDATE_BYTES
    """That an update reads and writes."""

    def of(self, model: ModelSizes, held: HeldParameters) -> float:
        experts, matrices = (bits / 8 or self.weight for bits in (model.expert_bits, model.dense_bits))
        weights = held.experts * experts + held.matrices * matrices + held.rest * self.weight
        return weights + held.summed * self.gradient + held.owned * self.shard


class HeldParameters(NamedTuple):
    """Parameters of one rank."""

    experts: float
    matrices: float
    """Of products, experts apart ..."""
    rest: float
    """... and all others: tables, gates, norms, adapters."""
    trained: float
    """Of all these, with a gradient ..."""
    owned: float
    """... and of these, in the rank's shard."""
    summed: float
    """Of those with a gradient, whose are there at a time."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Who shares parameters and tokens of a layer."""

    dp: int = 1
    ep: int = 1
    tp: int = 1
    pp: int = 1
    imbalance: float = 1.1
    """Rows of the busiest rank, in mean ranks."""
    fused: bool = False
    """Experts are computed by our kernels: on GPUs."""
    by_layer: bool = False
    """One rank has all layers, and forgets the gradients of one before those of the next begin."""
    at_once: int = AT_ONCE
    """Layers whose gradients are there together then."""

    def held(self, model: ModelSizes, layers: range, tables: tuple[bool, bool]) -> HeldParameters:
        """`tables`: whether the rank has the embedding, and the head."""
        ranks, table = self.ep * self.tp, model.table_parameters
        parts = [model.training(layer) for layer in layers]
        number = model.experts.num_experts
        moe = [model.moe_layers[layer] for layer in layers]
        adapted = [
            (0.0, 0.0) if part is None else (part.dense_adapted, part.expert_adapted) for part in parts
        ]
        matrices = sum(map(model.matrix_parameters, layers))
        rest = sum(map(model.dense_parameters, layers)) - matrices + sum(tables) * table
        rest += sum(dense for dense, _ in adapted)
        ends = table * sum(map(all, zip(tables, model.trained_tables, strict=True)))
        trained = sum(map(model.trained_dense, layers)) + ends
        shared = sum(map(model.trained_experts, layers))
        beside = number * sum(expert for has, (_, expert) in zip(moe, adapted, strict=True) if has)
        here = trained / self.tp + shared / ranks
        part = min(self.at_once / model.num_layers, 1.0) if self.by_layer else 1.0
        return HeldParameters(
            experts=sum(moe) * number * model.expert_parameters / ranks,
            matrices=matrices / self.tp,
            rest=rest / self.tp + beside / ranks,
            trained=here,
            owned=(trained + shared) / (self.dp * ranks),
            summed=here - (1 - part) * (here - ends / self.tp),
        )

    def layer(
        self,
        model: ModelSizes,
        moe: bool,
        tokens: float,
        width: float,
        again: Again,
        part: TrainedLayer | None = None,
    ) -> float:
        """Activations of one layer for one microbatch of `tokens`, on one rank."""
        kept = kept_by(model, moe, width, part, fused=self.fused)
        size = kept.under(again)
        ranks = self.ep * self.tp
        if moe and again not in ("full", "moe") and ranks > 1:
            size += width * model.d_model * model.experts.visited(ranks)
        if moe and again in ("off", "attn"):
            size += (self.imbalance - 1) * kept.mlp if ranks > 1 else 0.0
        return size * tokens / self.tp

    def parts(
        self,
        model: ModelSizes,
        moe: bool,
        tokens: float,
        width: float,
        again: Again,
        part: TrainedLayer | None = None,
    ) -> ActivationBytes:
        """The same by parts, as if nothing were recomputed but for what then outlives its part."""
        kept, share = kept_by(model, moe, width, part, fused=self.fused), tokens / self.tp
        outlives = kept.normed if again == "attn" else 0.0
        shared = 2 * width * model.shared_width if moe else 0.0
        arrived = width * model.d_model * model.experts.visited(self.ep * self.tp) if moe else 0.0
        mlp, held = kept.mlp - shared, 0.0
        if moe and self.ep * self.tp > 1:
            mlp += (self.imbalance - 1) * kept.mlp
            mlp, held = (mlp, arrived) if again == "mlp" else (mlp + arrived, 0.0)
        sizes = (kept.input + outlives + held, kept.attn - outlives, shared, mlp)
        return ActivationBytes(*(share * size for size in sizes))


def standing(
    model: ModelSizes,
    sharing: Sharing,
    state: StateBytes,
    stages: Sequence[range],
    mine: Sequence[int],
    tokens: float,
    width: float,
    *,
    program: bool,
) -> float:
    """All of a rank that has the stages `mine`, but for activations: its state, and what is beside it."""
    parts = held_of_stages(model, sharing, stages, mine)
    total = sum(state.of(model, part) for part in parts)
    return total + beside(model, sharing, tokens, width, program=program, head=len(stages) - 1 in mine)


def held_of_stages(
    model: ModelSizes, sharing: Sharing, stages: Sequence[range], mine: Sequence[int]
) -> list[HeldParameters]:
    """What a rank holds for each stage that it has."""
    last = len(stages) - 1
    ends = {stage: (stage == 0, stage == last and not (model.tied and 0 in mine)) for stage in mine}
    return [sharing.held(model, stages[stage], ends[stage]) for stage in mine]


def beside(
    model: ModelSizes, sharing: Sharing, tokens: float, width: float, *, program: bool, head: bool
) -> float:
    """What is there beside state and kept activations at the peak."""
    kinds = {(moe, model.training(layer)) for layer, moe in enumerate(model.moe_layers)}
    most = max(sharing.layer(model, moe, tokens, width, "off", part) for moe, part in kinds)
    buffer = 0.0
    if model.expert_bits:  # one for all layers, as large as the larger stack of a rank's experts
        stack = model.d_model * max(model.up_width, model.expert_width)
        buffer = 2.0 * stack * model.experts.num_experts / (sharing.ep * sharing.tp)
    logits = min(tokens * model.vocab * width / sharing.tp, LOGIT_CHUNK)
    alone = sharing.dp * sharing.ep * sharing.tp * sharing.pp == 1
    rest = (2 * logits if head else 0.0) + buffer + CONTEXT + (0.0 if alone else COMMUNICATORS)
    return most * (IN_PROGRAM if program else BY_AUTOGRAD) + rest
