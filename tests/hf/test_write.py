"""Tensors of a folder from logical ones, and files as streams."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from moeclipse.hf.names import INTERLEAVED, tensor_table
from moeclipse.hf.write import Outline, assemble, chunks_of, index_of, shards_of, sources_of
from moeclipse.model.config import ModelConfig
from moeclipse.moe.config import GateConfig, MoEConfig

MODEL = ModelConfig(num_layers=1, d_model=4, num_heads=2, num_kv_heads=1, head_dim=2, vocab_size=6)
MOE = MoEConfig(num_experts=2, d_ff=3, expert_bias=True)


def test_tensors_are_assembled_from_parts() -> None:
    table = tensor_table(INTERLEAVED, MODEL, MOE, GateConfig())
    ours = {name: torch.randn(tensor.rows * tensor.width) for name, tensor in table.items()}
    sources = sources_of(table)

    def read(name: str, start: int, stop: int) -> torch.Tensor:
        return ours[name][start:stop]

    fused = assemble(sources["model.layers.0.mlp.experts.gate_up_proj"], read, torch.float32)
    for expert in range(2):
        up = ours[f"weight/layers.0.moe.experts.{expert}.up"].view(6, 4)
        assert torch.equal(fused[expert, :, ::2], up[:3].t())
        assert torch.equal(fused[expert, :, 1::2], up[3:].t())
    bias = assemble(sources["model.layers.0.mlp.experts.gate_up_proj_bias"], read, torch.float32)
    assert torch.equal(bias[1, ::2], ours["weight/layers.0.moe.experts.1.up_bias"][:3])
    narrow = assemble(sources["model.norm.weight"], read, torch.bfloat16)
    assert torch.equal(narrow, ours["weight/norm.weight"].bfloat16())


def test_files_are_cut_by_size_and_read_by_others(tmp_path: Path) -> None:
    kinds = [torch.bfloat16, torch.float32, torch.float16, torch.float64]
    tensors = [Outline(key=f"t{n}", shape=(n, 3), dtype=kind) for n, kind in enumerate(kinds, 1)]
    values = {t.key: torch.randn(t.shape).to(t.dtype) for t in tensors}
    assert list(shards_of(tensors)) == ["model.safetensors"]
    assert index_of(shards_of(tensors)) == {}
    shards = shards_of(tensors, most=40)
    assert [[t.key for t in group] for group in shards.values()] == [["t1", "t2"], ["t3"], ["t4"]]
    found = {}
    for file, group in shards.items():
        (tmp_path / file).write_bytes(b"".join(chunks_of(group, lambda t: values[t.key])))
        found |= load_file(tmp_path / file)
    assert found.keys() == values.keys()
    assert all(torch.equal(found[key], value) for key, value in values.items())
    (raw,) = index_of(shards).values()
    tree = json.loads(raw)
    assert tree["weight_map"]["t4"] == "model-00003-of-00003.safetensors"
    assert tree["metadata"]["total_size"] == sum(v.numel() * v.element_size() for v in values.values())


def test_tensors_of_a_file_lie_one_behind_the_other(tmp_path: Path) -> None:
    tensors = [Outline(key=f"t{n}", shape=(n,), dtype=torch.float32) for n in (1, 2, 3, 4)]
    values = {t.key: torch.randn(t.shape) for t in tensors}
    (tmp_path / "one").write_bytes(b"".join(chunks_of(tensors, lambda t: values[t.key])))
    found = load_file(tmp_path / "one")
    assert found.keys() == values.keys()
    assert all(torch.equal(found[key], value) for key, value in values.items())
