"""Keys of ours that follow from several of theirs: one function for each family, made of what they share.

`told` is a `config.json`, with the defaults of its family where it is silent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Values = dict[str, Any]
"""Dotted keys of ours."""


class Missing(ValueError):
    """What a model needs and we do not have, in words."""


def grouped(told: Mapping[str, Any]) -> Values:
    """Grouped-query attention."""
    heads = told["num_attention_heads"]
    return {
        "model.attention": "gqa",
        "model.num_kv_heads": told.get("num_key_value_heads") or heads,
        "model.head_dim": told.get("head_dim") or told["hidden_size"] // heads,
    }


def all_windows(told: Mapping[str, Any]) -> Values:
    """One window for all layers, or none."""
    return {"model.windows": (told["sliding_window"],) if told.get("sliding_window") else ()}


def by_layer_types(told: Mapping[str, Any]) -> Values:
    """Windows of the layers that `layer_types` calls sliding."""
    window = told.get("sliding_window") or 0
    kinds = told.get("layer_types") or ()
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return {"model.windows": windows if any(windows) else ()}


def delta_layers(told: Mapping[str, Any]) -> Values:
    """States instead of attention in layers that `layer_types` calls linear: all but every fourth."""
    step = told.get("full_attention_interval") or 4
    kinds = told.get("layer_types") or [
        "linear_attention" if (i + 1) % step else "full_attention" for i in range(told["num_hidden_layers"])
    ]
    mixers = tuple("gated_delta" if kind == "linear_attention" else "attention" for kind in kinds)
    return {"model.mixers": mixers if "gated_delta" in mixers else ()}


def all_dense(told: Mapping[str, Any]) -> Values:
    """A model without experts."""
    return grouped(told) | bias_of_all(told) | {"model.num_dense_layers": told["num_hidden_layers"]}


def dense_of_qwen(told: Mapping[str, Any]) -> Values:
    """Layers without experts: those that are named, and those between every n-th."""
    step, named = told["decoder_sparse_step"], told.get("mlp_only_layers") or ()
    layers = range(told["num_hidden_layers"])
    return {"model.dense_layers": tuple(i for i in layers if i in named or (i + 1) % step)}


def renormalises(told: Mapping[str, Any]) -> Values:
    return {"gate.kind": "softmax", "gate.renormalise": bool(told["norm_topk_prob"])}


def mixtral(told: Mapping[str, Any]) -> Values:
    return grouped(told) | all_windows(told) | {"gate.kind": "softmax", "gate.renormalise": True}


def qwen2(told: Mapping[str, Any]) -> Values:
    sliding, until = told["use_sliding_window"], told["max_window_layers"]
    kinds = told.get("layer_types") or [
        "sliding_attention" if sliding and i % 2 == 0 and i < until else "full_attention"
        for i in range(told["num_hidden_layers"])
    ]
    window = told.get("sliding_window") if sliding else 0
    windows = by_layer_types({"layer_types": kinds, "sliding_window": window})
    bias = {"model.attention_bias": "qkv" if told["qkv_bias"] else "none"}
    return grouped(told) | windows | dense_of_qwen(told) | renormalises(told) | bias


def qwen3(told: Mapping[str, Any]) -> Values:
    window = told.get("sliding_window") if told["use_sliding_window"] else 0
    windows = all_windows({"sliding_window": window})
    return grouped(told) | windows | dense_of_qwen(told) | renormalises(told) | with_experts(told)


def with_experts(told: Mapping[str, Any]) -> Values:
    """Transformers writes their number under one name and reads it under two."""
    experts = told.get("num_experts") or told.get("num_local_experts") or told["num_experts"]
    return bias_of_all(told) | {"moe.num_experts": experts}


def olmoe(told: Mapping[str, Any]) -> Values:
    return (
        grouped(told)
        | renormalises(told)
        | bias_of_all(told)
        | {"model.clip_qkv": float(told.get("clip_qkv") or 0)}
    )


def latent(told: Mapping[str, Any]) -> Values:
    """Multi-head latent attention, first layers dense, shared experts."""
    return {
        "model.attention": "mla",
        "model.num_kv_heads": told["num_attention_heads"],
        "model.q_lora_rank": told.get("q_lora_rank") or 0,
        "model.latent_norm_eps": 1e-6,
        "gate.num_groups": told.get("n_group") or 1,
        "gate.top_groups": told.get("topk_group") or 1,
    }


def qwen3_next(told: Mapping[str, Any]) -> Values:
    return grouped(told) | delta_layers(told) | bias_of_all(told)


def deepseek_v2(told: Mapping[str, Any]) -> Values:
    values = latent(told) | {"gate.kind": "softmax", "gate.renormalise": False, "gate.group_score": "max"}
    if told["topk_method"] == "greedy":
        values |= {"gate.num_groups": 1, "gate.top_groups": 1}
    return values


def deepseek_v3(told: Mapping[str, Any]) -> Values:
    pairs = "neighbours" if told["rope_interleave"] else "halves"
    return latent(told) | sigmoid(told) | {"model.rope_pairs": pairs}


def sigmoid(told: Mapping[str, Any]) -> Values:
    """A sigmoid gate with a bias on the choice, groups by their best two."""
    return {
        "gate.kind": "sigmoid",
        "gate.renormalise": bool(told["norm_topk_prob"]),
        "gate.group_score": "top2",
        "gate.num_groups": told.get("n_group") or 1,
        "gate.top_groups": told.get("topk_group") or 1,
    }


def gpt_oss(told: Mapping[str, Any]) -> Values:
    kinds = told.get("layer_types") or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(told["num_hidden_layers"])
    ]
    windows = by_layer_types({"layer_types": kinds, "sliding_window": told.get("sliding_window")})
    return grouped(told) | windows | bias_of_all(told)


def glm4(told: Mapping[str, Any]) -> Values:
    qk_norm = {"model.qk_norm": "head" if told["use_qk_norm"] else "none"}
    return grouped(told) | sigmoid(told) | bias_of_inputs(told) | qk_norm


def granite(told: Mapping[str, Any]) -> Values:
    return grouped(told) | {
        **bias_of_all(told),
        "model.attention_scale": float(told["attention_multiplier"]),
        "model.embedding_scale": float(told["embedding_multiplier"]),
        "model.residual_scale": float(told["residual_multiplier"]),
        "model.logit_scale": 1.0 / told["logits_scaling"],
    }


def ernie(told: Mapping[str, Any]) -> Values:
    layers, step = told["num_hidden_layers"], told["moe_layer_interval"]
    first, last = told["moe_layer_start_index"], told["moe_layer_end_index"]
    last = layers - 1 if last == -1 else last
    dense = tuple(i for i in range(layers) if (i + 1) % step or not first <= i <= last)
    return grouped(told) | {"model.dense_layers": dense}


def bias_of_all(told: Mapping[str, Any]) -> Values:
    """Of attention's four projections, or of none."""
    return {"model.attention_bias": "all" if told["attention_bias"] else "none"}


def bias_of_inputs(told: Mapping[str, Any]) -> Values:
    """Of attention's projections, but for the last."""
    return {"model.attention_bias": "qkv" if told["attention_bias"] else "none"}


def by_block_types(told: Mapping[str, Any], *, first: int) -> Values:
    """Layers without experts by `mlp_layer_types`; a silent file means the first so many."""
    kinds = told.get("mlp_layer_types") or ["dense"] * first
    return {"model.dense_layers": tuple(i for i, kind in enumerate(kinds) if kind != "sparse")}


def dots(told: Mapping[str, Any]) -> Values:
    window, until = told.get("sliding_window"), told["max_window_layers"]
    kinds = told.get("layer_types") or [
        "sliding_attention" if window and i >= until else "full_attention"
        for i in range(told["num_hidden_layers"])
    ]
    windows = by_layer_types({"layer_types": kinds, "sliding_window": window})
    return grouped(told) | sigmoid(told) | windows | bias_of_all(told)


def minimax(told: Mapping[str, Any]) -> Values:
    """Files before transformers 5 say how many components turn, not which part of them."""
    turned = {"model.rope_dim": told["rotary_dim"]} if told.get("rotary_dim") else {}
    return grouped(told) | turned


def granite_shared(told: Mapping[str, Any]) -> Values:
    width = told["shared_intermediate_size"]
    return granite(told) | ({"moe.num_shared_experts": 1, "moe.shared_d_ff": width} if width else {})


def granite_windows(told: Mapping[str, Any]) -> Values:
    kinds = told.get("layer_types") or [
        "sliding_attention" if i % 4 else "full_attention" for i in range(told["num_hidden_layers"])
    ]
    windows = by_layer_types({"layer_types": kinds, "sliding_window": told.get("sliding_window")})
    return granite_shared(told) | windows | bases_of_layers(told, windows["model.windows"])


def bases_of_layers(told: Mapping[str, Any], windows: tuple[int, ...]) -> Values:
    """A base for each layer; 0: it does not turn. One for those with a window and one for the others."""
    given = told.get("layer_rope_theta")
    if not given:
        return {}
    layers = told["num_hidden_layers"]
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
    rope = told.get("rope_parameters") or told.get("rope_scaling") or {}
    share = rope.get("partial_rotary_factor") or told.get("partial_rotary_factor") or 1
    if share != 1 or (rope.get("rope_type") or rope.get("type") or "default") != "default":
        raise Missing("rotary scaling, or a part of each head, beside bases of layers (layer_rope_theta)")
    return values | {"model.window_rope_base": near.pop()}


def kimi(told: Mapping[str, Any]) -> Values:
    """Latent attention without rotary position in some layers; files name them from 1 on, in a table."""
    table, layers = told.get("linear_attn_config") or {}, range(told["num_hidden_layers"])
    full = table.get("full_attn_layers")
    kinds = told.get("layer_types") or [
        "full_attention" if (i + 1 in full if full is not None else i and i % 4 == 0) else "linear_attention"
        for i in layers
    ]
    mixers = tuple("kimi_delta" if kind == "linear_attention" else "attention" for kind in kinds)
    dense = told.get("mlp_layer_types") or ["dense"] * (told.get("first_k_dense_replace") or 1)
    return {
        "model.attention": "mla",
        "model.num_kv_heads": told["num_attention_heads"],
        "model.q_lora_rank": told.get("q_lora_rank") or 0,
        "model.latent_norm_eps": 1e-6,
        "model.mixers": mixers if "kimi_delta" in mixers else (),
        "model.delta_key_heads": table.get("num_heads") or told["linear_num_heads"],
        "model.delta_key_dim": table.get("head_dim") or told["linear_head_dim"],
        "model.conv_width": table.get("short_conv_kernel_size") or told["linear_conv_kernel_dim"],
        "model.dense_layers": tuple(i for i, kind in enumerate(dense) if kind != "sparse"),
        "gate.kind": "sigmoid",
        "gate.renormalise": bool(told["moe_renormalize"]),
        "gate.group_score": "top2",
        "gate.num_groups": told.get("num_expert_group") or 1,
        "gate.top_groups": told.get("topk_group") or 1,
    }


def llama4(told: Mapping[str, Any]) -> Values:
    layers, step = range(told["num_hidden_layers"]), told["no_rope_layer_interval"]
    turns = [bool(one) for one in told.get("no_rope_layers") or [(i + 1) % step for i in layers]]
    kinds = told.get("layer_types") or ["chunked_attention" if one else "full_attention" for one in turns]
    chunks = tuple(
        (told.get("attention_chunk_size") or 0) if kind == "chunked_attention" else 0 for kind in kinds
    )
    every = told["interleave_moe_layer_step"]
    experts = told.get("moe_layers")
    experts = range(every - 1, len(layers), every) if experts is None else experts
    growth = {
        "model.growth": float(told["attn_scale"]),
        "model.growth_len": int(told["floor_scale"]),
        "model.growth_first": 1,
        "model.growth_in": "unturned",
    }
    return {
        **grouped(told),
        **bias_of_all(told),
        "model.rope_layers": () if all(turns) else tuple(turns),
        "model.chunks": chunks if any(chunks) else (),
        "model.dense_layers": tuple(i for i in layers if i not in experts),
        "model.qk_norm": "unit" if told["use_qk_norm"] else "none",
        **(growth if told["attn_temperature_tuning"] else {}),
    }


def hunyuan_v1(told: Mapping[str, Any]) -> Values:
    """Files may give numbers of experts for each layer."""
    found: Values = {
        "gate.top_k": of_all_layers(told, "moe_topk"),
        "moe.num_experts": of_all_layers(told, "num_experts"),
    }
    rope = dict(told.get("rope_parameters") or told.get("rope_scaling") or {})
    kind = rope.get("rope_type") or rope.get("type")
    if kind == "dynamic" and rope.get("alpha"):  # another base, whatever the length
        head = grouped(told)["model.head_dim"]
        base = rope.get("rope_theta") or told.get("rope_theta") or 10000.0
        found |= {
            "model.rope_base": base * rope["alpha"] ** (head / (head - 2)),
            "model.rope_scaling": "none",
            "model.rope_factor": 1.0,
            "model.rope_original_len": 4096,
        }
    return grouped(told) | bias_of_all(told) | found


def of_all_layers(told: Mapping[str, Any], key: str) -> int:
    value = told[key]
    each = set(value) if isinstance(value, list) else {value}
    if len(each) != 1 or not all(type(one) is int and one > 0 for one in each):
        raise Missing(f"a {key} that differs from layer to layer ({value!r})")
    return int(each.pop())


def turned_windows(told: Mapping[str, Any], *, step: int) -> Values:
    """Rotary position in layers with a window alone, which all but every n-th layer have."""
    kinds = told.get("layer_types") or [
        "sliding_attention" if step and (i + 1) % step else "full_attention"
        for i in range(told["num_hidden_layers"])
    ]
    turns = tuple(kind == "sliding_attention" for kind in kinds)
    windows = by_layer_types({"layer_types": kinds, "sliding_window": told.get("sliding_window")})
    return grouped(told) | windows | {"model.rope_layers": () if all(turns) else turns}


def exaone(told: Mapping[str, Any]) -> Values:
    step = told["sliding_window_pattern"] or 0
    if not isinstance(step, int) and not told.get("layer_types"):
        raise Missing(f"a pattern of windows in letters ({step!r})")
    blocks = by_block_types(told, first=told["first_k_dense_replace"])
    return turned_windows(told, step=step if isinstance(step, int) else 0) | sigmoid(told) | blocks


def afmoe(told: Mapping[str, Any]) -> Values:
    scale = {"model.embedding_scale": told["hidden_size"] ** 0.5} if told["mup_enabled"] else {}
    return turned_windows(told, step=told["global_attn_every_n_layers"] or 0) | scale


def mellum(told: Mapping[str, Any]) -> Values:
    blocks = by_block_types(told, first=0)
    return grouped(told) | by_layer_types(told) | blocks | renormalises(told) | with_experts(told)


def laguna(told: Mapping[str, Any]) -> Values:
    heads = {told["num_attention_heads"], *(told.get("num_attention_heads_per_layer") or ())}
    if len(heads) > 1:
        raise Missing("heads that differ from layer to layer (num_attention_heads_per_layer)")
    gates = {True: "head", "per-head": "head", "per-element": "component"}
    if told["gating"] not in gates:
        raise Missing(f"another gate of attention than per-head and per-element ({told['gating']!r})")
    return {
        **grouped(told),
        **by_layer_types(told),
        **by_block_types(told, first=1),
        "model.attention_gate": f"{gates[told['gating']]}_softplus",
    }


def lfm2(told: Mapping[str, Any]) -> Values:
    mixers = tuple("short_conv" if kind == "conv" else "attention" for kind in told["layer_types"])
    found = grouped(told) | {"model.mixers": mixers if "short_conv" in mixers else ()}
    return found | {"gate.renormalise": bool(told["norm_topk_prob"])}


def mistral4(told: Mapping[str, Any]) -> Values:
    rope = told.get("rope_parameters") or {}
    if not rope.get("llama_4_scaling_beta"):
        raise Missing("no growth of queries (llama_4_scaling_beta)")
    pairs = "neighbours" if told["rope_interleave"] else "halves"
    return latent(told) | {
        **renormalises(told),
        "gate.group_score": "top2",
        "model.rope_pairs": pairs,
        "model.growth": float(rope["llama_4_scaling_beta"]),
        "model.growth_len": int(rope["original_max_position_embeddings"]),
    }


def sparse(told: Mapping[str, Any]) -> Values:
    """Latent attention to what an indexer chooses, in all layers."""
    shared = [kind for kind in told.get("indexer_types") or () if kind != "full"]
    if shared or (told.get("index_topk_freq") or 1) > 1 or told.get("index_topk_pattern"):
        raise Missing("layers that take over the choice of an indexer below")
    return latent(told) | sigmoid(told) | by_block_types(told, first=told["first_k_dense_replace"])
