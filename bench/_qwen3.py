"""A Qwen3-MoE of transformers in the shape of one of our configurations: what benches compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from _smoke import device

from moeclipse.train.config import TrainConfig


def qwen3_config(config: TrainConfig, num_layers: int) -> Any:
    from transformers import AutoConfig

    shape, moe = config.model, config.moe
    return AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=shape.vocab_size,
        hidden_size=shape.d_model,
        intermediate_size=moe.d_ff,
        moe_intermediate_size=moe.d_ff,
        num_hidden_layers=num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        num_experts=moe.num_experts,
        num_experts_per_tok=config.gate.top_k,
        norm_topk_prob=True,
        max_position_embeddings=config.data.seq_len,
        use_cache=False,
    )


def their_loop(config: TrainConfig, model: Any, call: Any) -> Callable[[], float]:
    """A step as one writes it with transformers: gradients of microbatches add up in their weights' type, one
    clip, one update; the loss comes to the host once. `call`: the model, or a compiled one."""
    optim, trained = config.optim, [weight for weight in model.parameters() if weight.requires_grad]
    adam = torch.optim.AdamW(trained, lr=optim.lr, betas=(0.9, 0.95), fused=True)
    samples = config.data.batch_size // optim.accumulate
    length, vocabulary = config.data.seq_len, config.model.vocab_size

    def step() -> float:
        total = torch.zeros((), device=device())
        for _ in range(optim.accumulate):
            ids = torch.randint(vocabulary, (samples, length)).to(device())
            loss = call(input_ids=ids, labels=ids).loss / optim.accumulate
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(trained, optim.clip_norm)
        adam.step()
        adam.zero_grad(set_to_none=True)
        return float(total)

    return step
