"""Bytes in closed form, beside what a layer really keeps and what a run really holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.cost.cluster import ExpertChoice
from moeclipse.cost.sizes import ModelSizes, TrainedLayer
from moeclipse.cost.step_bytes import (
    APART,
    AT_ONCE,
    COMMUNICATORS,
    CONTEXT,
    Again,
    Sharing,
    StateBytes,
    beside,
    kept_by,
)
from moeclipse.model.config import ModelConfig
from moeclipse.model.lora_config import LoraConfig, is_adapter
from moeclipse.model.transformer import Transformer
from moeclipse.moe.config import GateConfig, MoEConfig
from moeclipse.train.config import TrainConfig
from moeclipse.train.optim.buckets import TURNS
from moeclipse.train.predict.model_sizes import sizes_of, sizes_of_run
from moeclipse.train.step.recompute import kept_by as really_kept

GQA = ModelConfig(num_layers=1, vocab_size=64, d_model=64, d_ff=96, num_heads=4, num_kv_heads=2, head_dim=16)
MLA = ModelConfig(
    num_layers=1,
    vocab_size=64,
    d_model=64,
    d_ff=96,
    attention="mla",
    num_heads=4,
    q_lora_rank=24,
    kv_lora_rank=20,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=24,
)
MODELS = {
    "grouped": (GQA, MoEConfig(num_experts=8, d_ff=48), GateConfig(top_k=2)),
    "normed heads": (replace(GQA, qk_norm="head"), MoEConfig(num_experts=8, d_ff=48), GateConfig(top_k=2)),
    "many choices": (GQA, MoEConfig(num_experts=16, d_ff=24), GateConfig(top_k=4)),
    "latent": (MLA, MoEConfig(num_experts=8, d_ff=40, num_shared_experts=1), GateConfig(top_k=3)),
    "dense": (replace(GQA, num_dense_layers=1), MoEConfig(), GateConfig()),
    "dense latent": (replace(MLA, num_dense_layers=1), MoEConfig(), GateConfig()),
}


@pytest.mark.parametrize("again", ["off", "attn", "mlp", "full"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 0.03), (torch.bfloat16, 0.25)])
def test_a_layer_keeps_what_is_counted(name: str, again: Again, dtype: torch.dtype, close: float) -> None:
    config, moe, gate = MODELS[name]
    mesh = Mesh.single(torch.device("cpu"))
    model = Transformer(config, replace(moe, schedule="blocking"), gate, mesh=mesh, dtype=dtype)
    real = really_kept(model, mesh, 64, again) / 64
    sizes = sizes_of(config, moe, gate)
    counted = kept_by(sizes, sizes.moe_layers[0], dtype.itemsize).under(again)
    assert counted == pytest.approx(real, rel=close)


SMALL = ModelSizes(
    vocab=1000,
    d_model=64,
    num_heads=4,
    kv_heads=2,
    d_qk=16,
    d_v=16,
    moe_layers=(False, True, True),
    dense_width=96,
    expert_width=48,
    experts=ExpertChoice(num_experts=8, top_k=2),
)


def test_parameters_held_and_owned() -> None:
    alone = Sharing().held(SMALL, range(3), (True, True))
    assert alone.experts + alone.matrices + alone.rest == pytest.approx(SMALL.parameters - 64)
    assert (alone.trained, alone.owned) == (pytest.approx(SMALL.parameters - 64),) * 2
    held = Sharing(dp=2, ep=4, tp=1).held(SMALL, range(1, 3), (False, False))
    experts = 8 * SMALL.expert_parameters
    assert held.trained == pytest.approx(2 * (SMALL.dense_parameters(1) + experts / 4))
    assert held.owned == pytest.approx(2 * (SMALL.dense_parameters(1) + experts) / 8)
    assert StateBytes().of(SMALL, held) == pytest.approx(6 * held.trained + 12 * held.owned)


def test_rows_arrive_where_ranks_share_experts() -> None:
    alone, apart = Sharing(), Sharing(ep=4)
    more = apart.layer(SMALL, True, 100, 2, "off") - alone.layer(SMALL, True, 100, 2, "off")
    visited, kept = SMALL.experts.visited(4), kept_by(SMALL, True, 2)
    assert more == pytest.approx(100 * (2 * 64 * visited + 0.1 * kept.mlp))
    assert apart.layer(SMALL, True, 100, 2, "full") == 100 * 2 * 64
    assert apart.layer(SMALL, False, 100, 2, "off") == alone.layer(SMALL, False, 100, 2, "off")
    half = Sharing(tp=2).layer(SMALL, False, 100, 2, "off")
    assert half == pytest.approx(alone.layer(SMALL, False, 100, 2, "off") / 2)


def test_beside_is_a_layer_logits_and_communicators() -> None:
    layer = Sharing().layer(SMALL, True, 100, 2, "off")
    assert beside(SMALL, Sharing(), 100, 2, program=False, head=False) == 2 * layer + CONTEXT
    for several in (Sharing(dp=2), Sharing(pp=2)):
        more = beside(SMALL, several, 100, 2, program=True, head=True)
        assert more == 5.5 * layer + CONTEXT + COMMUNICATORS + 2 * 100 * 1000 * 2
    assert 0 < APART < 1


@pytest.mark.parametrize("again", ["off", "attn", "mlp", "moe", "full"])
@pytest.mark.parametrize("moe", [True, False])
@pytest.mark.parametrize("ep", [1, 4])
def test_parts_add_up_to_the_layer_whatever_is_recomputed(again: Again, moe: bool, ep: int) -> None:
    model, sharing = replace(SMALL, shared_width=24), Sharing(ep=ep)
    parts = sharing.parts(model, moe, 100, 2, again)
    forgotten = {
        "off": 0.0,
        "attn": parts.attn,
        "mlp": parts.shared + parts.mlp,
        "moe": parts.shared + parts.mlp,
        "full": parts.attn + parts.shared + parts.mlp,
    }[again]
    assert sum(parts) - forgotten == pytest.approx(sharing.layer(model, moe, 100, 2, again))


TARGETS = {
    "all": LoraConfig(rank=4),
    "attention": LoraConfig(rank=4, targets=("q", "k", "v", "o")),
    "queries": LoraConfig(rank=4, targets=("q", "v")),
    "experts": LoraConfig(rank=4, targets=("experts",)),
}


@pytest.mark.parametrize("again", ["off", "attn", "mlp", "full"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("targets", TARGETS)
def test_a_layer_with_adapters_keeps_what_is_counted(name: str, again: Again, targets: str) -> None:
    config, moe, gate = MODELS[name]
    lora, mesh = TARGETS[targets], Mesh.single(torch.device("cpu"))
    model = Transformer(config, replace(moe, schedule="blocking"), gate, mesh=mesh, lora=lora)
    for parameter, tensor in model.named_parameters():
        tensor.requires_grad_(is_adapter(parameter))
    real = really_kept(model, mesh, 64, again) / 64
    sizes = sizes_of_run(replace(TrainConfig(), model=config, moe=moe, gate=gate, lora=lora))
    counted = kept_by(sizes, sizes.moe_layers[0], 4, sizes.training(0)).under(again)
    assert counted == pytest.approx(real, rel=0.04)


def test_what_is_frozen_has_weights_alone() -> None:
    part = TrainedLayer(
        rank=4, expert_adapters=((96, 64), (64, 48)), expert_parameters=4 * (96 + 64 + 64 + 48)
    )
    model = replace(SMALL, trained=(TrainedLayer(), part, part), trained_tables=(False, False))
    held = Sharing().held(model, range(3), (True, True))
    adapters = 2 * 8 * 4 * (96 + 64 + 64 + 48)
    assert (held.trained, held.owned) == (adapters, adapters)
    whole = model.parameters - 64 + adapters
    assert StateBytes().of(model, held) == pytest.approx(2 * whole + 16 * adapters)
    packed = replace(model, expert_bits=4.0)
    saved = 1.5 * 2 * 8 * SMALL.expert_parameters
    assert StateBytes().of(packed, held) == pytest.approx(2 * whole + 16 * adapters - saved)
    more = beside(packed, Sharing(), 100, 2, program=False, head=False)
    more -= beside(model, Sharing(), 100, 2, program=False, head=False)
    assert more == 2 * 8 * 64 * 96, "one buffer for the larger stack of decoded experts"


def test_layers_one_by_one_have_the_gradients_of_two() -> None:
    held = Sharing().held(SMALL, range(SMALL.num_layers), (True, True))
    few = Sharing(by_layer=True).held(SMALL, range(SMALL.num_layers), (True, True))
    assert held.summed == held.trained
    assert AT_ONCE == TURNS, "of buffers in turns"
    ends = 2 * SMALL.table_parameters
    assert few.summed == pytest.approx(ends + AT_ONCE / SMALL.num_layers * (held.trained - ends))
    assert few[:-1] == held[:-1]
    assert StateBytes().of(SMALL, held) - StateBytes().of(SMALL, few) == pytest.approx(
        4 * (held.summed - few.summed)
    )
