"""Work of a step, by hand and against the products that are really computed."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import pytest
import torch
from small_model import GATE, MLA, MODEL, MOE
from torch.utils.flop_counter import FlopCounterMode

from moeclipse.comm.mesh import Mesh
from moeclipse.cost.hardware import DEVICES
from moeclipse.model.config import ModelConfig
from moeclipse.model.flops import LeastWork, device_of, keys_seen
from moeclipse.model.lora_config import NO_LORA, LoraConfig, is_adapter
from moeclipse.model.recompute import Again
from moeclipse.model.transformer import Transformer
from moeclipse.moe.config import GateConfig, MoEConfig
from moeclipse.moe.tokens import Tokens


def test_by_hand() -> None:
    model = ModelConfig(vocab_size=10, num_layers=2, d_model=8, num_heads=2, num_kv_heads=1, head_dim=4)
    work = LeastWork.of(model, MoEConfig(num_experts=4, d_ff=16), GateConfig(top_k=2), tokens=6, seq_len=3)
    attention = 8 * 8 + 2 * 8 * 4 + 8 * 8
    layer = attention + 4 * 8 + 2 * 3 * 8 * 16
    keys = (1 + 2 + 3) / 3
    assert work.flops == 6 * (6 * (2 * layer + 10 * 8) + 6 * 2 * 2 * (4 + 4) * keys)
    everything = 2 * (attention + 4 * 8 + 4 * 3 * 8 * 16 + 2 * 8) + 2 * 10 * 8 + 8
    assert work.update_bytes == 34 * everything


@dataclass(frozen=True, kw_only=True)
class Case:
    model: ModelConfig = MODEL
    moe: MoEConfig = MOE
    gate: GateConfig = GATE
    lora: LoraConfig = NO_LORA
    frozen: tuple[str, ...] = ()
    again: Again = "off"
    without_backward: int = 0
    """Layers."""

    def is_frozen(self, name: str) -> bool:
        held_back = self.lora.rank > 0 and not is_adapter(name)
        return held_back or any(fnmatchcase(name, pattern) for pattern in self.frozen)


QV = LoraConfig(rank=3, targets=("q", "v"))
LOWER = ("embedding", "layers.0.*")
CASES = {
    "full": Case(),
    "latent attention, dense layer, tied": Case(model=MLA),
    "noisy gate, biases": Case(gate=GateConfig(kind="noisy", top_k=2), moe=replace(MOE, expert_bias=True)),
    "adapters of q and v": Case(lora=QV),
    "adapters of experts": Case(lora=LoraConfig(rank=3, targets=("experts",))),
    "adapters of all": Case(lora=LoraConfig(rank=3)),
    "frozen lower layers": Case(frozen=LOWER, without_backward=1),
    "frozen lower layers, everything again": Case(frozen=LOWER, without_backward=1, again="full"),
    "a frozen embedding": Case(frozen=LOWER[:1]),
    "frozen experts": Case(frozen=("*.moe.experts.*",)),
    "everything again": Case(again="full"),
    "adapters, everything again": Case(lora=QV, again="full"),
}
LENGTH, SAMPLES = 8, 2
ADDED = {torch.ops.aten.addmm_: lambda _, a_shape, b_shape, **__: 2 * math.prod(a_shape) * b_shape[1]}
"""Products that are added to what is there: torch does not count them by itself."""


def products(case: Case) -> float:
    """Flops of products with weights, in forward and backward of a step."""
    mesh = Mesh.single()
    parts = (case.model, case.moe, case.gate)
    model = Transformer(*parts, mesh=mesh, seed=3, dtype=torch.float64, lora=case.lora)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not case.is_frozen(name))
    for layer in model.all_layers:
        layer.again = case.again
    ids = torch.arange(SAMPLES * (LENGTH + 1)).view(SAMPLES, -1) % case.model.vocab_size
    with FlopCounterMode(display=False, custom_mapping=ADDED) as counter:
        out = model(ids[:, :-1], ids[:, 1:], Tokens(mesh=mesh, first=0, total=SAMPLES * LENGTH))
        (out.loss_sum + out.aux_loss).backward()
    counts = counter.get_flop_counts()["Global"]
    return sum(counts[op] for op in (torch.ops.aten.mm, torch.ops.aten.addmm_) if op in counts)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_counted_is_what_is_computed(case: Case) -> None:
    """Products with weights, one by one. Attention is left out: torch counts keys that no token sees."""
    given = {"tokens": SAMPLES * LENGTH, "seq_len": LENGTH}
    work = LeastWork.of(case.model, case.moe, case.gate, **given, lora=case.lora, is_frozen=case.is_frozen)
    config = case.model
    heads = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    width = config.num_heads * (heads if config.attention == "mla" else 2 * config.head_dim)
    backwards = config.num_layers - case.without_backward
    attention = SAMPLES * LENGTH * (2 * config.num_layers + 4 * backwards) * width * (LENGTH + 1) / 2
    assert products(replace(case, again="off")) == work.flops - attention
    if case.again != "off":
        with warnings.catch_warnings(action="error"):
            assert products(case) > work.flops - attention


@pytest.mark.parametrize(
    ("seq_len", "window", "memory"), [(7, 0, 0), (7, 3, 0), (7, 9, 0), (7, 0, 4), (1, 1, 0)]
)
def test_a_token_sees_itself_and_what_stands_before_it(seq_len: int, window: int, memory: int) -> None:
    seen = [min(place + 1, window or seq_len) + memory for place in range(seq_len)]
    assert keys_seen(seq_len, window, memory) == pytest.approx(sum(seen) / seq_len)


def test_what_is_frozen_is_not_updated() -> None:
    given = {"tokens": 6, "seq_len": 3}
    full = LeastWork.of(MODEL, MOE, GATE, **given)
    adapted = LeastWork.of(MODEL, MOE, GATE, **given, lora=QV, is_frozen=Case(lora=QV).is_frozen)
    adapters = 2 * 3 * ((16 + 24) + (16 + 12))
    assert adapted.update_bytes == 34 * adapters
    assert adapted.flops < 0.75 * full.flops
    assert LeastWork.of(MODEL, MOE, GATE, **given, bytes_each=17).update_bytes == full.update_bytes / 2


def test_a_tied_embedding_is_a_product_too() -> None:
    apart, tied = (
        LeastWork.of(ModelConfig(tie_embeddings=tie), MoEConfig(), GateConfig(), tokens=1, seq_len=1)
        for tie in (False, True)
    )
    assert apart.flops == tied.flops


def test_speed_is_of_all_ranks() -> None:
    work = LeastWork(flops=989e12 * 0.78, update_bytes=4.8e12)
    assert work.limit_s(DEVICES["h200"], 1) == pytest.approx(2.0)
    found = work.speed(2.0, DEVICES["h200"], 2)
    assert found == pytest.approx({"mfu": 0.78 / 4, "of_limit": 0.5})


@pytest.mark.parametrize(("name", "known"), [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100")])
def test_devices_by_their_names(name: str, known: str) -> None:
    assert device_of(name) is DEVICES[known]
    assert device_of("NVIDIA T4") is None
