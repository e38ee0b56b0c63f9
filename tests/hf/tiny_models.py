"""Tiny random models that transformers builds, in float64 from end to end, and what they compute."""

from __future__ import annotations

import importlib
import json
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch.overrides import TorchFunctionMode

from moeclipse.hf.families import FAMILIES

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


class Later:
    """A module that is loaded when something of it is first asked for, not when tests are collected."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, key: str) -> Any:
        return getattr(importlib.import_module(self._name), key)


peft: Any = Later("peft")


@cache
def classes() -> dict[str, Any]:
    """Of each family. They and peft are 200 MiB of modules: `conftest` asks before a test needs them, so that
    no fork does."""
    peft.LoraConfig  # noqa: B018  (loads it)
    return {family.model_type: getattr(transformers, family.architecture) for family in FAMILIES}


COMMON: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 7,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 3,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 0.5,
    "rope_theta": 10000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500.0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 6, "intermediate_size": 10}

TINY: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "intermediate_size": 6, "sliding_window": 3},
    "qwen2_moe": {
        **EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 7,
        "use_sliding_window": True,
        "sliding_window": 3,
        "max_window_layers": 2,
        "mlp_only_layers": [1],
        "num_hidden_layers": 3,
    },
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "norm_topk_prob": True, "head_dim": 6},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 6, "clip_qkv": 0.8},
    "deepseek_v2": {
        **EXPERTS,
        **LATENT,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy",
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.3,
    },
    "deepseek_v3": {
        **EXPERTS,
        **LATENT,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "rope_parameters": YARN,
        "num_mtp_layers": 0,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 6,
        "head_dim": 4,
        "sliding_window": 3,
        "rope_parameters": {**YARN, "truncate": False, "mscale": None, "mscale_all_dim": None},
    },
    "glm4_moe": {
        **EXPERTS,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "head_dim": 8,
        "use_qk_norm": True,
        "attention_bias": True,
        "num_mtp_layers": 0,
    },
    "granitemoe": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 6,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 1.7,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.5,
        "rope_parameters": LLAMA3,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 6,
        "intermediate_size": 10,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "dots1": {
        **EXPERTS,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "routed_scaling_factor": 1.3,
        "norm_topk_prob": True,
        "attention_bias": True,
        "head_dim": 6,
        "sliding_window": 3,
        "max_window_layers": 1,
    },
    "glm4_moe_lite": {
        **EXPERTS,
        **LATENT,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_hidden_layers": 3,
        "mlp_layer_types": ["dense", "sparse", "dense"],
    },
    "minimax_m2": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 6,
        "head_dim": 8,
        "rotary_dim": 4,
    },
    "solar_open": {
        **EXPERTS,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "head_dim": 8,
        "attention_bias": True,
        "rope_parameters": {**YARN, "mscale": None, "mscale_all_dim": None},
    },
    "hy_v3": {
        **EXPERTS,
        "num_experts": 4,
        "num_shared_experts": 2,
        "head_dim": 6,
        "mlp_layer_types": ["sparse", "dense"],
    },
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 6},
    "granitemoeshared": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 6,
        "shared_intermediate_size": 7,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.6,
    },
    "granitemoe_swa": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 6,
        "shared_intermediate_size": 7,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.5,
        "sliding_window": 3,
        "num_hidden_layers": 3,
        "layer_rope_theta": [500.0, 70.0, 0],
    },
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "shared_expert_intermediate_size": 7,
}
TINY["qwen3_next"] = {**DELTA, "intermediate_size": 10, "mlp_only_layers": [0], "attention_bias": True}
TINY["qwen3_5_moe_text"] = {
    **DELTA,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
TINY["kimi_linear"] = {
    **EXPERTS,
    **LATENT,
    "q_lora_rank": None,
    "num_experts": 4,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "linear_num_heads": 2,
    "linear_head_dim": 6,
    "linear_conv_kernel_dim": 3,
}
TINY["llama4_text"] = {
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "intermediate_size": 6,
    "intermediate_size_mlp": 10,
    "head_dim": 6,
    "num_hidden_layers": 3,
    "no_rope_layers": [1, 0, 1],
    "moe_layers": [0, 1],
    "attention_chunk_size": 3,
    "attn_scale": 0.4,
    "floor_scale": 2,
}
TINY["exaone_moe"] = {
    **EXPERTS,
    "num_experts": 4,
    "sliding_window": 3,
    "sliding_window_pattern": 2,
    "num_hidden_layers": 3,
    "n_group": 2,
    "head_dim": 6,
}
TINY["afmoe"] = {
    **EXPERTS,
    "num_experts": 4,
    "num_shared_experts": 1,
    "head_dim": 6,
    "sliding_window": 3,
    "global_attn_every_n_layers": 2,
    "route_scale": 1.3,
    "mup_enabled": True,
}
TINY["mellum"] = {
    **EXPERTS,
    "num_experts": 4,
    "head_dim": 6,
    "num_hidden_layers": 3,
    "sliding_window": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "mlp_layer_types": ["sparse", "sparse", "dense"],
    "rope_parameters": {
        "full_attention": {**YARN, "mscale": None, "mscale_all_dim": None},
        "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
    },
}
TINY["laguna"] = {
    **EXPERTS,
    "num_experts": 4,
    "shared_expert_intermediate_size": 5,
    "moe_routed_scaling_factor": 1.3,
    "head_dim": 8,
    "num_hidden_layers": 3,
    "sliding_window": 3,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "gating": "per-head",
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 70.0, "partial_rotary_factor": 1.0},
    },
}
TINY["lfm2_moe"] = {
    **EXPERTS,
    "num_experts": 4,
    "num_dense_layers": 1,
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "norm_eps": 1e-4,
    "routed_scaling_factor": 1.3,
}
TINY["hunyuan_v1_moe"] = {
    "num_experts": 4,
    "moe_topk": 2,
    "intermediate_size": 6,
    "head_dim": 6,
    "attention_bias": True,
    "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0},
}
TINY["aria_text"] = {"moe_num_experts": 4, "moe_topk": 2, "intermediate_size": 6, "attention_bias": True}
TINY["mistral4"] = {
    **EXPERTS,
    **LATENT,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "rope_parameters": {
        **YARN,
        "original_max_position_embeddings": 3,
        "llama_4_scaling_beta": 0.4,
    },
}
TINY["axk1"] = {
    **EXPERTS,
    **LATENT,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
# many heads, so that no two keys are turned away by all: of equal scores transformers chooses any
INDEXED = {
    **EXPERTS,
    **LATENT,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "index_topk": 3,
    "index_head_dim": 6,
    "index_n_heads": 12,
}
TINY["deepseek_v32"] = {**INDEXED, "rope_parameters": YARN}
TINY["glm_moe_dsa"] = INDEXED
DENSE: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3, "num_key_value_heads": 4},
    "mistral": {"sliding_window": 3, "head_dim": 6},
    "qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "qwen3": {"head_dim": 6},
}


class Widened(TorchFunctionMode):
    """Whoever asks for float32 gets float64: norms, gates, softmax and rotary tables of transformers do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = [torch.float64 if arg is torch.float32 else arg for arg in args]
        options = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*wide, **options)


@contextmanager
def in_float64() -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        with Widened():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def build(model_type: str, **changes: Any) -> Any:
    """A model with weights that all matter: no norm is one, no bias zero, no two choices near each other."""
    given = {**COMMON, **(TINY | DENSE)[model_type], **changes}
    config = transformers.AutoConfig.for_model(model_type, **given)
    config._attn_implementation = "eager"
    made = classes().get(model_type)
    model = made(config) if made else transformers.AutoModelForCausalLM.from_config(config)
    model.config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(1)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in name:
            continue
        random = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        small = 0.1 if "e_score_correction" in name else 0.5
        tensor.data.copy_(1 + 0.2 * random if "norm" in name else small * random)
    return model


def write_tiny(model_type: str, path: Path, **changes: Any) -> None:
    """A folder with its weights in float64."""
    with in_float64():
        model = build(model_type, **changes).double()
        model.save_pretrained(path)


def loss_and_gradients(path: Path, ids: torch.Tensor, targets: torch.Tensor, out: Path) -> Any:
    """(logits, mean loss) of a folder's model; its gradients become the weights of the folder `out`."""
    with in_float64():
        model = load(path).double()
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        for parameter in model.parameters():
            if parameter.requires_grad:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.data = grad.clone()
        model.save_pretrained(out)
    return logits.detach(), loss.detach()


def load(path: Path, dtype: torch.dtype = torch.float64) -> Any:
    kind = classes().get(json.loads((path / "config.json").read_text())["model_type"])
    auto = kind or transformers.AutoModelForCausalLM  # some families have no entry there
    model = auto.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    model.config._experts_implementation = "eager"
    return model


def shrink_layers(path: Path, **changes: Any) -> None:
    """Change keys of a folder's config.json."""
    tree = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(tree | changes))
