"""Names of tensors: which parts of the tensors in a Hugging Face folder make up each logical tensor of ours.

    ours                         theirs
    layers.3.attention.q.weight  model.layers.3.self_attn.q_proj.weight
    layers.3.dense.up.weight     model.layers.3.mlp.gate_proj.weight, then ...up_proj.weight: rows under rows
    layers.3.moe.experts.7.up    the same of expert 7; or expert 7 of a stack; or every second column of one

Idea. Every logical tensor is made of parts of theirs (`hf/row_ranges`). What families call alike is said once
here; `Names` is what one calls otherwise. Mixers other than attention are in `hf/mixer_names`.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Literal

from moeclipse.hf.mixer_names import MixerStyle, mixer_tensors
from moeclipse.hf.row_ranges import (
    LogicalTensor,
    Named,
    RowRange,
    renamed,
    taking_turns,
    under_each_other,
    whole,
)
from moeclipse.model.config import ModelConfig
from moeclipse.moe.config import GateConfig, MoEConfig


@dataclass(frozen=True, kw_only=True)
class Names:
    """What a family calls what others call otherwise; a block is what stands beside attention in a layer."""

    block: str = "mlp"
    gate: str = "gate.weight"
    logit_bias: str = "router.bias"
    choice_bias: str = "gate.e_score_correction_bias"
    """Empty: nothing moves the choice."""
    choice_bias_rows: Literal[0, 1] = 0
    """1: it is a matrix of one row."""
    experts: Literal["each", "stacked", "transposed", "interleaved"] = "each"
    """A tensor for each expert; one for all, as it is, or transposed, or with gate and up in turn besides."""
    up: tuple[str, ...] = ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight")
    down: str = "experts.{}.down_proj.weight"
    shared: str = ""
    """The shared expert, where it is not `shared_expert` (behind a gate) or `shared_experts` of the block."""
    experts_module: str = "mlp.experts"
    """Of transformers' model, by which adapters name it; files may name it otherwise (Mixtral's do)."""
    adapters_turned: bool = False
    """Experts lie [in, out] and do not say so, so PEFT takes what comes out for what goes in (Llama 4)."""
    mixers: MixerStyle = "split"
    """How a delta mixer's projections lie in a file."""
    attention_gate: str = ""
    """Of what attention took; empty: each head's rows of it follow those of its query (Qwen3-Next)."""
    words: tuple[tuple[str, str], ...] = ()
    """(what others say in a key, what this family says), one after the other."""
    others: tuple[Names, ...] = ()
    """What files of the family may be like instead; they are written as this one."""


EACH = Names()
MIXTRAL = Names(
    block="block_sparse_moe",
    up=("experts.{}.w1.weight", "experts.{}.w3.weight"),
    down="experts.{}.w2.weight",
)
GRANITE = Names(
    block="block_sparse_moe",
    gate="router.layer.weight",
    experts="stacked",
    up=("input_linear.weight",),
    down="output_linear.weight",
    experts_module="block_sparse_moe.experts",
)
SHARED_MLP = "shared_mlp"
"""Of Granite, beside the block and with gate and up in one matrix; of Hunyuan, in it and like others."""
GRANITE_SWA = Names(
    block="block_sparse_moe",
    gate="router.weight",
    experts="stacked",
    up=("experts.gate_up_proj",),
    down="experts.down_proj",
    shared=SHARED_MLP,
    experts_module="block_sparse_moe.experts",
)
MINIMAX = Names(
    block="block_sparse_moe",
    choice_bias="e_score_correction_bias",
    up=("experts.{}.w1.weight", "experts.{}.w3.weight"),
    down="experts.{}.w2.weight",
)
HUNYUAN = Names(gate="router.gate.weight", choice_bias="expert_bias", shared=SHARED_MLP)
STACKED = Names(experts="stacked", up=("experts.gate_up_proj",), down="experts.down_proj")
ARIA = Names(
    gate="router.weight", experts="transposed", up=("experts.fc1.weight",), down="experts.fc2.weight"
)
QWEN3_NEXT = Names(mixers="fused")
KIMI = Names(
    block="block_sparse_moe",
    mixers="kimi",
    up=("experts.{}.w1.weight", "experts.{}.w3.weight"),
    down="experts.{}.w2.weight",
)
KIMI = replace(KIMI, others=(replace(KIMI, words=((".mlp.", ".block_sparse_moe."),)),))
"""As transformers saves it, dense blocks included."""
LLAMA4 = Names(
    block="feed_forward",
    gate="router.weight",
    choice_bias="",
    experts="transposed",
    up=("experts.gate_up_proj",),
    down="experts.down_proj",
    shared="shared_expert",
    experts_module="feed_forward.experts",
    adapters_turned=True,
    words=((".mlp.", ".feed_forward."),),
)
HUNYUAN_V1 = Names(
    gate="gate.wg.weight",
    shared=SHARED_MLP,
    words=((".q_norm.", ".query_layernorm."), (".k_norm.", ".key_layernorm.")),
)
AFMOE = Names(
    gate="router.gate.weight",
    choice_bias="expert_bias",
    attention_gate="gate_proj",
    words=(
        ("pre_feedforward_layernorm", "pre_mlp_layernorm"),
        ("post_feedforward_layernorm", "post_mlp_layernorm"),
    ),
)
LAGUNA = Names(choice_bias="experts.e_score_correction_bias", shared="shared_expert", attention_gate="g_proj")
LFM2 = Names(
    block="feed_forward",
    choice_bias="expert_bias",
    up=("experts.{}.w1.weight", "experts.{}.w3.weight"),
    down="experts.{}.w2.weight",
    experts_module="feed_forward.experts",
    words=(
        *((".o_proj.", ".out_proj."), (".q_norm.", ".q_layernorm."), (".k_norm.", ".k_layernorm.")),
        *((".mlp.gate_proj.", ".feed_forward.w1."), (".mlp.up_proj.", ".feed_forward.w3.")),
        *((".mlp.down_proj.", ".feed_forward.w2."), ("input_layernorm", "operator_norm")),
        *(("post_attention_layernorm", "ffn_norm"), ("model.norm.", "model.embedding_norm.")),
    ),
)
INTERLEAVED = Names(
    gate="router.weight", experts="interleaved", up=("experts.gate_up_proj",), down="experts.down_proj"
)


NORMS: dict[str, tuple[tuple[str, str], ...]] = {
    "before": (("attention_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")),
    "after": (
        ("attention_out_norm", "post_attention_layernorm"),
        ("mlp_out_norm", "post_feedforward_layernorm"),
    ),
    "both": (
        *(("attention_norm", "input_layernorm"), ("attention_out_norm", "post_attention_layernorm")),
        *(("mlp_norm", "pre_feedforward_layernorm"), ("mlp_out_norm", "post_feedforward_layernorm")),
    ),
}
NORMS["experts"] = NORMS["before"]
"""Ours and theirs, by where norms stand."""


def tensor_table(
    names: Names, model: ModelConfig, moe: MoEConfig, gate: GateConfig
) -> dict[str, LogicalTensor]:
    """All tensors of a model: `weight/` parameters and `buffer/` the rest, as checkpoints call them."""
    d, table = model.d_model, {}
    table["weight/embedding"] = whole("model.embed_tokens.weight", model.vocab_size, d)
    table["weight/norm.weight"] = whole("model.norm.weight", d)
    if not model.tie_embeddings:
        table["weight/head.weight"] = whole("lm_head.weight", model.vocab_size, d)
    for index in range(model.num_layers):
        ours, theirs = f"weight/layers.{index}.", f"model.layers.{index}."
        for name, key in norms_of(model, index):
            table[f"{ours}{name}.weight"] = whole(f"{theirs}{key}.weight", d)
        mixer = model.mixer_of(index)
        if mixer != "attention":
            table |= dict(mixer_tensors(mixer, names.mixers, f"{ours}attention.", theirs, model))
        elif model.attention == "mla":
            table |= dict(latent_attention(f"{ours}attention.", f"{theirs}self_attn.", model))
        else:
            table |= dict(grouped_attention(f"{ours}attention.", f"{theirs}self_attn.", names, model))
        if model.is_dense(index):
            block, keys = f"{theirs}mlp.", ("gate_proj.weight", "up_proj.weight")
            table[f"{ours}dense.up.weight"] = under_each_other(
                tuple(block + key for key in keys), model.d_ff, d
            )
            table[f"{ours}dense.down.weight"] = whole(f"{block}down_proj.weight", d, model.d_ff)
        else:
            block = f"{theirs}{names.block}."
            table |= dict(router(index, block, names, model, moe, gate))
            table |= dict(routed_experts(f"{ours}moe.experts.", block, names, d, moe))
            if moe.num_shared_experts:
                table |= dict(shared_experts(f"{ours}moe.shared.", theirs, names, d, moe))
    return {name: renamed(tensor, names.words) for name, tensor in table.items()} if names.words else table


def table_of(
    names: Names, stored: Container[str], model: ModelConfig, moe: MoEConfig, gate: GateConfig
) -> dict[str, LogicalTensor]:
    """Of a file with these tensors: the first of a family's forms that fits, else its own."""
    tables = [tensor_table(form, model, moe, gate) for form in (names, *names.others)]

    def fits(table: dict[str, LogicalTensor]) -> bool:
        return all(part.key in stored for tensor in table.values() for part in tensor.parts)

    return next((table for table in tables[1:] if fits(table)), tables[0])


def norms_of(model: ModelConfig, layer: int) -> tuple[tuple[str, str], ...]:
    behind = model.norms == "experts" and not model.is_dense(layer)
    return (*NORMS[model.norms], *((("mlp_out_norm", "post_mlp_layernorm"),) if behind else ()))


def grouped_attention(ours: str, theirs: str, names: Names, model: ModelConfig) -> Named:
    q, kv, d = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim, model.d_model
    biased = model.attention_bias != "none"
    fused = model.attention_gate != "none" and not names.attention_gate
    for name, width in (("k", kv), ("v", kv), *(() if fused else (("q", q),))):
        yield f"{ours}{name}.weight", whole(f"{theirs}{name}_proj.weight", width, d)
        if biased:
            yield f"{ours}{name}.bias", whole(f"{theirs}{name}_proj.bias", width)
    if fused:
        yield from query_and_gate(ours, theirs, model)
    elif model.attention_gate != "none":
        gates = q if model.attention_gate.startswith("component") else model.num_heads
        yield f"{ours}gate.weight", whole(f"{theirs}{names.attention_gate}.weight", gates, d)
    yield f"{ours}o.weight", whole(f"{theirs}o_proj.weight", d, q)
    if model.attention_bias == "all":
        yield f"{ours}o.bias", whole(f"{theirs}o_proj.bias", d)
    if model.qk_norm not in ("none", "unit"):
        whole_width = model.qk_norm == "whole"
        for name, width in (("q", q), ("k", kv)):
            norm = width if whole_width else model.head_dim
            yield f"{ours}{name}_norm.weight", whole(f"{theirs}{name}_norm.weight", norm)
    if model.attention_sinks:
        yield f"{ours}sinks", whole(f"{theirs}sinks", model.num_heads)


def query_and_gate(ours: str, theirs: str, model: ModelConfig) -> Named:
    """In one matrix: of each head its query, then its gate."""
    width, heads, d = model.head_dim, model.num_heads, model.d_model
    for number, name in enumerate(("q", "gate")):
        for kind, shape in (("weight", (2 * heads * width, d)), ("bias", (2 * heads * width,))):
            if kind == "weight" or model.attention_bias != "none":
                given = (number * width, width, 2 * width, heads)
                yield f"{ours}{name}.{kind}", taking_turns(f"{theirs}q_proj.{kind}", shape, *given)


def latent_attention(ours: str, theirs: str, model: ModelConfig) -> Named:
    d, heads, rank = model.d_model, model.num_heads, model.q_lora_rank
    qk, kv = model.qk_nope_head_dim + model.qk_rope_head_dim, model.kv_lora_rank
    if rank:
        yield f"{ours}q_down.weight", whole(f"{theirs}q_a_proj.weight", rank, d)
        yield f"{ours}q_norm.weight", whole(f"{theirs}q_a_layernorm.weight", rank)
    up = "q_b_proj" if rank else "q_proj"
    yield f"{ours}q_up.weight", whole(f"{theirs}{up}.weight", heads * qk, rank or d)
    down = whole(f"{theirs}kv_a_proj_with_mqa.weight", kv + model.qk_rope_head_dim, d)
    yield f"{ours}kv_down.weight", down
    yield f"{ours}kv_norm.weight", whole(f"{theirs}kv_a_layernorm.weight", kv)
    width = heads * (model.qk_nope_head_dim + model.v_head_dim)
    yield f"{ours}kv_up.weight", whole(f"{theirs}kv_b_proj.weight", width, kv)
    yield f"{ours}o.weight", whole(f"{theirs}o_proj.weight", d, heads * model.v_head_dim)
    if model.index_topk:
        ours, theirs = f"{ours.replace('weight/', 'buffer/', 1)}indexer.", f"{theirs}indexer."
        wide, many = model.index_dim, model.index_heads
        yield f"{ours}query", whole(f"{theirs}wq_b.weight", many * wide, rank or d)
        yield f"{ours}key", whole(f"{theirs}wk.weight", wide, d)
        yield f"{ours}weights", whole(f"{theirs}weights_proj.weight", many, d)
        yield f"{ours}norm_weight", whole(f"{theirs}k_norm.weight", wide)
        yield f"{ours}norm_bias", whole(f"{theirs}k_norm.bias", wide)


def router(
    index: int, block: str, names: Names, model: ModelConfig, moe: MoEConfig, gate: GateConfig
) -> Named:
    ours, experts = f"layers.{index}.moe.gate.", moe.num_experts
    yield f"weight/{ours}weight", whole(block + names.gate, experts, model.d_model)
    if gate.logit_bias:
        yield f"weight/{ours}logit_bias", whole(block + names.logit_bias, experts)
    if names.choice_bias and (gate.kind == "sigmoid" or names.choice_bias_rows):
        key = block + names.choice_bias
        if names.choice_bias_rows:
            part = RowRange(key=key, shape=(1, experts), rows=experts, entry=0)
            yield f"buffer/{ours}bias_E", LogicalTensor(shape=(experts,), parts=(part,))
        else:
            yield f"buffer/{ours}bias_E", whole(key, experts)


def routed_experts(ours: str, block: str, names: Names, d: int, moe: MoEConfig) -> Named:
    experts, width = moe.num_experts, moe.d_ff
    for e in range(experts):
        if names.experts == "each":
            keys = tuple(block + key.format(e) for key in names.up)
            yield f"{ours}{e}.up", under_each_other(keys, width, d)
            yield f"{ours}{e}.down", whole(block + names.down.format(e), d, width)
            continue
        up, down = block + names.up[0], block + names.down
        if names.experts == "transposed":
            part = RowRange(key=up, shape=(experts, d, 2 * width), rows=2 * width, entry=e, transposed=True)
            yield f"{ours}{e}.up", LogicalTensor(shape=(2 * width, d), parts=(part,))
            part = RowRange(key=down, shape=(experts, width, d), rows=d, entry=e, transposed=True)
            yield f"{ours}{e}.down", LogicalTensor(shape=(d, width), parts=(part,))
        elif names.experts == "stacked":
            part = RowRange(key=up, shape=(experts, 2 * width, d), rows=2 * width, entry=e)
            yield f"{ours}{e}.up", LogicalTensor(shape=(2 * width, d), parts=(part,))
            part = RowRange(key=down, shape=(experts, d, width), rows=d, entry=e)
            yield f"{ours}{e}.down", LogicalTensor(shape=(d, width), parts=(part,))
        else:
            yield from interleaved(f"{ours}{e}.", up, down, e, d, moe)


def interleaved(ours: str, up: str, down: str, e: int, d: int, moe: MoEConfig) -> Named:
    """Of expert `e`: columns are gate, up, gate, up, ...; biases lie likewise."""
    experts, width = moe.num_experts, moe.d_ff

    def halves(key: str, shape: tuple[int, ...], transposed: bool) -> tuple[RowRange, ...]:
        return tuple(
            RowRange(key=key, shape=shape, rows=width, entry=e, first=first, step=2, transposed=transposed)
            for first in (0, 1)
        )

    yield f"{ours}up", LogicalTensor(shape=(2 * width, d), parts=halves(up, (experts, d, 2 * width), True))
    part = RowRange(key=down, shape=(experts, width, d), rows=d, entry=e, transposed=True)
    yield f"{ours}down", LogicalTensor(shape=(d, width), parts=(part,))
    if moe.expert_bias:
        bias = halves(f"{up}_bias", (experts, 2 * width), False)
        yield f"{ours}up_bias", LogicalTensor(shape=(2 * width,), parts=bias)
        part = RowRange(key=f"{down}_bias", shape=(experts, d), rows=d, entry=e)
        yield f"{ours}down_bias", LogicalTensor(shape=(d,), parts=(part,))


def shared_experts(ours: str, layer: str, names: Names, d: int, moe: MoEConfig) -> Named:
    """A stack of one; behind a gate its weights have a longer name."""
    width, block = moe.shared_width, f"{layer}{names.block}."
    inner = f"{ours}experts." if moe.shared_gate else ours
    if names.experts == "stacked" and names.shared:  # one matrix for gate and up, beside the block
        theirs = f"{layer}{names.shared}."
        part = RowRange(key=f"{theirs}input_linear.weight", shape=(2 * width, d), rows=2 * width)
        yield f"{inner}up", LogicalTensor(shape=(1, 2 * width, d), parts=(part,))
        last = f"{theirs}output_linear.weight"
    else:
        theirs = f"{block}{names.shared or ('shared_expert' if moe.shared_gate else 'shared_experts')}."
        keys = (f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight")
        yield f"{inner}up", under_each_other(keys, width, d, stack=True)
        last = f"{theirs}down_proj.weight"
    down = RowRange(key=last, shape=(d, width), rows=d)
    yield f"{inner}down", LogicalTensor(shape=(1, d, width), parts=(down,))
    if moe.shared_gate:
        yield f"{ours}gate", whole(f"{block}shared_expert_gate.weight", 1, d)
