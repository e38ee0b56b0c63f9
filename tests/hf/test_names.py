"""Tables of tensors: names, shapes, and that parts cover both sides exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.hf.names import EACH, GRANITE, INTERLEAVED, MIXTRAL, Names, RowRange, tensor_table
from moeclipse.model.config import ModelConfig
from moeclipse.model.transformer import Transformer
from moeclipse.moe.config import GateConfig, MoEConfig
from moeclipse.train.optim.buckets import Buckets

MODEL = ModelConfig(
    num_layers=3,
    d_model=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    d_ff=10,
    vocab_size=20,
    dense_layers=(1,),
)
MLA = replace(
    MODEL,
    attention="mla",
    q_lora_rank=3,
    kv_lora_rank=5,
    qk_nope_head_dim=2,
    qk_rope_head_dim=4,
    v_head_dim=3,
)
ALL = replace(MODEL, attention_bias="all", qk_norm="whole", attention_sinks=True, tie_embeddings=True)
MOE = MoEConfig(num_experts=3, d_ff=6)
SHARED = replace(MOE, num_shared_experts=2)
GATED = replace(MOE, num_shared_experts=1, shared_d_ff=7, shared_gate=True)
OSS = replace(MOE, expert_bias=True, activation="clamped_swiglu")
ERNIE = Names(choice_bias="moe_statics.e_score_correction_bias", choice_bias_rows=1)
CASES = {
    "each": (EACH, MODEL, MOE, GateConfig()),
    "latent": (EACH, MLA, SHARED, GateConfig(kind="sigmoid")),
    "latent, whole q": (EACH, replace(MLA, q_lora_rank=0), MOE, GateConfig()),
    "mixtral": (MIXTRAL, replace(MODEL, dense_layers=()), MOE, GateConfig()),
    "granite": (GRANITE, replace(MODEL, dense_layers=()), MOE, GateConfig()),
    "gpt-oss": (INTERLEAVED, replace(ALL, dense_layers=()), OSS, GateConfig(logit_bias=True)),
    "qwen2": (EACH, replace(MODEL, attention_bias="qkv", qk_norm="head"), GATED, GateConfig()),
    "ernie": (ERNIE, ALL, SHARED, GateConfig()),
}


@pytest.mark.parametrize("case", CASES)
def test_all_parameters_have_their_place(case: str) -> None:
    """Names and shapes are those under which the trainer saves and loads."""
    names, model, moe, gate = CASES[case]
    table = tensor_table(names, model, moe, gate)
    mesh = Mesh.single()
    buckets = Buckets(Transformer(model, moe, gate, mesh=mesh), mesh, 1.0)
    shapes = {f"weight/{entry.name}": entry.shape for bucket in buckets for entry in bucket.entries}
    assert shapes == {name: t.shape for name, t in table.items() if name.startswith("weight/")}
    biased = gate.kind == "sigmoid" or names.choice_bias_rows
    assert sum(name.startswith("buffer/") for name in table) == (2 if model.dense_layers else 3) * bool(
        biased
    )


@pytest.mark.parametrize("case", CASES)
def test_parts_cover_both_sides_exactly(case: str) -> None:
    names, model, moe, gate = CASES[case]
    counted: dict[str, torch.Tensor] = {}
    for tensor in tensor_table(names, model, moe, gate).values():
        assert sum(part.rows for part in tensor.parts) == tensor.rows
        for part in tensor.parts:
            mark(counted.setdefault(part.key, torch.zeros(part.shape)), part)
    assert all((count == 1).all() for count in counted.values())


def mark(count: torch.Tensor, part: RowRange) -> None:
    target = count if part.entry is None else count[part.entry]
    place = slice(part.first, part.first + part.step * (part.rows - 1) + 1, part.step)
    if part.transposed:
        target[:, place] += 1
    else:
        target[place] += 1


def test_some_names() -> None:
    table = tensor_table(*CASES["each"])
    up = table["weight/layers.2.moe.experts.1.up"]
    assert [part.key for part in up.parts] == [
        "model.layers.2.mlp.experts.1.gate_proj.weight",
        "model.layers.2.mlp.experts.1.up_proj.weight",
    ]
    assert table["weight/layers.1.dense.down.weight"].parts[0].key == "model.layers.1.mlp.down_proj.weight"
    mixtral = tensor_table(*CASES["mixtral"])["weight/layers.0.moe.experts.2.down"]
    assert mixtral.parts[0].key == "model.layers.0.block_sparse_moe.experts.2.w2.weight"
    first, second = tensor_table(*CASES["gpt-oss"])["weight/layers.0.moe.experts.2.up"].parts
    assert (first.entry, first.first, second.first, first.step, first.transposed) == (2, 0, 1, 2, True)
