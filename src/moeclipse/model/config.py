"""The shape of the decoder transformer.

A model is data: what families of models do differently is a key here, in `moe` or in `gate`, and no class of
its own. Which family sets what: docs/hf.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Scaling = Literal["none", "linear", "dynamic", "yarn", "llama3"]
Pairs = Literal["halves", "neighbours"]
Mixer = Literal["attention", "gated_delta", "kimi_delta", "short_conv"]
Base = Literal["", "bf16", "nf4", "mxfp4", "fp8"]
"""How a frozen weight is kept (`ops/frozen`)."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    vocab_size: int = 256
    num_layers: int = 4
    num_dense_layers: int = 0
    """The first so many layers have a dense feed-forward block instead of experts."""
    dense_layers: tuple[int, ...] = ()
    """Further layers without experts, by number."""
    d_model: int = 128
    d_ff: int = 512
    """Hidden width of dense layers."""
    attention: Literal["gqa", "mla"] = "gqa"
    """Grouped-query, or multi-head latent attention (DeepSeek-V3)."""
    num_heads: int = 4
    num_kv_heads: int = 2
    """Heads of keys and values (gqa)."""
    head_dim: int = 32
    """Width of one head (gqa)."""
    q_lora_rank: int = 0
    """Rank of the query projection (mla); 0: full."""
    kv_lora_rank: int = 64
    """Rank of the joint key-value projection (mla)."""
    qk_nope_head_dim: int = 32
    """Per head, the part of query and key without rotary position (mla)."""
    qk_rope_head_dim: int = 16
    """Per head, the part of query and key with rotary position (mla)."""
    v_head_dim: int = 32
    """Width of one head's values (mla)."""
    mixers: tuple[Mixer, ...] = ()
    """What mixes tokens, for layers in turn: attention, or a state that they write to and read
    (model/delta_mixers), or a short convolution (model/conv_mixer); empty: attention in all."""
    delta_key_heads: int = 2
    """Heads of keys of delta mixers ..."""
    delta_value_heads: int = 4
    """... and of values, each with a state (gated_delta)."""
    delta_key_dim: int = 32
    """Width of a key head; of every head (kimi_delta)."""
    delta_value_dim: int = 32
    """Width of a value head (gated_delta)."""
    conv_width: int = 4
    """Positions that a mixer's short convolution sees, its own included."""
    index_topk: int = 0
    """Keys that a token takes from, as an indexer chooses them (mla, model/indexer); 0: all that it sees."""
    index_heads: int = 4
    index_dim: int = 32
    """Width of a head of the indexer."""
    index_pairs: Pairs = "halves"
    """As rope_pairs, of the indexer."""
    attention_bias: Literal["none", "qkv", "all"] = "none"
    """Biases of the projections to queries, keys and values, or of these and the output's (gqa)."""
    attention_scale: float = 0.0
    """Factor on query . key; 0: 1 / sqrt(width of a head)."""
    attention_gate: Literal["none", "component", "head", "component_softplus", "head_softplus"] = "none"
    """Factors on what attention took, from its input: a sigmoid or softplus, of a component or head (gqa)."""
    attention_softcap: float = 0.0
    """Attention logits go through c tanh(x / c); 0: they do not."""
    attention_sinks: bool = False
    """Each head has a learned logit that takes weight and gives nothing."""
    qk_norm: Literal["none", "head", "whole", "turned", "unit"] = "none"
    """Norm of queries and keys (gqa): of each head, or of all heads of a token together; turned: of each
    head, behind rotary position; unit: the same without weights, in layers that turn."""
    clip_qkv: float = 0.0
    """Queries, keys and values are clipped to this size (gqa); 0: they are not."""
    windows: tuple[int, ...] = ()
    """Positions that a layer sees, its own included, for layers in turn: [128, 0] alternates; 0: all."""
    chunks: tuple[int, ...] = ()
    """Texts are cut into pieces of so many positions, which a layer does not see across, in turn; 0: not."""
    growth: float = 0.0
    """Queries grow by this times log(1 + floor((position + growth_first) / growth_len)); 0: not at all ..."""
    growth_len: int = 8192
    growth_first: int = 0
    growth_in: Literal["all", "unturned"] = "all"
    """... in all layers, or in those without rotary position."""
    memory: int = 0
    """Positions of the segment before that each layer also attends to (Transformer-XL); 0: none."""
    rope_base: float = 10000.0
    rope_dim: int = 0
    """Components of a head that rotary position turns (gqa); 0: all."""
    rope_layers: tuple[bool, ...] = ()
    """Which layers have rotary position, in turn; empty: all."""
    window_rope_base: float = 0.0
    """Base of layers with a window, whose angles no scaling changes; 0: they turn as all others."""
    window_rope_dim: int = 0
    """Components that turn in these layers, where they have a base of their own (gqa); 0: all."""
    rope_pairs: Pairs = "halves"
    """Which components turn together: one of each half, or neighbours."""
    rope_scaling: Scaling = "none"
    """How positions beyond rope_original_len are reached (model/rotary)."""
    rope_factor: float = 1.0
    """How many times longer texts may be."""
    rope_original_len: int = 4096
    """Length of texts without scaling."""
    rope_beta_fast: float = 32.0
    """yarn: pairs that turn so often within the original length keep their angles, ..."""
    rope_beta_slow: float = 1.0
    """... those that turn so often or less are scaled."""
    rope_truncate: bool = True
    """yarn: these borders are rounded to whole pairs."""
    rope_magnitude: float = 0.0
    """Factor on cos and sin; 0: that of the scaling (yarn: 0.1 ln(factor) + 1, otherwise 1)."""
    rope_low_freq: float = 1.0
    """llama3: pairs that turn less often within the original length are scaled, ..."""
    rope_high_freq: float = 4.0
    """... those that turn more often keep their angles."""
    norms: Literal["before", "after", "both", "experts"] = "before"
    """Norms stand before attention and feed-forward blocks, after them (before the sum), or both; experts:
    before them, and after experts."""
    zero_centred_norms: bool = False
    """Norms multiply by 1 + their weights, which begin as zeros."""
    norm_eps: float = 1e-5
    latent_norm_eps: float = 0.0
    """Of the norms of latents (mla); 0: norm_eps."""
    embedding_scale: float = 1.0
    """Factor on embeddings."""
    residual_scale: float = 1.0
    """Factor on what each block adds to the residual stream."""
    logit_scale: float = 1.0
    """Factor on logits."""
    logit_softcap: float = 0.0
    """Logits go through c tanh(x / c); 0: they do not."""
    tie_embeddings: bool = False
    init_std: float = 0.02
    from_hf: str = ""
    """A folder of a Hugging Face model: the shape of the model and its first weights are taken from it."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Of parameters and activations; auto: bfloat16 on CUDA, float32 on CPU."""
    base: Base = ""
    """Beside adapters, how experts' frozen matrices are kept: nf4, mxfp4, fp8 or bf16; empty: as dtype."""
    dense_base: Base = ""
    """The same for frozen matrices of attention, of dense layers and of shared experts."""

    def problems(self) -> Iterator[str]:
        for name in ("vocab_size", "num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                yield f"model.{name} ({getattr(self, name)}) must be at least 1"
        if not 0 <= self.num_dense_layers <= self.num_layers:
            yield (
                f"model.num_dense_layers ({self.num_dense_layers}) must be between 0 and "
                f"model.num_layers ({self.num_layers})"
            )
        if self.attention == "gqa":
            if self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads:
                yield (
                    f"model.num_kv_heads ({self.num_kv_heads}) must divide model.num_heads ({self.num_heads})"
                )
            if self.head_dim % 2:
                yield f"model.head_dim ({self.head_dim}) must be even: rotary position turns pairs"
        else:
            if self.q_lora_rank < 0:
                yield f"model.q_lora_rank ({self.q_lora_rank}) must not be negative; 0 is full rank"
            for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
                if getattr(self, name) < 1:
                    yield f"model.{name} ({getattr(self, name)}) must be at least 1"
            if self.qk_rope_head_dim % 2:
                yield (
                    f"model.qk_rope_head_dim ({self.qk_rope_head_dim}) must be even: "
                    "rotary position turns pairs"
                )
        if self.memory < 0:
            yield f"model.memory ({self.memory}) must not be negative; 0 is no memory"
        for name in ("init_std", "norm_eps", "rope_base", "rope_factor", "embedding_scale", "residual_scale"):
            if getattr(self, name) <= 0:
                yield f"model.{name} ({getattr(self, name)}) must be positive"
        yield from attention_problems(self)
        yield from mixer_problems(self)
        yield from rotary_problems(self)

    @property
    def rope_width(self) -> int:
        """Components of a head that rotary position turns."""
        return (self.rope_dim or self.head_dim) if self.attention == "gqa" else self.qk_rope_head_dim

    @property
    def latent_eps(self) -> float:
        return self.latent_norm_eps or self.norm_eps

    def window_of(self, layer: int) -> int:
        """Positions that a layer sees; 0: all."""
        return self.windows[layer % len(self.windows)] if self.windows else 0

    def mixer_of(self, layer: int) -> Mixer:
        return self.mixers[layer % len(self.mixers)] if self.mixers else "attention"

    @property
    def held_mixers(self) -> frozenset[Mixer]:
        """Kinds that layers have."""
        return frozenset[Mixer](self.mixers[: self.num_layers] or ("attention",))

    def turns(self, layer: int) -> bool:
        """Whether it has rotary position."""
        return self.rope_layers[layer % len(self.rope_layers)] if self.rope_layers else True

    def chunk_of(self, layer: int) -> int:
        """Positions of the pieces that a layer does not see across; 0: texts are whole."""
        return self.chunks[layer % len(self.chunks)] if self.chunks else 0

    def grows(self, layer: int) -> bool:
        """Whether queries grow with their position."""
        return self.growth != 0 and (self.growth_in == "all" or not self.turns(layer))

    @property
    def norm_shift(self) -> float:
        """Added to the weights of norms."""
        return 1.0 if self.zero_centred_norms else 0.0

    def is_dense(self, layer: int) -> bool:
        return layer < self.num_dense_layers or layer in self.dense_layers

    @property
    def num_expert_layers(self) -> int:
        """Counted without a list: a configuration may be asked before it is known to be sound."""
        behind = {layer for layer in self.dense_layers if self.num_dense_layers <= layer < self.num_layers}
        return self.num_layers - self.num_dense_layers - len(behind)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Layers with experts, by number."""
        return tuple(layer for layer in range(self.num_layers) if not self.is_dense(layer))


def attention_problems(config: ModelConfig) -> Iterator[str]:
    """What is wrong with who sees whom, and with layers that are named by number."""
    if config.attention == "mla":
        usual = ModelConfig()
        for name in ("attention_bias", "qk_norm", "clip_qkv", "rope_dim", "attention_gate"):
            value = getattr(config, name)
            if value != getattr(usual, name):
                yield f"model.{name} ({value!r}) needs model.attention = 'gqa', not 'mla'; leave it out"
    for name in ("attention_scale", "attention_softcap", "clip_qkv", "logit_softcap", "latent_norm_eps"):
        if getattr(config, name) < 0:
            yield f"model.{name} ({getattr(config, name)}) must not be negative; 0 is the usual"
    if config.logit_scale == 0:
        yield "model.logit_scale (0.0) must not be 0: all logits would be alike"
    if any(window < 0 for window in config.windows):
        yield f"model.windows ({list(config.windows)}) must not be negative; 0 sees all positions"
    unknown = [layer for layer in config.dense_layers if not 0 <= layer < config.num_layers]
    if unknown:
        yield (
            f"model.dense_layers names layer {unknown[0]}, but model.num_layers ({config.num_layers}) gives "
            f"layers 0 to {config.num_layers - 1}"
        )
    if config.memory > 0 and any(config.windows):
        yield (
            f"model.memory ({config.memory}) cannot go with model.windows ({list(config.windows)}): memory "
            "is what lies before the segment; choose one of them"
        )


def mixer_problems(config: ModelConfig) -> Iterator[str]:
    """What is wrong with mixers other than attention, and with pieces of texts."""
    sizes = ("delta_key_heads", "delta_value_heads", "delta_key_dim", "delta_value_dim", "conv_width")
    for name in (*sizes, "growth_len"):
        if getattr(config, name) < 1:
            yield f"model.{name} ({getattr(config, name)}) must be at least 1"
    if config.delta_key_heads > 0 and config.delta_value_heads % config.delta_key_heads:
        yield (
            f"model.delta_key_heads ({config.delta_key_heads}) must divide model.delta_value_heads "
            f"({config.delta_value_heads})"
        )
    for name in ("index_heads", "index_dim"):
        if getattr(config, name) < 1:
            yield f"model.{name} ({getattr(config, name)}) must be at least 1"
    if config.index_topk < 0:
        yield f"model.index_topk ({config.index_topk}) must not be negative; 0 takes from all keys"
    if config.index_topk > 0 and (config.attention != "mla" or any(config.windows) or any(config.chunks)):
        yield (
            f"model.index_topk ({config.index_topk}) needs model.attention = 'mla' whose layers see all "
            "positions; set it to 0, or leave model.windows and model.chunks out"
        )
    if config.index_topk > 0 and config.index_dim < config.qk_rope_head_dim:
        yield (
            f"model.index_dim ({config.index_dim}) must be at least model.qk_rope_head_dim "
            f"({config.qk_rope_head_dim}), the part that turns"
        )
    if any(chunk < 0 for chunk in config.chunks):
        yield f"model.chunks ({list(config.chunks)}) must not be negative; 0 does not cut texts"
    layers = range(max(config.num_layers, 0)) if any(config.chunks) and any(config.windows) else ()
    both = next((layer for layer in layers if config.chunk_of(layer) and config.window_of(layer)), None)
    if both is not None:
        yield f"layer {both} has one of model.windows and one of model.chunks; choose for each layer"
    if config.memory > 0:
        others = {"mixers": set(config.mixers) - {"attention"}, "chunks": any(config.chunks)}
        for name, given in (*others.items(), ("growth", config.growth), ("index_topk", config.index_topk)):
            if given:
                yield (
                    f"model.memory ({config.memory}) cannot go with model.{name} "
                    f"({getattr(config, name)!r}): only attention remembers a segment so; set it to 0"
                )


def rotary_problems(config: ModelConfig) -> Iterator[str]:
    """What is wrong with rotary position."""
    if config.rope_dim % 2 or not 0 <= config.rope_dim <= config.head_dim:
        yield (
            f"model.rope_dim ({config.rope_dim}) must be even and at most model.head_dim "
            f"({config.head_dim}); 0 turns all components"
        )
    for name in ("rope_original_len", "rope_beta_fast", "rope_beta_slow"):
        if getattr(config, name) <= 0:
            yield f"model.{name} ({getattr(config, name)}) must be positive"
    if config.window_rope_base < 0:
        yield (
            f"model.window_rope_base ({config.window_rope_base}) must not be negative; 0 is model.rope_base"
        )
    if config.window_rope_dim % 2 or not 0 <= config.window_rope_dim <= config.head_dim:
        yield (
            f"model.window_rope_dim ({config.window_rope_dim}) must be even and at most model.head_dim "
            f"({config.head_dim}); 0 turns all components"
        )
    if config.window_rope_dim and not config.window_rope_base:
        yield f"model.window_rope_dim ({config.window_rope_dim}) needs a model.window_rope_base"
    if config.window_rope_base > 0 and (config.attention != "gqa" or not any(config.windows)):
        yield (
            f"model.window_rope_base ({config.window_rope_base}) needs model.windows and model.attention = "
            "'gqa'; set it to 0"
        )
    if config.rope_magnitude < 0:
        yield f"model.rope_magnitude ({config.rope_magnitude}) must not be negative; 0 is that of the scaling"
    if config.rope_scaling == "none" and config.rope_factor != 1:
        yield (
            f"model.rope_factor ({config.rope_factor}) needs a model.rope_scaling: linear, dynamic, yarn or "
            "llama3"
        )
    if config.rope_scaling == "llama3" and config.rope_low_freq >= config.rope_high_freq:
        yield (
            f"model.rope_low_freq ({config.rope_low_freq}) must be below model.rope_high_freq "
            f"({config.rope_high_freq})"
        )
    if config.rope_scaling == "dynamic" and config.rope_width <= 2:
        yield "model.rope_scaling = 'dynamic' needs more than one pair of components to turn"
    if config.rope_scaling == "dynamic" and config.memory > 0:
        yield (
            f"model.memory ({config.memory}) cannot go with model.rope_scaling = 'dynamic', whose angles "
            "change with the length of a segment; choose another scaling, or 0"
        )


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """What yarn multiplies cos and sin by: distant tokens would fade otherwise."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
