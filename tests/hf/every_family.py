"""Every family of transformers that lets its experts be chosen, at a tiny size.

Families are found in the source of transformers, not in a list of ours: one that is new and cannot be built
by these rules makes the test fail, and gets a line in `OTHERWISE`.
"""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_models import in_float64, peft
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import moeclipse
import moeclipse.hf
from moeclipse.comm.mesh import Mesh
from moeclipse.hf.foreign_experts import is_experts, parameter_names
from moeclipse.moe.own_loop.standalone import held_layer
from moeclipse.testing.compare import difference

HOOK = "@use_experts_implementation"
SMALL: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 3,
    "intermediate_size": 12,
    "moe_intermediate_size": 6,
    "shared_expert_intermediate_size": 7,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
    "num_nextn_predict_layers": 0,
    "linear_head_dim": 4,
    "linear_num_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LATENT = {
    "q_lora_rank": 7,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "num_key_value_heads": 4,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}
OTHERWISE: dict[str, dict[str, Any]] = {
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse"]},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [6, 6], "hidden_size": 32, "rope_parameters": MROPE},
    "gemma4": {
        "enable_moe_block": True,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 8,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 48,
        "hidden_size_per_layer_input": 4,
    },
    "glm4v_moe": {"hidden_size": 32, "rope_parameters": MROPE},
    "granitemoehybrid": {"mamba_n_heads": 4, "layer_types": ["attention", "attention"]},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 0},
    "zaya": {"num_experts_per_tok": 1},
    "glm5_next": {
        "qk_rope_head_dim": 0,
        "index_head_dim": 8,
        "index_n_heads": 2,
        "index_topk": 4,
        "index_kpool": 2,
        "mlp_layer_types": ["dense", "sparse"],
    },
}
"""Keys of theirs, where the general rules do not make a model."""
CLASSES = {
    "deepseek_ocr2": "DeepseekOcr2TextModel",
    "diffusion_gemma": "DiffusionGemmaEncoderTextModel",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeTextModel",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerTextModel",
}
"""The text model of a family that no Auto class builds."""


@cache
def families() -> list[str]:
    """Folders of transformers whose experts can be chosen."""
    root = Path(transformers.__file__).parent / "models"
    return sorted(
        path.parent.name
        for path in root.glob("*/modeling_*.py")
        if re.search(f"^{HOOK}", path.read_text(), re.M)
    )


def tiny(name: str) -> Any:
    """The text model of a family, in float64."""
    kind = CONFIG_MAPPING[f"{name}_text" if f"{name}_text" in CONFIG_MAPPING else name]
    known = {field.name for field in dataclasses.fields(kind)} | set(getattr(kind, "attribute_map", {}))
    given = {key: value for key, value in SMALL.items() if key in known}
    if "kv_lora_rank" in known:
        given = {key: value for key, value in given.items() if key != "head_dim"} | LATENT
    config = kind(**given | OTHERWISE.get(name, {}))
    generator = torch.Generator().manual_seed(1)
    model = made(name, config).double().eval()
    for key, tensor in model.named_parameters():
        random = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        tensor.data.copy_(1 + 0.2 * random if "norm" in key else 0.3 * random)
    return model


def made(name: str, config: Any) -> Any:
    if name in CLASSES:
        module = __import__(f"transformers.models.{name}.modeling_{name}", fromlist=[name])
        return getattr(module, CLASSES[name])._from_config(config, attn_implementation="eager")
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            return auto.from_config(config, attn_implementation="eager")
    raise ValueError(f"no Auto class of transformers builds {name}")


ROWS = 4


def outcome(model: Any, how: str, rows: slice = slice(ROWS)) -> dict[str, torch.Tensor]:
    """What comes out for these rows of the batch, and the gradients of all parameters."""
    model.set_experts_implementation(how)
    model.zero_grad()
    ids = torch.randint(48, (ROWS, 8), generator=torch.Generator().manual_seed(0))
    out = model(input_ids=ids[rows], use_cache=False)
    y = out.logits if hasattr(out, "logits") else out.last_hidden_state
    weight = torch.randn((ROWS, *y.shape[1:]), generator=torch.Generator().manual_seed(2), dtype=y.dtype)
    (y * weight[rows]).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return grads | {"out": y.detach()}


def apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(difference(found[name], expected[name]) for name in expected)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What a family does with experts_implementation="moeclipse"."""

    name: str
    layers: int
    ours: int
    """Layers whose experts we compute."""
    alone: float
    """How far output and gradients are from those of `eager`."""
    shared: float | str
    """The same on two ranks, or why not."""
    adapted: float | str
    """The same with adapters of peft beside the experts."""

    def cells(self) -> str:
        """Of its row in the table, behind the name."""

        def shown(value: float | str) -> str:
            return value if isinstance(value, str) else "yes" if value < 1e-12 else f"{value:.1e} off"

        who = "MoEclipse" if self.ours == self.layers else "transformers' products"
        alone, shared, adapted = map(shown, (self.alone, self.shared, self.adapted))
        return f"{who} | {alone} | {shared} | {adapted}"


def row_of(mesh: Mesh, name: str) -> Row:
    """On each of two ranks; gradients are means over ranks."""
    moeclipse.hf.register()
    with in_float64():
        model = tiny(name)
        expected = outcome(model, "eager")
        alone = apart(outcome(model, "moeclipse"), expected)
        layers = [module for module in model.modules() if is_experts(module)]
        ours = moeclipse.hf.num_experts_layers(model)
        shared = shared_apart(mesh, name, expected) if ours == len(layers) else "no: whole"
        return Row(
            name=name, layers=len(layers), ours=ours, alone=alone, shared=shared, adapted=adapted_apart(name)
        )


def shared_apart(mesh: Mesh, name: str, expected: dict[str, torch.Tensor]) -> float:
    """Each rank has a part of the rows."""
    model = tiny(name).train()
    model.set_experts_implementation("moeclipse")
    moeclipse.hf.share_experts(model, mesh)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    first = mesh.rank * ROWS // mesh.num_ranks
    rows = slice(first, first + ROWS // mesh.num_ranks)
    outcome(model, "moeclipse", rows)
    moeclipse.sync_gradients(model)
    held = {key: held_layer(part).experts.ids for key, part in model.named_modules() if is_experts(part)}
    found, wanted = {}, {}
    for key, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        ids = held.get(key.rpartition(".")[0])
        wanted[key] = (
            expected[key] / mesh.num_ranks if ids is None else expected[key][list(ids)] / mesh.num_ranks
        )
        found[key] = parameter.grad if ids is not None else summed(parameter.grad) / mesh.num_ranks
    return apart(found, wanted)


def summed(grad: torch.Tensor) -> torch.Tensor:
    total = grad.clone()
    torch.distributed.all_reduce(total)
    return total


def adapted_apart(name: str) -> float | str:
    """Adapters of peft's `target_parameters`, whose second halves are not zero."""
    model = tiny(name)
    paths = [path for path, module in model.named_modules() if is_experts(module)]
    names = [n for n in parameter_names(model.get_submodule(paths[0])) if "bias" not in n]
    targets = [f"{path}.{n}" for path in paths for n in names]
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=[], target_parameters=targets)
    try:
        wrapped = peft.get_peft_model(model, config).double()
    except ValueError as error:
        return f"peft: {str(error).splitlines()[0][:60]}"
    generator = torch.Generator().manual_seed(4)
    for key, parameter in wrapped.named_parameters():
        if "lora_" in key:
            random = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.copy_(0.3 * random)
    inner = wrapped.base_model.model
    return apart(outcome(inner, "moeclipse"), outcome(inner, "eager"))
