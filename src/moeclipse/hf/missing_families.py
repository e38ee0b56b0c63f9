"""Families of transformers that have no row in `hf/families`: what they need and we do not have.

A folder of one is refused with these words before a weight is read. In a model of transformers most of them
take our experts all the same (`hf/implementation`; docs/families.md has the table).
"""

from __future__ import annotations

from collections.abc import Mapping

GATED_DELTA = "linear attention by the gated delta rule"
SPARSE = "sparse attention by an indexer"
STATES = "layers of state spaces (Mamba)"
MISSING: Mapping[str, str] = {
    "afmoe": "gates on attention's output, and norms on both sides",
    "aria_text": "experts with weights of another form",
    "axk1": "a norm behind experts alone",
    "axk2": "a norm behind experts alone",
    "cohere2_moe": "LayerNorms, and attention beside the block instead of before it",
    "dbrx": "LayerNorms, and queries, keys and values in one clipped matrix",
    "deepseek_v32": SPARSE,
    "deepseek_v4": f"{SPARSE}, and hyper-connections",
    "doge": "attention with a dynamic mask, and experts found by product keys",
    "exaone_moe": "rotary position in layers with a window alone",
    "gemma4_text": "attention whose heads differ from layer to layer, and a block beside the experts",
    "glm_moe_dsa": SPARSE,
    "glm5_next_text": f"{GATED_DELTA}, and {SPARSE}",
    "granitemoehybrid": STATES,
    "hunyuan_v1_moe": "norms of queries and keys behind rotary position",
    "hy_v4": "a clamped SwiGLU with another limit",
    "inkling_text": "short convolutions beside attention, whose heads differ from layer to layer",
    "jamba": STATES,
    "jetmoe": "experts of attention",
    "kimi_linear": GATED_DELTA,
    "laguna": "gates on attention's output",
    "lfm2_moe": "layers of short convolutions",
    "llama4": "rotary position in some layers alone, attention in chunks, and norms without weights",
    "llama4_text": "rotary position in some layers alone, attention in chunks, and norms without weights",
    "longcat_flash": "two attentions in a layer, and experts that do nothing",
    "mellum": "rotary position that differs from layer to layer",
    "mimo_v2_flash": "attention whose heads differ from layer to layer",
    "minimax": "lightning attention",
    "minimax_m3_vl_text": SPARSE,
    "mistral4": "attention whose scale grows with the position",
    "nemotron_h": STATES,
    "nllb-moe": "an encoder",
    "phimoe": "LayerNorms with biases, and a sparse mixer as its gate",
    "qwen3_5_moe": f"{GATED_DELTA}, and gates on attention's output",
    "qwen4_exp": f"{GATED_DELTA}, and gates on attention's output",
    "qwen4_exp_text": f"{GATED_DELTA}, and gates on attention's output",
    "zaya": "attention over convolutions, and a gate of several layers",
    **dict.fromkeys(
        (
            *("aria", "deepseek_ocr2", "diffusion_gemma", "ernie4_5_vl_moe", "gemma4", "glm4v_moe"),
            *("glm5_next", "minimax_m3_vl", "qwen3_omni_moe", "qwen3_vl_moe", "step3p7"),
        ),
        "pictures or sound",
    ),
}
