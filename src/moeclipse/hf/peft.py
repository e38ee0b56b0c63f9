"""Adapters in PEFT's files: adapter_config.json and adapter_model.safetensors, in and out.

    ours, below layers.3.                theirs, below base_model.model.model.layers.3.
    attention.adapters.lora_q.a.weight   self_attn.q_proj.lora_A.weight           [r, in]
    attention.adapters.lora_q.b.weight   self_attn.q_proj.lora_B.weight           [out, r]
    attention.adapters.lora_kv_down.a.w. self_attn.kv_a_proj_with_mqa.lora_A.weight    and so on: `MODULES`
    moe.experts.7.lora_up_a              mlp.experts.base_layer.lora_A.weight     [E r, in]
    moe.experts.7.lora_up_b              mlp.experts.base_layer.lora_B.weight     [out, r E]
    moe.experts.7.lora_down_a, _b        mlp.experts.lora_A.weight, lora_B        likewise

Where one projection of the experts alone has an adapter, `base_layer.` is left out. Granite's experts are
called `block_sparse_moe.experts`. What goes in is A's width and what comes out B's height in every family,
transposed weights or not; gpt-oss' rows of gate and up take turns in B as they do in its weights. Llama 4's
experts do not say that they are transposed: A is our B, turned, and B our A (`Names.adapters_turned`).

Hazard: B of experts lies with the expert as the fastest index, A with the expert as the slowest.

Contract: what PEFT can do and we cannot (DoRA, biases, dropout, ranks of single layers) is refused in one
line, and so are tensors of another shape than the model's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from moeclipse.core.errors import CheckpointError
from moeclipse.core.outside import read_table, regular
from moeclipse.hf.names import EACH, Names
from moeclipse.model.config import ModelConfig
from moeclipse.model.count import attention_matrices
from moeclipse.model.lora_config import ADAPTER, LoraConfig
from moeclipse.moe.config import MoEConfig
from moeclipse.ops.activation import hidden_width

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PARAMETERS = {"up": "gate_up_proj", "down": "down_proj"}
MODULES = {
    "q_down": "q_a_proj",
    "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_up": "kv_b_proj",
    **{name: f"{name}_proj" for name in "qkvo"},
}
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
    shape: tuple[int, int]
    """Of the part of theirs that is one of ours."""
    fastest: bool = False
    """The expert is the fastest index of columns; else it is the slowest of rows."""
    turns: bool = False
    """Rows of gate and up take turns."""
    turned: bool = False
    """Each of ours is a transposed part of theirs."""

    def pack(self, parts: list[torch.Tensor]) -> torch.Tensor:
        if self.turned:
            parts = [part.t() for part in parts]
        if self.turns:
            parts = [part.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1) for part in parts]
        return (torch.stack(parts, dim=-1).flatten(1) if self.fastest else torch.cat(parts)).contiguous()

    def unpack(self, value: torch.Tensor) -> list[torch.Tensor]:
        count = len(self.names)
        parts = value.unflatten(1, (-1, count)).unbind(2) if self.fastest else value.chunk(count)
        if self.turns:
            parts = tuple(part.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1) for part in parts)
        return [(part.t() if self.turned else part).contiguous() for part in parts]

    @property
    def packed_shape(self) -> tuple[int, int]:
        (rows, width), count = self.shape, len(self.names)
        return (rows, width * count) if self.fastest else (rows * count, width)


def projections(model: ModelConfig, lora: LoraConfig) -> dict[str, tuple[str, tuple[int, int]]]:
    """Of attention, those that have adapters: ours -> (theirs, its inputs and outputs)."""
    modules = MODULES if model.q_lora_rank else MODULES | {"q_up": "q_proj"}
    shapes = attention_matrices(model).items()
    return {name: (modules[name], (width, rows)) for name, (rows, width) in shapes if lora.has(name)}


def peft_tensors(model: ModelConfig, moe: MoEConfig, lora: LoraConfig, names: Names) -> Iterator[PeftTensor]:
    d, rank = model.d_model, lora.rank
    sizes = {"up": (d, hidden_width(moe.activation, moe.d_ff)), "down": (moe.d_ff, d)}
    for layer in range(model.num_layers):
        theirs, ours = f"base_model.model.model.layers.{layer}.", f"weight/layers.{layer}."
        for name, (module, size) in projections(model, lora).items():
            for half, shape in halves(*size, rank):
                key = f"{theirs}self_attn.{module}.lora_{half.upper()}.weight"
                mine = f"{ours}attention.adapters.{ADAPTER}{name}.{half}.weight"
                yield PeftTensor(key=key, names=(mine,), shape=shape)
        if model.is_dense(layer) or not lora.has("experts"):
            continue
        for kind in lora.projections:
            path = names.experts_module + ("" if kind == lora.projections[-1] else ".base_layer")
            turned = names.adapters_turned
            d_in, d_out = sizes[kind]
            for half, shape in halves(d_out, d_in, rank) if turned else halves(d_in, d_out, rank):
                mine = "ba"["ab".index(half)] if turned else half
                experts = (f"{ours}moe.experts.{e}.{ADAPTER}{kind}_{mine}" for e in range(moe.num_experts))
                yield PeftTensor(
                    key=f"{theirs}{path}.lora_{half.upper()}.weight",
                    names=tuple(experts),
                    shape=shape,
                    fastest=half == "b",
                    turns=(kind, half, names.experts) == ("up", "b", "interleaved"),
                    turned=turned,
                )


def halves(d_in: int, d_out: int, rank: int) -> tuple[tuple[str, tuple[int, int]], ...]:
    return ("a", (rank, d_in)), ("b", (d_out, rank))


def to_peft(
    model: ModelConfig, moe: MoEConfig, lora: LoraConfig, names: Names, read: ReadWhole
) -> dict[str, torch.Tensor]:
    """Their tensors of ours; `read` gives a whole tensor by its name."""
    tensors = peft_tensors(model, moe, lora, names)
    return {tensor.key: tensor.pack([read(name) for name in tensor.names]) for tensor in tensors}


def from_peft(
    model: ModelConfig,
    moe: MoEConfig,
    lora: LoraConfig,
    names: Names,
    tensors: Mapping[str, torch.Tensor],
    where: str,
) -> dict[str, torch.Tensor]:
    """Ours of theirs; CheckpointError where some are missing, left over or of another shape."""
    wanted = [*peft_tensors(model, moe, lora, names)]
    check_shapes({key: tuple(value.shape) for key, value in tensors.items()}, wanted, lora.rank, where)
    found: dict[str, torch.Tensor] = {}
    for tensor in wanted:
        found |= dict(zip(tensor.names, tensor.unpack(tensors[tensor.key]), strict=True))
    return found


def check_shapes(
    shapes: Mapping[str, tuple[int, ...]], wanted: Iterable[PeftTensor], rank: int, where: str
) -> None:
    """CheckpointError where tensors of a file are missing, left over or of another shape."""
    left = set(shapes)
    for tensor in wanted:
        if tensor.key not in shapes:
            raise CheckpointError(f"{where} has no {tensor.key}; lora.targets and the adapter differ")
        left.discard(tensor.key)
        if shapes[tensor.key] != tensor.packed_shape:
            raise CheckpointError(
                f"{where}: {tensor.key} has the shape {list(shapes[tensor.key])}, which must be "
                f"{list(tensor.packed_shape)} for this model and lora.rank = {rank}"
            )
    if left:
        raise CheckpointError(f"{where} holds {sorted(left)[0]}, which lora.targets does not name")


def adapter_config(model: ModelConfig, lora: LoraConfig, names: Names, base: str) -> dict[str, Any]:
    """Their adapter_config.json."""
    experts = lora.has("experts") and model.num_expert_layers > 0
    parameters = [f"{names.experts_module}.{PARAMETERS[kind]}" for kind in lora.projections]
    return {
        **PLAIN,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": 0.0,
        "target_modules": [module for module, _ in projections(model, lora).values()],
        "target_parameters": parameters if experts else None,
        "inference_mode": True,
    }


def read_adapter(
    path: Path, model: ModelConfig, moe: MoEConfig, lora: LoraConfig, names: Names = EACH
) -> dict[str, torch.Tensor]:
    """Ours, of a folder; CheckpointError where it is not whole or needs what we do not have."""
    check_settings(path, lora)
    with whole_adapter(path):
        tensors = load_file(regular(path / WEIGHTS, inside=path))
    return from_peft(model, moe, lora, names, tensors, f"{path}/{WEIGHTS}")


def look_at_adapter(
    path: Path, model: ModelConfig, moe: MoEConfig, lora: LoraConfig, names: Names = EACH
) -> None:
    """Fails as `read_adapter` would, and reads settings and the header alone."""
    check_settings(path, lora)
    with whole_adapter(path), safe_open(regular(path / WEIGHTS, inside=path), framework="pt") as opened:
        shapes = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
    check_shapes(shapes, peft_tensors(model, moe, lora, names), lora.rank, f"{path}/{WEIGHTS}")


@contextmanager
def whole_adapter(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is no whole adapter ({CONFIG}, {WEIGHTS}): {error}") from None


def check_settings(path: Path, lora: LoraConfig) -> None:
    told = read_settings(path)
    if (told.get("r"), float(told.get("lora_alpha") or 0)) != (lora.rank, lora.alpha):
        raise CheckpointError(
            f"{path}/{CONFIG} says r = {told.get('r')} and lora_alpha = {told.get('lora_alpha')}; set "
            f"lora.rank ({lora.rank}) and lora.alpha ({lora.alpha}) to these"
        )
    if bool(told.get("use_rslora")) != lora.rslora:
        raise CheckpointError(
            f"{path}/{CONFIG} says use_rslora = {told.get('use_rslora')!r}; set lora.rslora to it"
        )


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (lambda value: type(value) is int and value >= 1, "a whole number, 1 or more"),
    "lora_alpha": (lambda value: isinstance(value, int | float) and math.isfinite(value), "a number"),
    "target_modules": (lambda value: isinstance(value, str) or _are_names(value), "names"),
    "target_parameters": (_are_names, "a list of names"),
}
"""Of what we read in their settings, where it is there."""


def read_settings(path: Path) -> dict[str, Any]:
    """An adapter_config.json that asks for nothing that we do not have."""
    try:
        told = read_table(path / CONFIG, inside=path, numbers=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no whole adapter ({CONFIG}, {WEIGHTS}): {error}") from None
    for key, (fits, form) in FORMS.items():
        if told.get(key) is not None and not fits(told[key]):
            raise CheckpointError(f"{path}/{CONFIG}: {key} must be {form}, not {told[key]!r}")
    needs = [
        f"{key} = {told[key]!r}"
        for key, usual in PLAIN.items()
        if (told.get(key) or usual) != usual  # what is empty is not asked for
    ]
    if told.get("lora_dropout"):
        needs.append(f"lora_dropout = {told['lora_dropout']!r}")
    if needs:
        raise CheckpointError(f"{path}: an adapter with {', '.join(needs)} is not supported")
    return told


def adapter_lora(path: Path, model: ModelConfig, names: Names = EACH) -> LoraConfig:
    """What an adapter's own settings say; CheckpointError for targets that this model has not."""
    told = read_settings(path)
    every = LoraConfig(rank=1, targets=tuple(MODULES))
    modules = {theirs: ours for ours, (theirs, _) in projections(model, every).items()}
    parameters = {f"{names.experts_module}.{theirs}": ours for ours, theirs in PARAMETERS.items()}
    asked = told.get("target_modules") or []
    asked = [asked] if isinstance(asked, str) else asked
    targets = {name: modules.get(name.rpartition(".")[2]) for name in asked}
    targets |= {name: parameters.get(name) for name in told.get("target_parameters") or []}
    unknown = sorted(name for name, ours in targets.items() if ours is None)
    if unknown or not targets:
        raise CheckpointError(
            f"{path}/{CONFIG} targets {', '.join(unknown) or 'nothing'}; ours are "
            f"{', '.join((*modules, *parameters))}"
        )
    return LoraConfig(
        rank=int(told.get("r") or 0),
        alpha=float(told.get("lora_alpha") or 0),
        rslora=bool(told.get("use_rslora")),
        targets=tuple(sorted(ours for ours in targets.values() if ours is not None)),
    )
