"""How many parameters a model has, from its configuration alone."""

from __future__ import annotations

from moeclipse.model.config import ModelConfig
from moeclipse.moe.config import GateConfig, MoEConfig
from moeclipse.ops.activation import hidden_width


def count_parameters(config: ModelConfig, moe: MoEConfig, gate: GateConfig) -> tuple[int, int]:
    """(all parameters, those one token uses)."""
    d = config.d_model
    expert = expert_parameters(d, moe, moe.d_ff)
    num_moe = config.num_expert_layers
    always = config.vocab_size * d * (1 if config.tie_embeddings else 2) + d
    always += config.num_layers * (attention_parameters(config) + norm_parameters(config))
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


def attention_parameters(config: ModelConfig) -> int:
    """Of one layer, without its norm."""
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
    norms = {"none": 0, "head": 2 * config.head_dim, "whole": q + kv}[config.qk_norm]
    return 2 * d * (q + kv) + biases + norms + sinks


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
    return {"q": (q, d), "k": (kv, d), "v": (kv, d), "o": (d, q)}


def dense_matrices(config: ModelConfig, moe: MoEConfig) -> dict[str, tuple[int, int]]:
    """Those of attention, of layers without experts, and of shared experts."""
    d = config.d_model
    found = {f"{name} of attention": shape for name, shape in attention_matrices(config).items()}
    if config.num_expert_layers < config.num_layers:
        found |= {"up of a dense layer": (2 * config.d_ff, d), "down of a dense layer": (d, config.d_ff)}
    if moe.num_shared_experts and config.num_expert_layers:
        hidden = hidden_width(moe.activation, moe.shared_width)
        found |= {"up of a shared expert": (hidden, d), "down of a shared expert": (d, moe.shared_width)}
    return found
