"""Keys of ours that follow from several of theirs: one function for each family, made of what they share.

`theirs` is a `config.json`, with the defaults of its family where it is silent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Values = dict[str, Any]
"""Dotted keys of ours."""


class Missing(ValueError):
    """What a model needs and we do not have, in words."""


def grouped(theirs: Mapping[str, Any]) -> Values:
    """Grouped-query attention."""
    heads = theirs["num_attention_heads"]
    return {
        "model.attention": "gqa",
        "model.num_kv_heads": theirs.get("num_key_value_heads") or heads,
        "model.head_dim": theirs.get("head_dim") or theirs["hidden_size"] // heads,
    }


def all_windows(theirs: Mapping[str, Any]) -> Values:
    """One window for all layers, or none."""
    return {"model.windows": (theirs["sliding_window"],) if theirs.get("sliding_window") else ()}


def by_layer_types(theirs: Mapping[str, Any]) -> Values:
    """Windows of the layers that `layer_types` calls sliding."""
    window = theirs.get("sliding_window") or 0
    kinds = theirs.get("layer_types") or ()
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return {"model.windows": windows if any(windows) else ()}


def delta_layers(theirs: Mapping[str, Any]) -> Values:
    """States instead of attention in layers that `layer_types` calls linear: all but every fourth."""
    step = theirs.get("full_attention_interval") or 4
    kinds = theirs.get("layer_types") or [
        "linear_attention" if (i + 1) % step else "full_attention" for i in range(theirs["num_hidden_layers"])
    ]
    mixers = tuple("gated_delta" if kind == "linear_attention" else "attention" for kind in kinds)
    return {"model.mixers": mixers if "gated_delta" in mixers else ()}


def all_dense(theirs: Mapping[str, Any]) -> Values:
    """A model without experts."""
    return grouped(theirs) | bias_of_all(theirs) | {"model.num_dense_layers": theirs["num_hidden_layers"]}


def dense_of_qwen(theirs: Mapping[str, Any]) -> Values:
    """Layers without experts: those that are named, and those between every n-th."""
    step, named = theirs["decoder_sparse_step"], theirs.get("mlp_only_layers") or ()
    layers = range(theirs["num_hidden_layers"])
    return {"model.dense_layers": tuple(i for i in layers if i in named or (i + 1) % step)}


def renormalises(theirs: Mapping[str, Any]) -> Values:
    return {"gate.kind": "softmax", "gate.renormalise": bool(theirs["norm_topk_prob"])}


def mixtral(theirs: Mapping[str, Any]) -> Values:
    return grouped(theirs) | all_windows(theirs) | {"gate.kind": "softmax", "gate.renormalise": True}


def qwen2(theirs: Mapping[str, Any]) -> Values:
    sliding, until = theirs["use_sliding_window"], theirs["max_window_layers"]
    kinds = theirs.get("layer_types") or [
        "sliding_attention" if sliding and i % 2 == 0 and i < until else "full_attention"
        for i in range(theirs["num_hidden_layers"])
    ]
    window = theirs.get("sliding_window") if sliding else 0
    windows = by_layer_types({"layer_types": kinds, "sliding_window": window})
    bias = {"model.attention_bias": "qkv" if theirs["qkv_bias"] else "none"}
    return grouped(theirs) | windows | dense_of_qwen(theirs) | renormalises(theirs) | bias


def qwen3(theirs: Mapping[str, Any]) -> Values:
    window = theirs.get("sliding_window") if theirs["use_sliding_window"] else 0
    windows = all_windows({"sliding_window": window})
    return grouped(theirs) | windows | dense_of_qwen(theirs) | renormalises(theirs) | with_experts(theirs)


def with_experts(theirs: Mapping[str, Any]) -> Values:
    """Transformers writes their number under one name and reads it under two."""
    experts = theirs.get("num_experts") or theirs.get("num_local_experts") or theirs["num_experts"]
    return bias_of_all(theirs) | {"moe.num_experts": experts}


def olmoe(theirs: Mapping[str, Any]) -> Values:
    return (
        grouped(theirs)
        | renormalises(theirs)
        | bias_of_all(theirs)
        | {"model.clip_qkv": float(theirs.get("clip_qkv") or 0)}
    )


def latent(theirs: Mapping[str, Any]) -> Values:
    """Multi-head latent attention, first layers dense, shared experts."""
    return {
        "model.attention": "mla",
        "model.num_kv_heads": theirs["num_attention_heads"],
        "model.q_lora_rank": theirs.get("q_lora_rank") or 0,
        "model.latent_norm_eps": 1e-6,
        "gate.num_groups": theirs.get("n_group") or 1,
        "gate.top_groups": theirs.get("topk_group") or 1,
    }


def qwen3_next(theirs: Mapping[str, Any]) -> Values:
    return grouped(theirs) | delta_layers(theirs) | bias_of_all(theirs)


def deepseek_v2(theirs: Mapping[str, Any]) -> Values:
    values = latent(theirs) | {"gate.kind": "softmax", "gate.renormalise": False, "gate.group_score": "max"}
    if theirs["topk_method"] == "greedy":
        values |= {"gate.num_groups": 1, "gate.top_groups": 1}
    return values


def deepseek_v3(theirs: Mapping[str, Any]) -> Values:
    pairs = "neighbours" if theirs["rope_interleave"] else "halves"
    return latent(theirs) | sigmoid(theirs) | {"model.rope_pairs": pairs}


def sigmoid(theirs: Mapping[str, Any]) -> Values:
    """A sigmoid gate with a bias on the choice, groups by their best two."""
    return {
        "gate.kind": "sigmoid",
        "gate.renormalise": bool(theirs["norm_topk_prob"]),
        "gate.group_score": "top2",
        "gate.num_groups": theirs.get("n_group") or 1,
        "gate.top_groups": theirs.get("topk_group") or 1,
    }


def gpt_oss(theirs: Mapping[str, Any]) -> Values:
    kinds = theirs.get("layer_types") or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(theirs["num_hidden_layers"])
    ]
    windows = by_layer_types({"layer_types": kinds, "sliding_window": theirs.get("sliding_window")})
    return grouped(theirs) | windows | bias_of_all(theirs)


def glm4(theirs: Mapping[str, Any]) -> Values:
    qk_norm = {"model.qk_norm": "head" if theirs["use_qk_norm"] else "none"}
    return grouped(theirs) | sigmoid(theirs) | bias_of_inputs(theirs) | qk_norm


def granite(theirs: Mapping[str, Any]) -> Values:
    return grouped(theirs) | {
        **bias_of_all(theirs),
        "model.attention_scale": float(theirs["attention_multiplier"]),
        "model.embedding_scale": float(theirs["embedding_multiplier"]),
        "model.residual_scale": float(theirs["residual_multiplier"]),
        "model.logit_scale": 1.0 / theirs["logits_scaling"],
    }


def ernie(theirs: Mapping[str, Any]) -> Values:
    layers, step = theirs["num_hidden_layers"], theirs["moe_layer_interval"]
    first, last = theirs["moe_layer_start_index"], theirs["moe_layer_end_index"]
    last = layers - 1 if last == -1 else last
    dense = tuple(i for i in range(layers) if (i + 1) % step or not first <= i <= last)
    return grouped(theirs) | {"model.dense_layers": dense}


def bias_of_all(theirs: Mapping[str, Any]) -> Values:
    """Of attention's four projections, or of none."""
    return {"model.attention_bias": "all" if theirs["attention_bias"] else "none"}


def bias_of_inputs(theirs: Mapping[str, Any]) -> Values:
    """Of attention's projections, but for the last."""
    return {"model.attention_bias": "qkv" if theirs["attention_bias"] else "none"}


def by_block_types(theirs: Mapping[str, Any], *, first: int) -> Values:
    """Layers without experts by `mlp_layer_types`; a silent file means the first so many."""
    kinds = theirs.get("mlp_layer_types") or ["dense"] * first
    return {"model.dense_layers": tuple(i for i, kind in enumerate(kinds) if kind != "sparse")}


def dots(theirs: Mapping[str, Any]) -> Values:
    window, until = theirs.get("sliding_window"), theirs["max_window_layers"]
    kinds = theirs.get("layer_types") or [
        "sliding_attention" if window and i >= until else "full_attention"
        for i in range(theirs["num_hidden_layers"])
    ]
    windows = by_layer_types({"layer_types": kinds, "sliding_window": window})
    return grouped(theirs) | sigmoid(theirs) | windows | bias_of_all(theirs)


def minimax(theirs: Mapping[str, Any]) -> Values:
    """Files before transformers 5 say how many components turn, not which part of them."""
    turned = {"model.rope_dim": theirs["rotary_dim"]} if theirs.get("rotary_dim") else {}
    return grouped(theirs) | turned


def granite_shared(theirs: Mapping[str, Any]) -> Values:
    width = theirs["shared_intermediate_size"]
    return granite(theirs) | ({"moe.num_shared_experts": 1, "moe.shared_d_ff": width} if width else {})


def granite_windows(theirs: Mapping[str, Any]) -> Values:
    kinds = theirs.get("layer_types") or [
        "sliding_attention" if i % 4 else "full_attention" for i in range(theirs["num_hidden_layers"])
    ]
    windows = by_layer_types({"layer_types": kinds, "sliding_window": theirs.get("sliding_window")})
    return granite_shared(theirs) | windows | bases_of_layers(theirs, windows["model.windows"])


def bases_of_layers(theirs: Mapping[str, Any], windows: tuple[int, ...]) -> Values:
    """A base for each layer; 0: it does not turn. One for those with a window and one for the others."""
    given = theirs.get("layer_rope_theta")
    if not given:
        return {}
    layers = theirs["num_hidden_layers"]
    turns = tuple(bool(base) for base in given)
    pairs = list(zip(given, windows or (0,) * layers, strict=True))
    near = {float(base) for base, window in pairs if base and window}
    far = {float(base) for base, window in pairs if base and not window}
    if len(near) > 1 or len(far) > 1:
        raise Missing("rotary position that differs from layer to layer (layer_rope_theta)")
    values: Values = {"model.rope_layers": () if all(turns) else turns}
    if near or far:
        values["model.rope_base"] = max(far or near)
    if not (near and far) or near == far:
        return values
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    share = rope.get("partial_rotary_factor") or theirs.get("partial_rotary_factor") or 1
    if share != 1 or (rope.get("rope_type") or rope.get("type") or "default") != "default":
        raise Missing("rotary scaling, or a part of each head, beside bases of layers (layer_rope_theta)")
    return values | {"model.window_rope_base": near.pop()}


def kimi(theirs: Mapping[str, Any]) -> Values:
    """Latent attention without rotary position in some layers; files name them from 1 on, in a table."""
    table, layers = theirs.get("linear_attn_config") or {}, range(theirs["num_hidden_layers"])
    full = table.get("full_attn_layers")
    kinds = theirs.get("layer_types") or [
        "full_attention" if (i + 1 in full if full is not None else i and i % 4 == 0) else "linear_attention"
        for i in layers
    ]
    mixers = tuple("kimi_delta" if kind == "linear_attention" else "attention" for kind in kinds)
    dense = theirs.get("mlp_layer_types") or ["dense"] * (theirs.get("first_k_dense_replace") or 1)
    return {
        "model.attention": "mla",
        "model.num_kv_heads": theirs["num_attention_heads"],
        "model.q_lora_rank": theirs.get("q_lora_rank") or 0,
        "model.latent_norm_eps": 1e-6,
        "model.mixers": mixers if "kimi_delta" in mixers else (),
        "model.delta_key_heads": table.get("num_heads") or theirs["linear_num_heads"],
        "model.delta_key_dim": table.get("head_dim") or theirs["linear_head_dim"],
        "model.conv_width": table.get("short_conv_kernel_size") or theirs["linear_conv_kernel_dim"],
        "model.dense_layers": tuple(i for i, kind in enumerate(dense) if kind != "sparse"),
        "gate.kind": "sigmoid",
        "gate.renormalise": bool(theirs["moe_renormalize"]),
        "gate.group_score": "top2",
        "gate.num_groups": theirs.get("num_expert_group") or 1,
        "gate.top_groups": theirs.get("topk_group") or 1,
    }


def llama4(theirs: Mapping[str, Any]) -> Values:
    layers, step = range(theirs["num_hidden_layers"]), theirs["no_rope_layer_interval"]
    turns = [bool(one) for one in theirs.get("no_rope_layers") or [(i + 1) % step for i in layers]]
    kinds = theirs.get("layer_types") or ["chunked_attention" if one else "full_attention" for one in turns]
    chunks = tuple(
        (theirs.get("attention_chunk_size") or 0) if kind == "chunked_attention" else 0 for kind in kinds
    )
    every = theirs["interleave_moe_layer_step"]
    experts = theirs.get("moe_layers")
    experts = range(every - 1, len(layers), every) if experts is None else experts
    growth = {
        "model.growth": float(theirs["attn_scale"]),
        "model.growth_len": int(theirs["floor_scale"]),
        "model.growth_first": 1,
        "model.growth_in": "unturned",
    }
    return {
        **grouped(theirs),
        **bias_of_all(theirs),
        "model.rope_layers": () if all(turns) else tuple(turns),
        "model.chunks": chunks if any(chunks) else (),
        "model.dense_layers": tuple(i for i in layers if i not in experts),
        "model.qk_norm": "unit" if theirs["use_qk_norm"] else "none",
        **(growth if theirs["attn_temperature_tuning"] else {}),
    }


def hunyuan_v1(theirs: Mapping[str, Any]) -> Values:
    """Files may give numbers of experts for each layer."""
    found: Values = {
        "gate.top_k": of_all_layers(theirs, "moe_topk"),
        "moe.num_experts": of_all_layers(theirs, "num_experts"),
    }
    rope = dict(theirs.get("rope_parameters") or theirs.get("rope_scaling") or {})
    kind = rope.get("rope_type") or rope.get("type")
    if kind == "dynamic" and rope.get("alpha"):  # another base, whatever the length
        head = grouped(theirs)["model.head_dim"]
        base = rope.get("rope_theta") or theirs.get("rope_theta") or 10000.0
        found |= {
            "model.rope_base": base * rope["alpha"] ** (head / (head - 2)),
            "model.rope_scaling": "none",
            "model.rope_factor": 1.0,
            "model.rope_original_len": 4096,
        }
    return grouped(theirs) | bias_of_all(theirs) | found


def of_all_layers(theirs: Mapping[str, Any], key: str) -> int:
    value = theirs[key]
    each = set(value) if isinstance(value, list) else {value}
    if len(each) != 1 or not all(type(one) is int and one > 0 for one in each):
        raise Missing(f"a {key} that differs from layer to layer ({value!r})")
    return int(each.pop())


def turned_windows(theirs: Mapping[str, Any], *, step: int) -> Values:
    """Rotary position in layers with a window alone, which all but every n-th layer have."""
    kinds = theirs.get("layer_types") or [
        "sliding_attention" if step and (i + 1) % step else "full_attention"
        for i in range(theirs["num_hidden_layers"])
    ]
    turns = tuple(kind == "sliding_attention" for kind in kinds)
    windows = by_layer_types({"layer_types": kinds, "sliding_window": theirs.get("sliding_window")})
    return grouped(theirs) | windows | {"model.rope_layers": () if all(turns) else turns}


def exaone(theirs: Mapping[str, Any]) -> Values:
    step = theirs["sliding_window_pattern"] or 0
    if not isinstance(step, int) and not theirs.get("layer_types"):
        raise Missing(f"a pattern of windows in letters ({step!r})")
    blocks = by_block_types(theirs, first=theirs["first_k_dense_replace"])
    return turned_windows(theirs, step=step if isinstance(step, int) else 0) | sigmoid(theirs) | blocks


def afmoe(theirs: Mapping[str, Any]) -> Values:
    scale = {"model.embedding_scale": theirs["hidden_size"] ** 0.5} if theirs["mup_enabled"] else {}
    return turned_windows(theirs, step=theirs["global_attn_every_n_layers"] or 0) | scale


def mellum(theirs: Mapping[str, Any]) -> Values:
    blocks = by_block_types(theirs, first=0)
    return grouped(theirs) | by_layer_types(theirs) | blocks | renormalises(theirs) | with_experts(theirs)


def laguna(theirs: Mapping[str, Any]) -> Values:
    heads = {theirs["num_attention_heads"], *(theirs.get("num_attention_heads_per_layer") or ())}
    if len(heads) > 1:
        raise Missing("heads that differ from layer to layer (num_attention_heads_per_layer)")
    gates = {True: "head", "per-head": "head", "per-element": "component"}
    if theirs["gating"] not in gates:
        raise Missing(f"another gate of attention than per-head and per-element ({theirs['gating']!r})")
    return {
        **grouped(theirs),
        **by_layer_types(theirs),
        **by_block_types(theirs, first=1),
        "model.attention_gate": f"{gates[theirs['gating']]}_softplus",
    }


def lfm2(theirs: Mapping[str, Any]) -> Values:
    mixers = tuple("short_conv" if kind == "conv" else "attention" for kind in theirs["layer_types"])
    found = grouped(theirs) | {"model.mixers": mixers if "short_conv" in mixers else ()}
    return found | {"gate.renormalise": bool(theirs["norm_topk_prob"])}


def mistral4(theirs: Mapping[str, Any]) -> Values:
    rope = theirs.get("rope_parameters") or {}
    if not rope.get("llama_4_scaling_beta"):
        raise Missing("no growth of queries (llama_4_scaling_beta)")
    pairs = "neighbours" if theirs["rope_interleave"] else "halves"
    return latent(theirs) | {
        **renormalises(theirs),
        "gate.group_score": "top2",
        "model.rope_pairs": pairs,
        "model.growth": float(rope["llama_4_scaling_beta"]),
        "model.growth_len": int(rope["original_max_position_embeddings"]),
    }


def sparse(theirs: Mapping[str, Any]) -> Values:
    """Latent attention to what an indexer chooses, in all layers."""
    shared = [kind for kind in theirs.get("indexer_types") or () if kind != "full"]
    if shared or (theirs.get("index_topk_freq") or 1) > 1 or theirs.get("index_topk_pattern"):
        raise Missing("layers that take over the choice of an indexer below")
    return latent(theirs) | sigmoid(theirs) | by_block_types(theirs, first=theirs["first_k_dense_replace"])
