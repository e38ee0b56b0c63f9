"""A configuration's model as costs see it (`cost/sizes`): its widths, and what of it is trained."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.cost.cluster import ExpertChoice
from moeclipse.cost.sizes import ModelSizes, TrainedLayer
from moeclipse.model.config import ModelConfig
from moeclipse.model.count import gate_width
from moeclipse.model.lora_config import LoraConfig, is_adapter
from moeclipse.model.transformer import Transformer
from moeclipse.moe.config import GateConfig, MoEConfig
from moeclipse.ops.activation import hidden_width
from moeclipse.train.config import TrainConfig
from moeclipse.train.optim.parameter_groups import ParameterGroups

SIDE = re.compile(r"lora_(?P<target>\w+?)[._](?P<side>[ab])(\.weight)?$")
"""Of an adapter's name: `lora_q_up.a.weight`, `lora_down_b`."""


BITS = {"": 0.0, "nf4": 4.13, "mxfp4": 4.25, "fp8": 8.0, "bf16": 16.0}
"""Of a weight in a frozen base, factors included; "": as all others."""
PARTS = {
    "attention.": "attn",
    "moe.gate.": "route",
    "moe.shared": "shared",
    "dense.": "mlp",
    "moe.experts.": "mlp",
}
"""Which product a weight belongs to, by how its name goes on behind the layer's number."""


def sizes_of_run(config: TrainConfig) -> ModelSizes:
    """With what `lora` and `optim.frozen` leave to train; ConfigError for parts that have no price."""
    if why := unpriced(config.model):
        raise ConfigError(f"plan and simulate have no price for {why}")
    sizes = sizes_of(config.model, config.moe, config.gate)
    if not (config.lora.rank or config.optim.frozen):
        return sizes
    groups = ParameterGroups.of(config.optim, config.lora)
    by_layer: dict[int, list[tuple[str, torch.Tensor]]] = {}
    tables = [True, True]
    for name, parameter in parameters_of(config):
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            by_layer.setdefault(int(number), []).append((rest, parameter))
        elif parameter.dim() == 2:
            tables[name != "embedding"] = not groups.is_frozen(name)
    tables[1] = tables[0] if config.model.tie_embeddings else tables[1]
    return replace(
        sizes,
        trained=tuple(
            trained_of(layer, by_layer[layer], groups, config.lora.rank) for layer in sorted(by_layer)
        ),
        trained_tables=(tables[0], tables[1]),
        expert_bits=BITS[config.model.base],
        dense_bits=BITS[config.model.dense_base],
    )


def parameters_of(config: TrainConfig) -> Sequence[tuple[str, torch.Tensor]]:
    """Names, and shapes of what is decoded."""
    numbers = replace(config.model, base="", dense_base="")
    return _nowhere(numbers, config.moe, config.gate, config.lora)


@lru_cache(maxsize=4)
def _nowhere(
    model: ModelConfig, moe: MoEConfig, gate: GateConfig, lora: LoraConfig
) -> Sequence[tuple[str, torch.Tensor]]:
    """A search asks often, and a model of many layers takes half a second."""
    whole = Transformer(model, moe, gate, mesh=Mesh.single(torch.device("meta")), lora=lora)
    return list(whole.named_parameters())


def first_trained(config: TrainConfig) -> int:
    """The first layer with something to train: there backward ends; 0 with the embedding."""
    groups = ParameterGroups.of(config.optim, config.lora)
    if not groups.is_frozen("embedding"):
        return 0
    names = (name for name, _ in parameters_of(config) if not groups.is_frozen(name))
    layers = (int(name.split(".")[1]) for name in names if name.startswith("layers."))
    return min(layers, default=config.model.num_layers)


def unpriced(model: ModelConfig) -> str:
    """What of a model costs do not know; empty: they know all of it."""
    if others := sorted(model.held_mixers - {"attention"}):
        return f"mixers of tokens other than attention (model.mixers has {', '.join(others)})"
    if model.index_topk:
        return f"keys that an indexer chooses (model.index_topk = {model.index_topk})"
    if any(model.chunks):
        return f"attention in pieces of a text (model.chunks = {list(model.chunks)})"
    return ""


def trained_of(
    layer: int, parameters: list[tuple[str, torch.Tensor]], groups: ParameterGroups, rank: int
) -> TrainedLayer:
    """One layer: of each product the share of weights that is trained, sums of parameters, and adapters."""
    total: dict[str, float] = dict.fromkeys(PARTS.values(), 0.0)
    trained = dict(total)
    dense = expert = 0.0
    norms = False
    adapters: dict[bool, dict[str, dict[str, int]]] = {False: {}, True: {}}
    for name, parameter in parameters:
        of_experts, size = name.startswith("moe.experts."), float(parameter.numel())
        learns = not groups.is_frozen(f"layers.{layer}.{name}")
        each = size / len(parameter) if of_experts else size
        dense, expert = (dense, expert + each * learns) if of_experts else (dense + each * learns, expert)
        if is_adapter(name):
            found = SIDE.search(name)
            assert found is not None, name
            wide = parameter.shape[-1] if found["side"] == "a" else parameter.shape[-2]
            adapters[of_experts].setdefault(found["target"], {})[found["side"]] = int(wide)
        elif name.endswith("norm.weight"):
            norms = norms or learns
        elif part := next((part for begin, part in PARTS.items() if name.startswith(begin)), ""):
            total[part], trained[part] = total[part] + size, trained[part] + size * learns
    pairs = {of: tuple((wide["b"], wide["a"]) for wide in adapters[of].values()) for of in (False, True)}
    shares = {part: trained[part] / total[part] if total[part] else 0.0 for part in total}
    return TrainedLayer(
        **shares,
        norms=norms,
        dense_parameters=dense,
        expert_parameters=expert,
        rank=rank,
        attn_adapters=pairs[False],
        expert_adapters=pairs[True],
    )


def sizes_of(model: ModelConfig, moe: MoEConfig, gate: GateConfig) -> ModelSizes:
    """Everything is trained."""
    latent = model.attention == "mla"
    layers = range(model.num_layers)
    return ModelSizes(
        vocab=model.vocab_size,
        d_model=model.d_model,
        num_heads=model.num_heads,
        kv_heads=model.num_heads if latent else model.num_kv_heads,
        d_qk=model.qk_nope_head_dim + model.qk_rope_head_dim if latent else model.head_dim,
        d_v=model.v_head_dim if latent else model.head_dim,
        q_rank=model.q_lora_rank if latent else 0,
        kv_rank=model.kv_lora_rank if latent else 0,
        d_rope=model.qk_rope_head_dim if latent else 0,
        gate_width=gate_width(model) if not latent else 0,
        qk_norm=model.qk_norm != "none",
        moe_layers=tuple(not model.is_dense(layer) for layer in layers),
        windows=tuple(map(model.window_of, layers)) if any(model.windows) else (),
        dense_width=model.d_ff,
        expert_width=moe.d_ff,
        gated=hidden_width(moe.activation, 1) == 2,
        experts=ExpertChoice(
            num_experts=moe.num_experts,
            top_k=gate.top_k,
            num_groups=gate.num_groups,
            top_groups=gate.top_groups,
        ),
        shared_width=moe.shared_width,
        tied=model.tie_embeddings,
    )
