"""The shape of the decoder transformer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    vocab_size: int = 256
    num_layers: int = 4
    num_dense_layers: int = 0
    """The first so many layers have a dense feed-forward block instead of experts."""
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
    memory: int = 0
    """Positions of the segment before that each layer also attends to (Transformer-XL); 0: none."""
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    init_std: float = 0.02
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Of parameters and activations; auto: bfloat16 on CUDA, float32 on CPU."""

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
        for name in ("init_std", "norm_eps", "rope_base"):
            if getattr(self, name) <= 0:
                yield f"model.{name} ({getattr(self, name)}) must be positive"

    @property
    def rope_width(self) -> int:
        """Components of a head that rotary position turns."""
        return self.head_dim if self.attention == "gqa" else self.qk_rope_head_dim
