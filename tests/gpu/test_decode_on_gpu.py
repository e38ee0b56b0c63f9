"""Text on a GPU: steps replayed as CUDA graphs write what eager ones write, in float64 and in bfloat16."""

from __future__ import annotations

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.model.config import ModelConfig
from moeclipse.model.decode import Decoder, writing
from moeclipse.model.transformer import Transformer
from moeclipse.moe.config import GateConfig, MoEConfig
from moeclipse.testing.compare import difference
from moeclipse.train.generate.decode_graph import DecodeGraph, obstacle
from moeclipse.train.step.graphs import CudaCapture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device"),
]
CONFIGS = {
    "gqa": ModelConfig(num_layers=2, d_model=128, num_heads=4, num_kv_heads=2, head_dim=32, vocab_size=300),
    "mla": ModelConfig(num_layers=2, d_model=128, attention="mla", num_heads=4, vocab_size=300),
    "sinks": ModelConfig(num_layers=2, d_model=128, attention_sinks=True, windows=(4, 0), vocab_size=300),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_replayed_step_reads_what_an_eager_one_reads(name: str) -> None:
    moe, gate = MoEConfig(num_experts=4, d_ff=64), GateConfig(top_k=2)
    mesh = Mesh.single("cuda")
    model = Transformer(CONFIGS[name], moe, gate, mesh=mesh, dtype=torch.bfloat16)
    plain, other = Decoder(model, 2, 32), Decoder(model, 2, 32)
    prompts = [[5, 2, 9, 100], [7]]
    with writing(model):
        plain.read(prompts)
        other.read(prompts)
        assert obstacle(other) == ""
        graph = DecodeGraph(other, CudaCapture(mesh.device))
        for token in range(12):
            wanted = plain.read([[token], [2 * token]])
            found = graph.read([[token], [2 * token]])
            assert difference(found.float(), wanted.float()) < 2e-2, token
        assert graph.refused == ""


def test_logits_on_a_gpu_are_those_on_a_cpu() -> None:
    moe, gate = MoEConfig(num_experts=4, d_ff=64), GateConfig(top_k=2)
    found = []
    for device in ("cpu", "cuda"):
        model = Transformer(CONFIGS["gqa"], moe, gate, mesh=Mesh.single(device), dtype=torch.float64)
        decoder = Decoder(model, 2, 8)
        with writing(model):
            decoder.read([[5, 2, 9], [7]])
            found.append(decoder.read([[3], [4]]).cpu())
    assert difference(*found) < 1e-11
