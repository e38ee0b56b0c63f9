"""A `config.json` in keys of ours, and what the model needs that we do not have.

With anything in that list a model is refused before a weight is read. Losses, optimizer and data are the
user's: only what the model computes is read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeclipse.core.config import to_flat
from moeclipse.core.errors import CheckpointError, ConfigError
from moeclipse.core.values import nearest
from moeclipse.hf.config_file import config_of
from moeclipse.hf.dense_families import DENSE_FAMILIES
from moeclipse.hf.derive import Missing, Values
from moeclipse.hf.families import FAMILIES
from moeclipse.hf.family import Family
from moeclipse.hf.missing_families import MISSING
from moeclipse.hf.rope import read_rope
from moeclipse.model.config import ModelConfig
from moeclipse.moe.config import ExpertsConfig, GateConfig

COMMON = {
    "model.vocab_size": "vocab_size",
    "model.num_layers": "num_hidden_layers",
    "model.d_model": "hidden_size",
    "model.num_heads": "num_attention_heads",
    "model.norm_eps": "rms_norm_eps",
    "model.tie_embeddings": "tie_word_embeddings",
    "model.init_std": "initializer_range",
    "gate.top_k": "num_experts_per_tok",
}
GENERAL_DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
}
GENERAL_NEEDS = (
    ("hidden_act", "silu", "another activation than silu"),
    ("attention_dropout", 0.0, "dropout in attention"),
)
GATE_KEYS = (
    *("kind", "top_k", "choose", "renormalise", "scale", "num_groups", "top_groups", "group_score"),
    *("logit_bias", "capacity_factor"),
)
SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok"),
    *("moe_k", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("decoder_sparse_step", "moe_layer_interval", "full_attention_interval"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("index_topk", "index_n_heads", "index_head_dim"),
    *("linear_conv_kernel_dim", "linear_num_heads", "linear_head_dim", "num_experts_per_token"),
    *("no_rope_layer_interval", "interleave_moe_layer_step", "floor_scale", "conv_L_cache"),
)
"""Whole numbers of at least 1."""
COUNTS = (
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("head_dim", "q_lora_rank", "n_shared_experts", "moe_num_shared_experts", "num_shared_experts"),
    *("intermediate_size_mlp", "attention_chunk_size", "num_dense_layers", "global_attn_every_n_layers"),
    *("num_expert_group", "shared_intermediate_size", "rotary_dim", "first_k_dense_replace"),
    *("n_group", "topk_group", "max_window_layers", "sliding_window", "moe_layer_start_index"),
    *("max_position_embeddings", "num_nextn_predict_layers", "num_mtp_layers"),
)
"""Whole numbers of at least 0."""
NUMBERS = (
    *("rms_norm_eps", "initializer_range", "attention_dropout", "routed_scaling_factor", "clip_qkv"),
    *("router_scaling_factor", "route_scale", "attn_scale", "norm_eps"),
    *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
    *("rope_theta", "partial_rotary_factor", "swiglu_alpha", "swiglu_limit", "router_jitter_noise"),
    *("moe_routed_scaling_factor", "moe_router_logit_softcapping"),
)
ROPE = (
    *("factor", "rope_theta", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *(
        "alpha",
        "llama_4_scaling_beta",
        "mscale",
        "mscale_all_dim",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "partial_rotary_factor",
    ),
)
"""Numbers of its table."""
NAMES = ("hidden_act", "topk_method")
TABLES, LISTS = (
    ("rope_parameters", "rope_scaling", "linear_attn_config"),
    {
        "layer_types": str,
        "mlp_only_layers": int,
        "mlp_layer_types": str,
        "no_rope_layers": int,
        "moe_layers": int,
        "num_attention_heads_per_layer": int,
    },
)
LARGEST = {"num_hidden_layers": 1 << 14}
"""Of a whole number; of the others 2^40."""
MOST_EXPERTS = 1 << 18
"""Experts of all layers together."""
OF_THE_RUN = (
    *("model.memory", "model.from_hf", "model.dtype", "model.base", "model.dense_base", "moe.expert_tp"),
)
"""What a user decides for any model."""


@dataclass(frozen=True, kw_only=True)
class ReadConfig:
    """A `config.json` as we understand it."""

    family: Family
    values: Values
    theirs: Mapping[str, Any]


def read_config(theirs: Mapping[str, Any], where: str, *, dense: bool = False) -> ReadConfig:
    """Raises CheckpointError with everything that the model needs and we do not have.

    `dense`: a model without experts is wanted.
    """
    family = family_of(theirs, where, dense=dense)
    problems = list(type_problems(theirs))
    if problems:
        raise CheckpointError(f"{where}/config.json: {'; '.join(problems)}; take the file of the model")
    told = {**GENERAL_DEFAULTS, **family.defaults, **{k: v for k, v in theirs.items() if v is not None}}
    keys = {ours: key for ours, key in COMMON.items() if not (dense and ours.startswith("gate."))}
    keys |= family.keys
    missing = [key for key in keys.values() if key not in told]
    if missing:
        raise CheckpointError(
            f"{where}/config.json lacks {', '.join(sorted(set(missing)))}; take the whole file of the model"
        )
    needs = [
        f"{text} ({key} = {told.get(key)!r})"
        for key, ours, text in (*GENERAL_NEEDS, *family.needs)
        if key in told and told[key] != ours
    ]
    values = usual_values() | {ours: told[key] for ours, key in keys.items()}
    try:
        rope, rope_needs = read_rope(told, family.theta, of_windows=family.turns_windows)
        needs += rope_needs
        if needs:
            raise CheckpointError(f"{where}: {family.title} with {'; '.join(needs)} is not supported")
        values |= {**rope, **family.fixed, **family.rest(told)}
    except Missing as error:
        raise CheckpointError(f"{where}: {family.title} with {error} is not supported") from None
    except KeyError as error:
        raise CheckpointError(
            f"{where}/config.json lacks {error.args[0]}; take the whole file of the model"
        ) from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(
            f"{where}/config.json: no {family.title} has such values ({error}); take the file of the model"
        ) from None
    experts = values["moe.num_experts"] * values["model.num_layers"]
    if not dense and experts > MOST_EXPERTS:
        raise CheckpointError(
            f"{where}/config.json asks for {experts} experts in all layers; there are at most {MOST_EXPERTS}"
        )
    values["model.tie_embeddings"] = bool(values["model.tie_embeddings"])
    floats = ("model.norm_eps", "model.init_std", "gate.scale")
    values |= {key: float(values[key]) for key in floats if key in values}
    return ReadConfig(family=family, values=values, theirs=theirs)


def type_problems(theirs: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Keys that we read and whose values no model can have; null is like a key that is not there."""
    for key, value in theirs.items():
        name = f"{before}{key}"
        if value is None:
            continue
        if key in SIZES or key in COUNTS:
            least, most = int(key in SIZES), LARGEST.get(key, 1 << 40)
            if type(value) is not int or not least <= value <= most:
                yield f"{name} must be a whole number from {least} to {most}, not {shown(value)}"
        elif key in (ROPE if before else NUMBERS) and not is_finite(value):
            yield f"{name} must be a finite number, not {shown(value)}"
        elif key in NAMES and not isinstance(value, str):
            yield f"{name} must be a name, not {shown(value)}"
        elif key in TABLES and not isinstance(value, Mapping):
            yield f"{name} must be a table, not {shown(value)}"
        elif isinstance(value, Mapping) and (key in TABLES or before):
            yield from type_problems(value, f"{name}.")
        elif key in LISTS and not (isinstance(value, list) and all(type(one) is LISTS[key] for one in value)):
            yield f"{name} must be a list of {LISTS[key].__name__}, not {shown(value)}"


def is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def usual_values() -> Values:
    """What a model is where its family says nothing of it; a preset must not shine through."""
    model = {f"model.{key}": value for key, value in to_flat(ModelConfig()).items()}
    experts = {f"moe.{key}": value for key, value in to_flat(ExpertsConfig()).items()}
    gate = {f"gate.{key}": getattr(GateConfig(), key) for key in GATE_KEYS}
    return {key: value for key, value in {**model, **experts, **gate}.items() if key not in OF_THE_RUN}


def contradictions(values: Mapping[str, Any], config: Any, where: str) -> Iterator[str]:
    """Keys whose values are not those of the folder; `config` may be one that is flat already."""
    flat = config if isinstance(config, Mapping) else to_flat(config)
    for key, value in values.items():
        if flat[key] != value:
            yield f"{key} ({flat[key]!r}) contradicts {where}/config.json, which says {value!r}; leave it out"


def folder_values(given: Mapping[str, Any]) -> Values:
    """What the folder that `model.from_hf` names says of its model; nothing where it is not given.

    ConfigError for a folder that cannot be read, and for other given keys that contradict it.
    """
    folder = given.get("model.from_hf")
    if not folder or not isinstance(folder, str):  # what is no text is told as such, with all that is wrong
        return {}
    try:
        values = read_config(config_of(Path(folder)), folder).values
    except CheckpointError as error:
        raise ConfigError(f"{error} (model.from_hf)") from None
    if wrong := list(contradictions({key: values[key] for key in values if key in given}, given, folder)):
        raise ConfigError(wrong)
    tokenizer = Path(folder) / "tokenizer.json"
    return values | ({"data.tokenizer": str(tokenizer)} if tokenizer.is_file() else {})


def family_of(theirs: Mapping[str, Any], where: str, *, dense: bool = False) -> Family:
    kind = theirs.get("model_type")
    families = DENSE_FAMILIES if dense else FAMILIES
    for family in families:
        if family.model_type == kind:
            return family
    close = nearest(str(kind), [family.model_type for family in families])
    hint = f"; did you mean {close}?" if close else f" ({', '.join(f.model_type for f in families)})"
    if not dense and any(family.model_type == kind for family in DENSE_FAMILIES):
        hint = "; it has no experts: --init-from with --init.upcycle copy or split makes some"
    if not dense and (needs := MISSING.get(str(kind))):
        raise CheckpointError(
            f"{where}: model_type {kind!r} is no family that we read: {needs}, which it needs, is missing; "
            "in a model of transformers its experts may be ours all the same (moeclipse.hf.register)"
        )
    raise CheckpointError(f"{where}: model_type {kind!r} is no family that we read{hint}")
