"""The layer in loops of one's own, on a CUDA device: autocast, overlap, state, and models of transformers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn

import moeclipse
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.moe.layer import MoE
from moeclipse.ops.random import fill_normal, key_of
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_ranks

# Counted through NVML: asking CUDA itself here would spoil forked ranks.
HAS_GPU = torch.cuda.device_count() > 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]
HAS_NCCL = HAS_GPU and dist.is_nccl_available()
ranked = [
    pytest.mark.nccl,
    pytest.mark.usefixtures("mps"),
    pytest.mark.skipif(not HAS_NCCL, reason="needs NCCL"),
]
OVER_NCCL: dict[str, Any] = {"device": "cuda", "backend": "nccl", "deadline_s": 240.0}
D, FF, EXPERTS, TOKENS = 64, 48, 8, 40


def tokens(number: int, rank: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    made = fill_normal(torch.empty(TOKENS, D, dtype=torch.float64), key_of("tokens", number, rank), 1.0)
    return made.to("cuda", dtype)


def test_autocast_computes_in_bf16_and_chooses_in_fp32() -> None:
    moe = MoE(D, FF, EXPERTS, top_k=2, init_std=0.2, num_shared_experts=1, device=torch.device("cuda"))
    x = tokens(0, dtype=torch.float32).requires_grad_()
    plain = moe(x)
    chosen = moe.last.load_E
    with torch.autocast("cuda", torch.bfloat16):
        y = moe(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(moe.last.load_E, chosen), "a rounded logit would choose another expert"
    assert difference(y.float(), plain) < 0.03
    (y.float().square().sum() + moeclipse.aux_loss(moe)).backward()
    for name, parameter in moe.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all()


class Two(nn.Module):
    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        options: dict[str, Any] = {"mesh": mesh, "init_std": 0.2, "dtype": torch.float64}
        gate = GateConfig(top_k=2, balance_loss=0.1)
        exchange = {"schedule": "smart", "chunks": 2, "group_size": 1}
        self.moes = nn.ModuleList(
            MoE(D, FF, EXPERTS, gate=gate, layer=number, exchange=exchange, **options) for number in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for moe in self.moes:
            x = x + moe(torch.tanh(x))
        return x


def overlapped(mesh: Mesh) -> list[float]:
    """Differences of gradients between turns and the plain loop."""
    found = []
    for way in ("plain", "turns", "turns"):
        model = Two(mesh)
        given = [tokens(number, mesh.rank) for number in range(4)]
        if way == "plain":
            for x in given:
                ((model(x).square().mean() + moeclipse.aux_loss(model)) / 4).backward()
        else:
            outputs = moeclipse.overlap(model, given)
            (sum(y.square().mean() for y in outputs) / 4 + moeclipse.aux_loss(model)).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    plain, *others = found
    return [difference(other[name], plain[name]) for other in others for name in plain]


def saved(mesh: Mesh, folder: str) -> bool:
    """Through torch.distributed.checkpoint and back."""
    model = Two(mesh)
    expected = model(tokens(0, mesh.rank))
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = model.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder)
    full = moeclipse.full_state_dict(model)
    assert all(len(value) == EXPERTS for name, value in full.items() if ".experts." in name)
    return torch.equal(model(tokens(0, mesh.rank)), expected)


class TestOnRanks:
    pytestmark = ranked

    def test_microbatches_in_turns_have_the_gradients_of_the_plain_loop(self) -> None:
        for differences in run_ranks(2, overlapped, **OVER_NCCL):
            assert max(differences) <= 1e-12

    def test_state_goes_through_a_checkpoint(self, tmp_path: Path) -> None:
        assert run_ranks(2, saved, str(tmp_path), **OVER_NCCL) == [True, True]


def hugging_face(dtype: torch.dtype) -> Any:
    sys.path.append(str(Path(__file__).parent.parent / "hf"))
    from tiny_models import build

    import moeclipse.hf

    moeclipse.hf.register()
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 32, "num_experts": 8}
    return build("qwen3_moe", **sizes, head_dim=16).to("cuda", dtype)


def outcome(model: Any, how: str, compiled: bool = False) -> dict[str, torch.Tensor]:
    model.set_experts_implementation(how)
    model.zero_grad()
    ids = torch.randint(48, (4, 8), generator=torch.Generator().manual_seed(0)).to("cuda")
    call = torch.compile(model) if compiled else model
    logits = call(input_ids=ids, use_cache=False).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
    return {name: p.grad.float() for name, p in model.named_parameters()} | {
        "logits": logits.detach().float()
    }


@pytest.mark.parametrize("compiled", [False, True])
def test_kernels_inside_transformers_round_as_its_own_experts_do(compiled: bool) -> None:
    """Rounded once more or less, a value is off by a bf16 step; so is eager, against fp32."""
    import moeclipse.hf

    model = hugging_face(torch.bfloat16)
    expected = outcome(hugging_face(torch.float32), "eager")
    theirs, ours = outcome(model, "eager"), outcome(model, "moeclipse", compiled)
    assert moeclipse.hf.num_experts_layers(model) == 2
    for name, wanted in expected.items():
        bound = 2 * difference(theirs[name], wanted) + 0.02
        assert difference(ours[name], wanted) < bound, name
