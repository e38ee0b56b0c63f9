"""What families are said to need is what transformers' code of them has."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from every_family import families

from moeclipse.hf.families import FAMILIES
from moeclipse.hf.missing_families import MISSING

MODELS = Path(str(importlib.util.find_spec("transformers").origin)).parent / "models"  # type: ignore[union-attr]
EVIDENCE: dict[str, tuple[str, tuple[str, ...]]] = {
    "axk2": ("axk2", ("class AXK2GatedRMSNorm", "self.q_gate_proj")),
    "cohere2_moe": ("cohere2_moe", ("class Cohere2MoeLayerNorm", "residual + hidden_states_attention")),
    "dbrx": ("dbrx", ("self.Wqkv", "nn.LayerNorm", "self.clip_qkv")),
    "deepseek_v4": ("deepseek_v4", ("class DeepseekV4HyperConnection", "compressed_sparse_attention")),
    "doge": ("doge", ("def prepare_dynamic_mask", "class DogeCDMoE")),
    "gemma4_text": ("gemma4", ("layer_config.head_dim", "post_feedforward_layernorm_2")),
    "glm5_next_text": ("glm5_next", ("class Glm5NextTextHyperConnection", "safe_gate_lower_bound")),
    "granitemoehybrid": ("granitemoehybrid", ("class GraniteMoeHybridMambaLayer",)),
    "hy_v4": ("hy_v4", ("class HYV4HyperConnection", "self.swiglu_limit")),
    "inkling_text": ("inkling", ("self.k_sconv", "self.v_sconv")),
    "jamba": ("jamba", ("class JambaMambaMixer",)),
    "jetmoe": ("jetmoe", ("class JetMoeMoA",)),
    "longcat_flash": ("longcat_flash", ("zero_expert_num", "self.self_attn = nn.ModuleList")),
    "mimo_v2_flash": ("mimo_v2_flash", ("config.num_key_value_heads * 2", "v_head_dim")),
    "minimax": ("minimax", ("class MiniMaxLightningAttention",)),
    "minimax_m3_vl_text": ("minimax_m3_vl", ("build_block_mask", "self.swiglu_limit")),
    "nemotron_h": ("nemotron_h", ("class NemotronHMamba2Mixer",)),
    "nllb-moe": ("nllb_moe", ("class NllbMoeEncoder(",)),
    "phimoe": ("phimoe", ("def sparsemixer", "nn.LayerNorm")),
    "qwen4_exp": ("qwen4_exp", ("hyper_connection", "ngram_embedding")),
    "qwen4_exp_text": ("qwen4_exp", ("hyper_connection", "ngram_embedding")),
    "zaya": ("zaya", ("Compressed Convolutional Attention", "class ZayaRouter")),
}
"""(folder of transformers, words of its code that the reason speaks of)."""


@pytest.mark.parametrize("model_type", [name for name, why in MISSING.items() if why != "pictures or sound"])
def test_the_code_has_what_is_said_to_be_missing(model_type: str) -> None:
    folder, words = EVIDENCE[model_type]
    code = (MODELS / folder / f"modeling_{folder}.py").read_text()
    assert [word for word in words if word not in code] == []


def test_pictures_and_sound_are_in_models_of_more_than_text() -> None:
    for name in (name for name, why in MISSING.items() if why == "pictures or sound"):
        code = (MODELS / name / f"modeling_{name}.py").read_text().lower()
        assert "vision" in code or "audio" in code or "image" in code, name


def test_no_family_is_both_read_and_missing() -> None:
    assert not {family.model_type for family in FAMILIES} & MISSING.keys()
    assert set(families())
