"""A `config.json` for a model of ours: the table of families read backwards.

Idea. For each family a candidate is written, of all that its reading looks at, and read again (`hf/read`).
What comes back differently is what stands in the way; a family without such keys holds the model, and nothing
is believed that was not read back. So a new row of the table goes out as well as in, without a line here,
unless it has keys of its own.

    canonical(values)   models that compute the same have the same values: no window is all windows, the
                        gates of training (switch, gshard, noisy) are the softmax gates that they are
                        outside of it, and keys that nothing reads are None

Hazard. Losses, noise and capacity of training are no part of a family. A capacity that also holds outside of
training is, and stands in the way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from moeclipse.core.errors import CheckpointError, ConfigError
from moeclipse.core.values import nearest
from moeclipse.hf.derive import Missing, Values
from moeclipse.hf.families import FAMILIES
from moeclipse.hf.family import Family
from moeclipse.hf.read import COMMON, read_config, usual_values
from moeclipse.hf.rope import write_both, write_rope
from moeclipse.model.config import yarn_magnitude

MLA_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
GQA_KEYS = (
    *("num_kv_heads", "head_dim", "attention_bias", "attention_gate", "qk_norm", "clip_qkv", "rope_dim"),
)
MIXER_KEYS = {
    "gated_delta": (
        *("delta_key_heads", "delta_value_heads", "delta_key_dim", "delta_value_dim", "conv_width"),
    ),
    "kimi_delta": ("delta_key_heads", "delta_key_dim", "conv_width"),
    "short_conv": ("conv_width",),
}
"""Those that a mixer reads."""
LINEAR = {"gated_delta": "linear_attention", "kimi_delta": "linear_attention", "short_conv": "conv"}
"""What they call a mixer."""
IN_TURN = {"windows": 0, "chunks": 0, "mixers": "attention", "rope_layers": True}
"""Keys of layers in turn, and what a layer is where they are empty."""
ROPE_KEYS = {
    "none": (),
    "linear": ("rope_factor",),
    "dynamic": ("rope_factor", "rope_original_len"),
    "yarn": (
        *("rope_factor", "rope_original_len", "rope_beta_fast", "rope_beta_slow", "rope_truncate"),
        "rope_magnitude",
    ),
    "llama3": ("rope_factor", "rope_original_len", "rope_low_freq", "rope_high_freq"),
}
"""Those that a scaling reads."""
ALL_ROPE_KEYS = frozenset(key for keys in ROPE_KEYS.values() for key in keys)
TURNING = (*ALL_ROPE_KEYS, "rope_base", "rope_dim", "rope_pairs", "rope_scaling")
NO_FAMILY = {"gate.renormalise_eps": 1e-20, "gate.max_leaving": 1.0, "model.memory": 0}
"""What no family has otherwise."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How a family would hold a model."""

    family: Family
    config: Mapping[str, Any]
    obstacles: tuple[str, ...]
    """What stands in the way; empty: it holds the model."""


def compose(values: Values, *, context: int, family: str = "", where: str = "the model") -> Fit:
    """The family that holds a model of these values, or the one that is named.

    `values`: all keys of model, moe and gate. `context`: tokens of the longest text. CheckpointError names
    the nearest family and what stands in the way.
    """
    fits = [fit_of(one, values, context) for one in (FAMILIES if not family else (named(family),))]
    best = min(fits, key=lambda fit: len(fit.obstacles))  # the first of them where several hold it
    if best.obstacles:
        who = f"{best.family.title} ({best.family.model_type})"
        which = (
            f"{who} does not hold" if family else f"no family holds {where}; the nearest is {who}, but not"
        )
        raise CheckpointError(f"{which if not family else f'{which} {where}:'} {'; '.join(best.obstacles)}")
    return best


def named(name: str) -> Family:
    for family in FAMILIES:
        if name.lower() in (family.model_type, family.title.lower(), family.architecture.lower()):
            return family
    known = [family.model_type for family in FAMILIES]
    close = nearest(name, known)
    hint = f"; did you mean {close}?" if close else ""
    raise ConfigError(f"family ({name!r}): expected one of {', '.join(known)}{hint}")


def fit_of(family: Family, values: Values, context: int) -> Fit:
    wanted = canonical(values)
    config = candidate(family, values, context)
    try:
        read = read_config(config, f"a {family.title}")
    except CheckpointError as error:
        return Fit(family=family, config=config, obstacles=(str(error),))
    found = canonical(usual_values() | NO_FAMILY | read.values)
    found["gate.bias_rate"] = wanted["gate.bias_rate"] if family.has_choice_bias(read.values) else 0.0
    obstacles = [
        f"{key} = {wanted[key]!r} (it has {value!r})"
        for key, value in found.items()
        if value is not None and not alike(wanted.get(key), value)
    ]
    return Fit(family=family, config=config, obstacles=tuple(obstacles))


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-12)
    return bool(one == other)


def canonical(values: Values) -> Values:
    """Equal for models that compute the same; None where nothing reads a key."""
    v = dict(values)
    layers = v["model.num_layers"]
    dense = {i for i in range(layers) if i < v["model.num_dense_layers"] or i in v["model.dense_layers"]}
    first = next(i for i in range(layers + 1) if i not in dense)
    v |= {"model.num_dense_layers": first, "model.dense_layers": tuple(sorted(i for i in dense if i > first))}
    if not dense:
        v["model.d_ff"] = None
    for key, usual in IN_TURN.items():
        given = v[f"model.{key}"] or (usual,)
        each = tuple(given[i % len(given)] for i in range(layers))
        v[f"model.{key}"] = () if set(each) == {usual} else each
    read = {key for kind in {*v["model.mixers"]} for key in MIXER_KEYS.get(kind, ())}
    for key in {key for keys in MIXER_KEYS.values() for key in keys} - read:
        v[f"model.{key}"] = None
    if not v["model.index_topk"]:
        v |= dict.fromkeys(("model.index_heads", "model.index_dim", "model.index_pairs"))
    if not v["model.growth"]:
        v |= dict.fromkeys(("model.growth_len", "model.growth_first", "model.growth_in"))
    latent = v["model.attention"] == "mla"
    width = v["model.qk_nope_head_dim"] + v["model.qk_rope_head_dim"] if latent else v["model.head_dim"]
    v["model.attention_scale"] = v["model.attention_scale"] or width**-0.5
    v["model.rope_dim"] = v["model.rope_dim"] or v["model.head_dim"]
    v["model.latent_norm_eps"] = (v["model.latent_norm_eps"] or v["model.norm_eps"]) if latent else None
    for key in GQA_KEYS if latent else MLA_KEYS:
        v[f"model.{key}"] = None
    v |= canonical_near(v)
    v["model.rope_magnitude"] = v["model.rope_magnitude"] or yarn_magnitude(v["model.rope_factor"])
    for key in ALL_ROPE_KEYS - set(ROPE_KEYS[v["model.rope_scaling"]]):
        v[f"model.{key}"] = None
    if not any(v["model.rope_layers"] or (True,)):
        v |= dict.fromkeys(f"model.{key}" for key in TURNING)
    v["model.init_std"] = None
    return canonical_block(v)


def canonical_near(v: Values) -> Values:
    """Layers with a window that turn as all others have no angles of their own."""
    base, width = v["model.window_rope_base"], v["model.window_rope_dim"] or v["model.head_dim"]
    plain = v["model.rope_scaling"] == "none" and (base, width) == (v["model.rope_base"], v["model.rope_dim"])
    if not base or plain or not any(v["model.windows"]):
        return {"model.window_rope_base": 0.0, "model.window_rope_dim": None}
    return {"model.window_rope_dim": width}


def canonical_block(v: Values) -> Values:
    """The same for experts and gate."""
    if v["moe.num_shared_experts"]:
        width = v["moe.shared_d_ff"] or v["moe.num_shared_experts"] * v["moe.d_ff"]
        v |= {"moe.num_shared_experts": 1, "moe.shared_d_ff": width}
    else:
        v |= {"moe.shared_d_ff": None, "moe.shared_gate": False}
    if v["gate.kind"] in ("switch", "gshard", "noisy"):
        v |= {"gate.renormalise": v["gate.kind"] != "switch", "gate.kind": "softmax"}
    if v["gate.num_groups"] == v["gate.top_groups"]:
        v |= {"gate.num_groups": 1, "gate.top_groups": 1, "gate.group_score": None}
    beyond = v.get("gate.eval_capacity_factor", -1)
    v["gate.capacity_factor"] = beyond if beyond >= 0 else v["gate.capacity_factor"]
    v["gate.bias_rate"] = v.get("gate.bias_rate", 0.0)
    return v


class TrackedTable(dict[str, Any]):
    """A table that remembers which of its keys were asked for."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        super().__init__(told)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def candidate(family: Family, values: Values, context: int) -> dict[str, Any]:
    """What this family's file would say; only keys that the family's reading looks at."""
    v = dict(values) | {k: value for k, value in canonical(values).items() if value is not None}
    if v["moe.num_shared_experts"] and not v["moe.shared_d_ff"] % v["moe.d_ff"]:
        v["moe.num_shared_experts"] = v["moe.shared_d_ff"] // v["moe.d_ff"]
    plain = {theirs: v[ours] for ours, theirs in {**COMMON, **family.keys}.items()}
    turns = any(v["model.rope_layers"] or (True,))
    write = write_both if family.turns_windows else write_rope
    rope = write(v, context) if turns else {"model_max_length": context}  # that of Kimi
    told = TrackedTable({**family.defaults, **their_keys(v), **rope, **dict(family.usual_needs()), **plain})
    with suppress(Missing):  # which reading tells
        family.rest(told)
    always = {"num_key_value_heads", *family.defaults, *rope, *plain}
    written = (told.asked | always) & told.keys()
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_act": "silu",
        **{key: told[key] for key in sorted(written)},
        **dict(family.beside),
    }


def their_keys(v: Values) -> dict[str, Any]:
    """Keys that families share, in their words, whichever of them a family reads."""
    layers, first = v["model.num_layers"], v["model.num_dense_layers"]
    windows, mixers = v["model.windows"], v["model.mixers"]
    dense = sorted({*range(first), *v["model.dense_layers"]})
    experts = [i for i in range(layers) if i not in dense] or [layers]
    steps = len(dense) == layers - len(experts) and experts == list(range(experts[0], experts[-1] + 1))
    scale = v["model.attention_scale"]
    grouped = v["gate.num_groups"] > 1
    chunks = v["model.chunks"] or (0,) * layers
    return position_keys(v) | {
        "num_key_value_heads": v[f"model.num_{'kv_' * (v['model.attention'] == 'gqa')}heads"],
        "head_dim": v["model.head_dim"],
        "sliding_window": max(windows, default=0) or None,
        "use_sliding_window": any(windows),
        "max_window_layers": layers,
        "layer_types": [
            LINEAR.get(mixers[i] if mixers else "")
            or ("sliding_attention" if windows and windows[i] else "")
            or ("chunked_attention" if chunks[i] else "full_attention")
            for i in range(layers)
        ],
        "attention_bias": v["model.attention_bias"] != "none",
        "qkv_bias": v["model.attention_bias"] == "qkv",
        "clip_qkv": v["model.clip_qkv"] or None,
        "use_qk_norm": v["model.qk_norm"] in ("head", "unit"),
        "gating": "per-head" if v["model.attention_gate"].startswith("head") else "per-element",
        "attention_chunk_size": max(chunks) or None,
        "moe_layers": [i for i in range(layers) if i not in dense],
        "mup_enabled": v["model.embedding_scale"] != 1,
        "linear_num_heads": v["model.delta_key_heads"],
        "linear_head_dim": v["model.delta_key_dim"],
        "linear_conv_kernel_dim": v["model.conv_width"],
        "moe_renormalize": v["gate.renormalise"],
        "num_expert_group": v["gate.num_groups"],
        "q_lora_rank": v["model.q_lora_rank"] or None,
        "rope_interleave": v["model.rope_pairs"] == "neighbours",
        "attention_multiplier": scale,
        "embedding_multiplier": v["model.embedding_scale"],
        "residual_multiplier": v["model.residual_scale"],
        "logits_scaling": 1.0 / v["model.logit_scale"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        "mlp_layer_types": ["dense" if i in dense else "sparse" for i in range(layers)],
        "shared_intermediate_size": v["moe.shared_d_ff"] if v["moe.num_shared_experts"] else 0,
        "first_k_dense_replace": first,
        "moe_layer_interval": 1,
        "moe_layer_start_index": experts[0],
        "moe_layer_end_index": experts[-1] if steps else -1,
        "num_experts": v["moe.num_experts"],
        "norm_topk_prob": v["gate.renormalise"],
        "n_group": v["gate.num_groups"],
        "topk_group": v["gate.top_groups"],
        "topk_method": "group_limited_greedy" if grouped else "greedy",
    }


def position_keys(v: Values) -> dict[str, Any]:
    """Which layers turn and by what base, and queries that grow."""
    layers = v["model.num_layers"]
    turns, windows = v["model.rope_layers"] or (True,) * layers, v["model.windows"] or (0,) * layers
    near = v["model.window_rope_base"] or v["model.rope_base"]
    return {
        "no_rope_layers": [int(one) for one in turns],
        "layer_rope_theta": [
            turn * (near if window else v["model.rope_base"])
            for turn, window in zip(turns, windows, strict=True)
        ],
        "attn_temperature_tuning": v["model.growth"] != 0,
        "attn_scale": v["model.growth"],
        "floor_scale": v["model.growth_len"],
    }
