"""Names and shapes that loaders of vLLM and SGLang ask for are written, and docs/serving.md lists them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_compose import values_of
from tiny_models import TINY

from moeclipse.core.config import with_values
from moeclipse.hf.compose import named
from moeclipse.hf.folder import Shapes
from moeclipse.hf.names import tensor_table
from moeclipse.model.config import ModelConfig
from moeclipse.moe.config import GateConfig, MoEConfig

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
SIZES = {
    "model.vocab_size": 97,
    "model.d_model": 44,
    "model.d_ff": 89,
    "moe.d_ff": 83,
    "moe.num_experts": 5,
    "moe.shared_d_ff": 71,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 22,
    "model.kv_lora_rank": 13,
    "model.q_lora_rank": 17,
    "model.qk_nope_head_dim": 19,
    "model.qk_rope_head_dim": 6,
    "model.v_head_dim": 23,
}
LETTERS = {97: "V", 44: "D", 89: "I", 83: "F", 166: "2F", 5: "E", 71: "S", 142: "2S"}
"""What a size stands for; all are different."""


def written(model_type: str) -> set[str]:
    """Names and shapes of the block of a layer with experts, with letters for numbers."""
    values = {key: value for key, value in values_of(model_type).items() if key != "model.from_hf"}
    sizes = {
        key: size
        for key, size in SIZES.items()
        if key != "moe.shared_d_ff" or values["moe.num_shared_experts"]
    }
    whole = Shapes(model=ModelConfig(), moe=MoEConfig(), gate=GateConfig())
    shapes = with_values(whole, values | sizes)
    layer = shapes.model.expert_layers[0]
    table = tensor_table(named(model_type).names, shapes.model, shapes.moe, shapes.gate)
    found = {part.key: part.shape for tensor in table.values() for part in tensor.parts}
    names = set()
    for key, shape in found.items():
        beside = ("self_attn", "linear_attn", "norm.", ".conv.")
        if f".layers.{layer}." not in key or any(word in key for word in beside):
            continue
        plain = re.sub(r"experts\.\d+", "experts.N", key.partition(f".layers.{layer}.")[2])
        names.add(f"{plain} [{', '.join(LETTERS.get(size, str(size)) for size in shape)}]")
    return names


def listed() -> dict[str, set[str]]:
    rows = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            for model_type in re.findall(r"`(\w+)`", cells[0]):
                rows[model_type] = set(re.findall(r"`([^`]+\])`", line))
    return rows


@pytest.mark.parametrize("model_type", TINY)
def test_the_page_lists_what_is_written(model_type: str) -> None:
    assert listed()[model_type] == written(model_type)
