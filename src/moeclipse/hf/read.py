"""A `config.json` in keys of ours, and what the model needs that we do not have.

With anything in that list a model is refused before a weight is read. Losses, optimizer and data are the
user's: only what the model computes is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moeclipse.core.config import to_flat
from moeclipse.core.errors import CheckpointError
from moeclipse.core.values import nearest
from moeclipse.hf.derive import Values
from moeclipse.hf.families import DENSE_FAMILIES, FAMILIES, Family
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
    rope, rope_needs = read_rope(told, family.theta)
    needs += rope_needs
    if needs:
        raise CheckpointError(f"{where}: {family.title} with {'; '.join(needs)} is not supported")
    values |= {**rope, **family.fixed, **family.rest(told)}
    values["model.tie_embeddings"] = bool(values["model.tie_embeddings"])
    floats = ("model.norm_eps", "model.init_std", "gate.scale")
    values |= {key: float(values[key]) for key in floats if key in values}
    return ReadConfig(family=family, values=values, theirs=theirs)


def usual_values() -> Values:
    """What a model is where its family says nothing of it; a preset must not shine through."""
    model = {f"model.{key}": value for key, value in to_flat(ModelConfig()).items()}
    experts = {f"moe.{key}": value for key, value in to_flat(ExpertsConfig()).items()}
    gate = {f"gate.{key}": getattr(GateConfig(), key) for key in GATE_KEYS}
    return {key: value for key, value in {**model, **experts, **gate}.items() if key not in OF_THE_RUN}


def contradictions(values: Mapping[str, Any], config: Any, where: str) -> Iterator[str]:
    """Keys whose values are not those of the folder."""
    flat = to_flat(config)
    for key, value in values.items():
        if flat[key] != value:
            yield f"{key} ({flat[key]!r}) contradicts {where}/config.json, which says {value!r}; leave it out"


def family_of(theirs: Mapping[str, Any], where: str, *, dense: bool = False) -> Family:
    kind = theirs.get("model_type")
    families = DENSE_FAMILIES if dense else FAMILIES
    for family in families:
        if family.model_type == kind:
            return family
    close = nearest(str(kind), [family.model_type for family in families])
    hint = f"; did you mean {close}?" if close else ""
    if not dense and any(family.model_type == kind for family in DENSE_FAMILIES):
        hint = "; it has no experts: --init-from with --init.upcycle copy or split makes some"
    known = ", ".join(family.model_type for family in families)
    raise CheckpointError(
        f"{where}: model_type {kind!r} is no family that we read ({known}){hint}; nothing is known of what "
        "it needs"
    )
