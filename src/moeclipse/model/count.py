"""How many parameters a model has, from its configuration alone."""

from __future__ import annotations

from moeclipse.model.config import Mixer, ModelConfig
from moeclipse.moe.config import GateConfig, MoEConfig
from moeclipse.ops.activation import hidden_width


def count_parameters(config: ModelConfig, moe: MoEConfig, gate: GateConfig) -> tuple[int, int]:
    """(all parameters, those one token uses)."""
    d = config.d_model
    expert = expert_parameters(d, moe, moe.d_ff)
    num_moe = config.num_expert_layers
    always = config.vocab_size * d * (1 if config.tie_embeddings else 2) + d
    always += config.num_layers * norm_parameters(config)
    always += num_moe * d * (config.norms == "experts")
    always += sum(mixer_parameters(config, layer) for layer in range(config.num_layers))
    always += (config.num_layers - num_moe) * 3 * d * config.d_ff
    always += num_moe * (gate_parameters(d, moe, gate) + shared_parameters(d, moe) + moe.shared_gate * d)
    return always + num_moe * moe.num_experts * expert, always + num_moe * gate.top_k * expert


def expert_parameters(d: int, moe: MoEConfig, width: int) -> int:
    hidden = hidden_width(moe.activation, width)
    return d * (hidden + width) + (hidden + d) * moe.expert_bias


def shared_parameters(d: int, moe: MoEConfig) -> int:
    """Of a layer's shared expert, without its gate."""
    return expert_parameters(d, moe, moe.shared_width) if moe.num_shared_experts else 0


def gate_parameters(d: int, moe: MoEConfig, gate: GateConfig) -> int:
    return ((2 if gate.kind == "noisy" else 1) * d + gate.logit_bias) * moe.num_experts


def norm_parameters(config: ModelConfig) -> int:
    """Of the norms around the two blocks of a layer."""
    return (4 if config.norms == "both" else 2) * config.d_model


def mixer_parameters(config: ModelConfig, layer: int) -> int:
    """Of what mixes the tokens of a layer, without its norm."""
    kind, d, width = config.mixer_of(layer), config.d_model, config.conv_width
    if kind == "attention":
        return attention_parameters(config)
    products = sum(rows * columns for rows, columns in mixer_matrices(config, kind).values())
    if kind == "short_conv":
        return products + d * width
    keys = config.delta_key_heads * config.delta_key_dim
    if kind == "kimi_delta":  # convolutions, rates and shifts of decays, the norm
        return products + 3 * keys * width + config.delta_key_heads + keys + config.delta_key_dim
    values, heads = config.delta_value_heads * config.delta_value_dim, config.delta_value_heads
    return products + (2 * keys + values) * width + 2 * heads + config.delta_value_dim


def attention_parameters(config: ModelConfig) -> int:
    """Of one layer with attention, without its norm."""
    d, sinks = config.d_model, config.num_heads * config.attention_sinks
    if config.attention == "mla":
        qk = config.qk_nope_head_dim + config.qk_rope_head_dim
        q_in = config.q_lora_rank or d
        count = q_in * config.num_heads * qk + (d + 1) * config.q_lora_rank
        count += d * (config.kv_lora_rank + config.qk_rope_head_dim) + config.kv_lora_rank
        count += config.kv_lora_rank * config.num_heads * (config.qk_nope_head_dim + config.v_head_dim)
        return count + config.num_heads * config.v_head_dim * d + sinks
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    biases = {"none": 0, "qkv": q + 2 * kv, "all": q + 2 * kv + d}[config.attention_bias]
    by_head = 2 * config.head_dim
    norms = {"none": 0, "head": by_head, "turned": by_head, "whole": q + kv, "unit": 0}[config.qk_norm]
    gates = gate_width(config) * (d + (config.attention_bias != "none"))
    return 2 * d * (q + kv) + biases + norms + sinks + gates


def gate_width(config: ModelConfig) -> int:
    """Of the gate on what attention took."""
    if config.attention_gate == "none":
        return 0
    return config.num_heads * (1 if config.attention_gate.startswith("head") else config.head_dim)


def state_values(config: ModelConfig, layer: int) -> int:
    """Numbers of the states of a layer's mixer, for each text."""
    kind, key_dim = config.mixer_of(layer), config.delta_key_dim
    if kind == "gated_delta":
        return config.delta_value_heads * key_dim * config.delta_value_dim
    return config.delta_key_heads * key_dim * key_dim if kind == "kimi_delta" else 0


def expert_matrices(config: ModelConfig, moe: MoEConfig) -> dict[str, tuple[int, int]]:
    """Rows and columns of each kind of matrix that experts have."""
    if not config.num_expert_layers:
        return {}
    d, hidden = config.d_model, hidden_width(moe.activation, moe.d_ff)
    return {"up of an expert": (hidden, d), "down of an expert": (d, moe.d_ff)}


def attention_matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Its projections by name."""
    d, heads = config.d_model, config.num_heads
    if config.attention == "mla":
        qk, latent = config.qk_nope_head_dim + config.qk_rope_head_dim, config.kv_lora_rank
        found = {"q_up": (heads * qk, config.q_lora_rank or d)}
        found |= {"q_down": (config.q_lora_rank, d)} if config.q_lora_rank else {}
        found |= {"kv_down": (latent + config.qk_rope_head_dim, d)}
        found |= {"kv_up": (heads * (config.qk_nope_head_dim + config.v_head_dim), latent)}
        return found | {"o": (d, heads * config.v_head_dim)}
    q, kv = heads * config.head_dim, config.num_kv_heads * config.head_dim
    found = {"q": (q, d), "k": (kv, d), "v": (kv, d), "o": (d, q)}
    return found | ({"gate": (gate_width(config), d)} if config.attention_gate != "none" else {})


def mixer_matrices(config: ModelConfig, kind: Mixer) -> dict[str, tuple[int, int]]:
    """Projections of what mixes tokens, by name."""
    d, heads = config.d_model, config.delta_value_heads
    if kind == "attention":
        return attention_matrices(config)
    if kind == "short_conv":
        return {"inputs": (3 * d, d), "out": (d, d)}
    keys, values = config.delta_key_heads * config.delta_key_dim, heads * config.delta_value_dim
    if kind == "gated_delta":
        found = {"query": (keys, d), "key": (keys, d), "value": (values, d), "gate": (values, d)}
        return found | {"write": (heads, d), "decay": (heads, d), "out": (d, values)}
    narrow = config.delta_key_dim
    found = {"query": (keys, d), "key": (keys, d), "value": (keys, d), "write": (config.delta_key_heads, d)}
    for name in ("gate", "decay"):
        found |= {f"{name}_down": (narrow, d), name: (keys, narrow)}
    return found | {"out": (d, keys)}


def dense_matrices(config: ModelConfig, moe: MoEConfig) -> dict[str, tuple[int, int]]:
    """Those of attention, of layers without experts, and of shared experts."""
    d = config.d_model
    found = {
        f"{name} of {kind.replace('_', ' ')}": shape
        for kind in sorted(config.held_mixers)
        for name, shape in mixer_matrices(config, kind).items()
    }
    if config.num_expert_layers < config.num_layers:
        found |= {"up of a dense layer": (2 * config.d_ff, d), "down of a dense layer": (d, config.d_ff)}
    if moe.num_shared_experts and config.num_expert_layers:
        hidden = hidden_width(moe.activation, moe.shared_width)
        found |= {"up of a shared expert": (hidden, d), "down of a shared expert": (d, moe.shared_width)}
    return found
