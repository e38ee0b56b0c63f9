"""One layer of the decoder from its definition, and how its tokens reach experts under tensor parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_model import GATE, MLA, MODEL, MOE, SETTINGS, positions

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.model.attention import GroupedQueryAttention
from moeclipse.model.config import ModelConfig
from moeclipse.model.latent_attention import LatentAttention
from moeclipse.model.layer import TransformerLayer
from moeclipse.model.rotary import Positions
from moeclipse.moe.tokens import Tokens
from moeclipse.tensor.cut import share_of
from moeclipse.tensor.parallel import TensorParallel
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks

SAMPLES, POSITIONS, D = 2, 6, MODEL.d_model
TOKENS = SAMPLES * POSITIONS


def make(
    mesh: Mesh, config: ModelConfig, index: int, expert_tp: str = "folded", **tp: Any
) -> TransformerLayer:
    settings = replace(SETTINGS, layer=index, tp=TensorParallel.of(mesh, **tp))
    moe = replace(MOE, expert_tp=expert_tp)
    return TransformerLayer(index, config, moe, GATE, mesh, settings)


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    x, d_y = torch.randn(2, TOKENS, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, d_y


def table_of(config: ModelConfig) -> Positions:
    return positions(config, POSITIONS)


@pytest.mark.parametrize("config", [MODEL, replace(MLA, num_dense_layers=2)], ids=["experts", "dense"])
def test_a_layer_is_what_it_is_made_of(config: ModelConfig) -> None:
    mesh = Mesh.single()
    layer, (h, _), table = make(mesh, config, 1), rows(), table_of(config)
    tokens = Tokens(mesh=mesh, first=0, total=TOKENS)
    kind = GroupedQueryAttention if config is MODEL else LatentAttention
    assert isinstance(layer.attention, kind)
    y, report = layer(h, table, tokens)
    between = h + layer.attention(layer.attention_norm(h), table)
    x = layer.mlp_norm(between)
    if config is MODEL:
        assert layer.dense is None
        block, expected = layer.moe.run(x, tokens)
        assert torch.equal(report.load_E, expected.load_E)
        assert layer.moe.layer == 1
    else:
        assert layer.moe is None
        assert report is None
        block = layer.dense(x)
    assert difference(y, between + block) < 1e-14


def cut(mesh: Mesh, expert_tp: str, sequence_parallel: bool) -> dict[str, torch.Tensor]:
    """Output, and gradients as one process would have them, as far as one rank knows."""
    layer = make(mesh, MODEL, 1, expert_tp, sequence_parallel=sequence_parallel)
    (x, d_y), tokens = rows(), Tokens(mesh=mesh, first=0, total=TOKENS, group=mesh.data)
    if sequence_parallel:
        x, d_y = x.chunk(mesh.tp)[mesh.tp_index], d_y.chunk(mesh.tp)[mesh.tp_index]
    x = x.clone().requires_grad_()
    y, report = layer(x, table_of(MODEL), tokens)
    ((y * d_y).sum() + report.aux_loss).backward()
    assert share_of(layer.mlp_norm.weight) == ("sum" if sequence_parallel else "same")
    return {
        "y": y.detach(),
        "dx": x.grad,
        "norm": layer.attention_norm.weight.grad,
        "gate": layer.moe.gate.weight.grad,
        "load": report.load_E,
    }


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "parts"])
@pytest.mark.parametrize("expert_tp", ["folded", "sharded"])
def test_every_way_to_the_experts_gives_the_layer_of_one_process(
    expert_tp: str, sequence_parallel: bool
) -> None:
    expected = run_alone(cut, "folded", False)
    results = run_ranks(2, cut, expert_tp, sequence_parallel, tp=2)
    joined = {name: [result[name] for result in results] for name in expected}
    if sequence_parallel:
        found = {"y": torch.cat(joined["y"]), "dx": torch.cat(joined["dx"]), "norm": sum(joined["norm"])}
    else:
        found = {name: joined[name][0] for name in ("y", "dx", "norm")}
        assert all(torch.equal(joined[name][1], value) for name, value in found.items()), "alike on both"
    found |= {"gate": sum(joined["gate"]), "load": sum(joined["load"])}
    for name, value in found.items():
        assert difference(value, expected[name]) < 1e-12, name


def where(mesh: Mesh, expert_tp: str) -> list[tuple[int, int, int, int]]:
    """(rows, first token, tokens in all, ranks that share them out) that the experts see."""
    found = []
    for sequence_parallel in (False, True):
        layer = make(mesh, MODEL, 0, expert_tp, sequence_parallel=sequence_parallel)
        num_rows = TOKENS // mesh.tp if sequence_parallel else TOKENS
        x = torch.zeros(num_rows, D, dtype=torch.float64)
        tokens = Tokens(mesh=mesh, first=100, total=200, group=mesh.data)
        part, mine = layer.to_experts(x, tokens)
        assert layer.from_experts(part, num_rows).shape == x.shape
        found.append((len(part), mine.first, mine.total, mine.group.size))
    return found


def test_experts_see_each_token_once() -> None:
    folded = run_ranks(2, where, "folded", tp=2)
    assert folded == [[(6, 100, 200, 2)] * 2, [(6, 106, 200, 2)] * 2], "each tp rank has other tokens"
    sharded = run_ranks(2, where, "sharded", tp=2)
    assert sharded == [[(12, 100, 200, 1)] * 2] * 2, "each tp rank has a part of each expert for all of them"


def in_a_loop_of_ones_own(mesh: Mesh) -> list[tuple[int, bool]]:
    """Of each training call with a run's defaults: units of its exchange, whether costs are known."""
    layer, seen = make(mesh, MODEL, 1), []
    assert layer.moe is not None
    assert layer.moe.config.schedule == "auto"
    x, d_y = rows()
    for _ in range(4):
        layer(x, table_of(MODEL), Tokens.of(mesh, TOKENS))[0].backward(d_y)
        seen.append((layer.moe.schedule.cuts.use.num_units, layer.moe.schedule.probe is not None))
    return seen


def test_without_a_run_nothing_is_tried() -> None:
    assert run_ranks(2, in_a_loop_of_ones_own) == [[(1, False)] * 4] * 2


def refusals(mesh: Mesh) -> list[str]:
    told = []
    for name, expert_tp in (("base", "sharded"), ("dense_base", "folded")):
        with pytest.raises(ConfigError) as error:
            make(mesh, replace(MODEL, **{name: "bf16"}), 1, expert_tp)
        told.append(str(error.value))
    make(mesh, replace(MODEL, base="bf16"), 1)
    return told


def test_matrices_in_few_bits_are_not_cut() -> None:
    for first, second in run_ranks(2, refusals, tp=2):
        assert "model.base ('bf16') keeps whole matrices, and tp would cut them" in first
        assert "model.dense_base ('bf16') keeps whole matrices" in second
