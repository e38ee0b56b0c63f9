"""A Qwen3-MoE of transformers under torch's FSDP2 with everything on the host, for who has one GPU.

Weights, gradients and AdamW's states are bfloat16 in pinned memory of the host; weights travel to the device
layer by layer, gradients travel back, and the update is torch's fused one, on the processor's cores. Layers
are recomputed whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from _qwen3 import qwen3_config, their_loop

from moeclipse.train.config import TrainConfig

BYTES = 2 + 2 + 4
"""Of a parameter: weight, gradient, both moments."""


def offloaded_step(config: TrainConfig) -> Callable[[], float]:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
    from transformers import Qwen3MoeForCausalLM

    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1, store=dist.HashStore())
    mesh = dist.device_mesh.init_device_mesh("cuda", (1,))
    theirs = qwen3_config(config, config.model.num_layers)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM._from_config(
            theirs, attn_implementation="sdpa", experts_implementation="grouped_mm", dtype=torch.bfloat16
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = CPUOffloadPolicy(pin_memory=True)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(theirs).to("cuda")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local()
            local.copy_(0.02 * torch.randn(local.shape, dtype=local.dtype, device="cuda"))
    return their_loop(config, model, model)
