"""Adapters in PEFT's files: adapter_config.json and adapter_model.safetensors, in and out.

    ours, below layers.3.                theirs, below base_model.model.model.layers.3.
    attention.adapters.lora_q.a.weight   self_attn.q_proj.lora_A.weight           [r, in]
    attention.adapters.lora_q.b.weight   self_attn.q_proj.lora_B.weight           [out, r]
    moe.experts.7.lora_up_a              mlp.experts.base_layer.lora_A.weight     [E r, in]
    moe.experts.7.lora_up_b              mlp.experts.base_layer.lora_B.weight     [out, r E]
    moe.experts.7.lora_down_a, _b        mlp.experts.lora_A.weight, lora_B        likewise

Where one projection of the experts alone has an adapter, `base_layer.` is left out.

Hazard: B of experts lies with the expert as the fastest index, A with the expert as the slowest.

Contract: what PEFT can do and we cannot (DoRA, biases, dropout, ranks of single layers) is refused in one
line, and so are experts whose rows lie otherwise (gpt-oss, Granite).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from moeclipse.core.errors import CheckpointError
from moeclipse.hf.names import Names
from moeclipse.model.config import ModelConfig
from moeclipse.model.lora_config import ADAPTER, LoraConfig
from moeclipse.moe.config import MoEConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PARAMETERS = {"up": "mlp.experts.gate_up_proj", "down": "mlp.experts.down_proj"}
PLAIN: Mapping[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "fan_in_fan_out": False,
    "lora_bias": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
    "modules_to_save": None,
}
"""What we have; a file that says otherwise is refused."""

ReadWhole = Callable[[str], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class PeftTensor:
    """One tensor of their file: `names` are ours, one, or one for each expert."""

    key: str
    names: tuple[str, ...]
    packed: Literal["no", "slowest", "fastest"] = "no"
    """Which index the expert is."""


def peft_tensors(model: ModelConfig, moe: MoEConfig, lora: LoraConfig) -> Iterator[PeftTensor]:
    for layer in range(model.num_layers):
        theirs, ours = f"base_model.model.model.layers.{layer}.", f"weight/layers.{layer}."
        for name in "qkvo":
            if lora.has(name):
                for half, other in (("a", "A"), ("b", "B")):
                    key = f"{theirs}self_attn.{name}_proj.lora_{other}.weight"
                    logical = f"{ours}attention.adapters.{ADAPTER}{name}.{half}.weight"
                    yield PeftTensor(key=key, names=(logical,))
        if model.is_dense(layer) or not lora.has("experts"):
            continue
        for kind in lora.projections:
            path = "experts." if kind == lora.projections[-1] else "experts.base_layer."
            for half, other, packed in (("a", "A", "slowest"), ("b", "B", "fastest")):
                names = tuple(f"{ours}moe.experts.{e}.{ADAPTER}{kind}_{half}" for e in range(moe.num_experts))
                key = f"{theirs}mlp.{path}lora_{other}.weight"
                yield PeftTensor(key=key, names=names, packed=packed)  # type: ignore[arg-type]


def to_peft(model: ModelConfig, moe: MoEConfig, lora: LoraConfig, read: ReadWhole) -> dict[str, torch.Tensor]:
    """Their tensors of ours; `read` gives a whole tensor by its name."""
    found = {}
    for tensor in peft_tensors(model, moe, lora):
        parts = [read(name) for name in tensor.names]
        if tensor.packed == "no":
            found[tensor.key] = parts[0].contiguous()
        elif tensor.packed == "slowest":
            found[tensor.key] = torch.cat(parts).contiguous()
        else:
            found[tensor.key] = torch.stack(parts, dim=-1).flatten(1).contiguous()
    return found


def from_peft(
    model: ModelConfig, moe: MoEConfig, lora: LoraConfig, tensors: Mapping[str, torch.Tensor], where: str
) -> dict[str, torch.Tensor]:
    """Ours of theirs; CheckpointError where some are missing or left over."""
    found: dict[str, torch.Tensor] = {}
    left = set(tensors)
    for tensor in peft_tensors(model, moe, lora):
        if tensor.key not in tensors:
            raise CheckpointError(f"{where} has no {tensor.key}; lora.targets and the adapter differ")
        left.discard(tensor.key)
        value, count = tensors[tensor.key], len(tensor.names)
        if tensor.packed == "slowest":
            parts = list(value.unflatten(0, (count, -1)))
        elif tensor.packed == "fastest":
            parts = list(value.unflatten(1, (-1, count)).permute(2, 0, 1))
        else:
            parts = [value]
        found |= {name: part.contiguous() for name, part in zip(tensor.names, parts, strict=True)}
    if left:
        raise CheckpointError(f"{where} holds {sorted(left)[0]}, which lora.targets does not name")
    for name, value in found.items():
        rank = value.shape[0] if name.endswith(("_a", ".a.weight")) else value.shape[1]
        if rank != lora.rank:
            raise CheckpointError(f"{where}: {name} has rank {rank}, lora.rank is {lora.rank}")
    return found


def adapter_config(model: ModelConfig, lora: LoraConfig, base: str) -> dict[str, Any]:
    """Their adapter_config.json."""
    experts = lora.has("experts") and model.num_expert_layers > 0
    return {
        **PLAIN,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": 0.0,
        "target_modules": [f"{name}_proj" for name in "qkvo" if lora.has(name)],
        "target_parameters": [PARAMETERS[kind] for kind in lora.projections] if experts else None,
        "inference_mode": True,
    }


def names_problem(names: Names, lora: LoraConfig) -> str:
    """Why experts of a family have no place in PEFT's files; empty: they have one."""
    if lora.has("experts") and names.experts != "each":
        return "experts of this family lie otherwise than in PEFT's files; leave them out of lora.targets"
    return ""


def read_adapter(path: Path, model: ModelConfig, moe: MoEConfig, lora: LoraConfig) -> dict[str, torch.Tensor]:
    """Ours, of a folder; CheckpointError where it is not whole or needs what we do not have."""
    try:
        told = json.loads((path / CONFIG).read_bytes())
        tensors = load_file(path / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path} is no whole adapter ({CONFIG}, {WEIGHTS}): {error}") from None
    needs = [
        f"{key} = {told[key]!r}"
        for key, usual in PLAIN.items()
        if (told.get(key) or usual) != usual  # what is empty is not asked for
    ]
    if told.get("lora_dropout"):
        needs.append(f"lora_dropout = {told['lora_dropout']!r}")
    if needs:
        raise CheckpointError(f"{path}: an adapter with {', '.join(needs)} is not supported")
    if (told.get("r"), float(told.get("lora_alpha") or 0)) != (lora.rank, lora.alpha):
        raise CheckpointError(
            f"{path}/{CONFIG} says r = {told.get('r')} and lora_alpha = {told.get('lora_alpha')}; set "
            f"lora.rank ({lora.rank}) and lora.alpha ({lora.alpha}) to these"
        )
    if bool(told.get("use_rslora")) != lora.rslora:
        raise CheckpointError(
            f"{path}/{CONFIG} says use_rslora = {told.get('use_rslora')!r}; set lora.rslora to it"
        )
    return from_peft(model, moe, lora, tensors, f"{path}/{WEIGHTS}")
