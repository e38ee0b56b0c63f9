"""Layers in parts: whatever runs again, output and every gradient are those of the layer in one piece."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_model import GATE, MODEL, MOE

from moeclipse.comm.mesh import Mesh
from moeclipse.model.config import ModelConfig
from moeclipse.model.passes import LayerParts, MicrobatchLoads, MicrobatchState, layer_shapes
from moeclipse.model.transformer import Transformer
from moeclipse.moe.config import MoEConfig
from moeclipse.moe.experts import two_projections
from moeclipse.moe.tokens import Tokens
from moeclipse.ops import expert_mlp
from moeclipse.pipeline.stage import LayerPass, SplitLayer, Where
from moeclipse.schedule.kinds import KIND_OF, Form, Part
from moeclipse.schedule.shape import RECOMPUTED, LayerShape
from moeclipse.tensor.parallel import TensorParallel
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_ranks

CONFIG = replace(MODEL, num_dense_layers=1)
SAMPLES, POSITIONS, AUX = 2, 4, 0.7
EXCHANGES: dict[str, dict[str, Any]] = {
    "blocking": {},
    "smart": {"schedule": "smart", "group_size": 1, "chunks": 2, "shadow": (1,)},
}


def build(mesh: Mesh, exchange: dict[str, Any], **tp: Any) -> Transformer:
    options = {"mesh": mesh, "seed": 3, "dtype": torch.float64, "tp": TensorParallel.of(mesh, **tp)}
    return Transformer(CONFIG, replace(MOE, **exchange), GATE, **options)


def rows(model: Transformer, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(h, gradient of the output) of this rank."""
    key = torch.Generator().manual_seed(10 * number + model.mesh.data.index)
    both = torch.randn(2, SAMPLES * POSITIONS, CONFIG.d_model, dtype=torch.float64, generator=key)
    if model.tp.parts_tokens:
        both = both.chunk(model.tp.size, dim=1)[model.tp.index]
    return both[0].clone(), both[1].clone()


def state_of(model: Transformer) -> MicrobatchState:
    ids = torch.zeros(SAMPLES, POSITIONS, dtype=torch.int64)
    count = ids.numel()
    mesh = model.mesh
    tokens = Tokens(mesh=mesh, first=count * mesh.data.index, total=count * mesh.data.size)
    return model.microbatch(ids, ids, tokens, MicrobatchLoads(1), AUX)


def gradients(model: Transformer, index: int) -> dict[str, torch.Tensor]:
    parameters = model.layer(index).named_parameters()
    return {name: parameter.grad.clone() for name, parameter in parameters if parameter.grad is not None}


def in_one_piece(model: Transformer, index: int) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (h, d_out), state = rows(model, index), state_of(model)
    y, report = model.layer(index)(h.requires_grad_(), state.positions, state.tokens)
    loss = (y * d_out).sum()
    (loss if report is None else loss + AUX * report.aux_loss).backward()
    found = {"y": y.detach(), "d_h": h.grad} | gradients(model, index)
    return found if report is None else found | {"aux": report.aux_loss.detach(), "load": report.load_E}


def run_parts(one: LayerPass, parts: tuple[Part, ...], form: Form) -> None:
    for part in parts:
        if (part, form) in KIND_OF:
            waiting = one.run(KIND_OF[part, form])
            if waiting is not None:
                waiting.get()


@torch.no_grad()
def in_parts(model: Transformer, index: int, recompute: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    layer, (h, d_out), state = LayerParts(model.layer(index)), rows(model, index), state_of(model)
    assert isinstance(layer, SplitLayer)
    shape = replace(layer.describe(), recompute=recompute)
    where = Where(wgrads=model.tp.wgrads, microbatch=0, stage=0, layer=0, chunk=0)
    one = layer.begin(h, state, where, shape)
    run_parts(one, shape.parts, Form.F)
    y = one.output()
    assert one.output() is y, "asked for as often as you like"
    one.take_gradient(d_out)
    run_parts(one, shape.recomputed, Form.R)
    run_parts(one, shape.parts[::-1], Form.B)
    d_h = one.gradient()
    assert d_h is not None
    assert one.gradient() is None, "asked for once"
    run_parts(one, shape.parts, Form.W)
    model.tp.wgrads.check_empty()
    found = {"y": y, "d_h": d_h} | gradients(model, index)
    for report in state.reports:
        found |= {"aux": report.aux_loss, "load": report.load_E}
    return found


def same(mesh: Mesh, exchange: dict[str, Any], sequence_parallel: bool) -> None:
    model = build(mesh, exchange, sequence_parallel=sequence_parallel)
    for index in range(CONFIG.num_layers):
        expected = in_one_piece(model, index)
        assert ("aux" in expected) == (index > 0)
        for recompute in RECOMPUTED:
            found = in_parts(model, index, recompute)
            assert found.keys() == expected.keys()
            for name, value in found.items():
                assert difference(value, expected[name]) <= 1e-13, (index, recompute, name)


def whole_rows(model: Transformer) -> dict[int, torch.Tensor]:
    """Memory that Python holds for a value of each of a microbatch's tokens, by address."""
    shape = (SAMPLES * POSITIONS, CONFIG.d_model)
    found = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.shape == shape]
    return {each.data_ptr(): each for each in found}


@pytest.mark.parametrize("index", [0, 1], ids=["dense", "experts"])
@torch.no_grad()
def test_a_layer_that_runs_again_keeps_its_input_and_nothing_else(index: int) -> None:
    model = build(Mesh.single("cpu"), {})
    layer, state = LayerParts(model.layer(index)), state_of(model)
    h, d_out = rows(model, index)
    before = {*whole_rows(model)} - {h.data_ptr()}
    shape = replace(layer.describe(), recompute="full")
    where = Where(wgrads=model.tp.wgrads, microbatch=0, stage=0, layer=0, chunk=0)
    one = layer.begin(h, state, where, shape)
    run_parts(one, shape.parts, Form.F)
    y = one.output()
    assert {*whole_rows(model)} - before == {h.data_ptr(), y.data_ptr()}
    one.take_gradient(d_out)
    run_parts(one, shape.recomputed, Form.R)
    run_parts(one, shape.parts[::-1], Form.B)
    run_parts(one, shape.parts, Form.W)
    assert one.gradient() is not None


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_parts_give_what_the_layer_gives(exchange: str) -> None:
    run_ranks(2, same, EXCHANGES[exchange], False)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "parts of tokens"])
def test_parts_under_tensor_parallelism(sequence_parallel: bool) -> None:
    run_ranks(2, same, {}, sequence_parallel, tp=2)


def in_chunks(mesh: Mesh) -> None:
    """Two chunks of a microbatch: what is balanced is all of it; replicas are told the loads of each."""
    model = build(mesh, {})
    (h, _), state = rows(model, 1), state_of(model)
    loads, each, moe = MicrobatchLoads(2), MicrobatchLoads(2, each=True), model.layer(1).moe
    for number in range(2):
        part = replace(state.tokens, first=state.tokens.first + 4 * number)
        routing = moe.gate(h[4 * number : 4 * number + 4], part)
        assert loads.add(moe, routing, part) is None
        assert (moe.layer in loads._loads) == (number == 1)
        alone = each.add(moe, routing, part)
        assert torch.equal(alone.total(), moe.gather_loads([routing], part).total())
    whole = moe.gather_loads([moe.gate(h, state.tokens)], state.tokens).total()
    assert torch.equal(loads.of(moe), whole)
    assert torch.equal(each.of(moe), whole)


def test_loads_of_a_microbatch_are_those_of_all_its_chunks() -> None:
    run_ranks(2, in_chunks)


def test_a_model_as_a_schedule_sees_it() -> None:
    plain, shared = MoEConfig(), MoEConfig(num_shared_experts=1)
    config = ModelConfig(num_layers=3, num_dense_layers=1)
    assert [shape.moe for shape in layer_shapes(config, plain)] == [False, True, True]
    assert [shape.shared for shape in layer_shapes(config, shared)[1:]] == [True, True]
    model = build(Mesh.single(), {})
    described = [LayerParts(model.layer(index)).describe() for index in range(2)]
    assert described == [LayerShape(moe=False, shared=False), LayerShape(moe=True, shared=True)]


def products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The products of experts from here on: routed ones as kernels call them, and shared ones."""
    found: list[str] = []

    def watch(place: Any, name: str, called: str) -> None:
        before = getattr(place, name)

        def seen(*given: Any, **how: Any) -> Any:
            found.append(called)
            return before(*given, **how)

        monkeypatch.setattr(place, name, seen)

    watch(expert_mlp, "up", "up")
    watch(expert_mlp, "down", "down")
    watch(two_projections, "grouped_mm", "shared")
    return found


@pytest.mark.parametrize("way", ["in parts", "by autograd"])
@pytest.mark.parametrize("recompute", ["full", "moe"])
def test_experts_that_run_again_leave_out_the_second_product(
    monkeypatch: pytest.MonkeyPatch, way: str, recompute: Any
) -> None:
    model = build(Mesh.single("cpu"), {})
    layer, found = model.layer(1), products(monkeypatch)
    assert layer.moe is not None
    assert layer.moe.shared is not None
    expected = in_one_piece(model, 1)
    layer.moe.fused = True
    found.clear()
    if way == "in parts":
        values = in_parts(model, 1, recompute)
    else:
        layer.again = recompute
        values = in_one_piece(model, 1)
    assert (found.count("up"), found.count("down"), found.count("shared")) == (2, 1, 3)
    for name, value in values.items():
        assert difference(value, expected[name]) <= 1e-13, name


def test_what_a_norm_reads_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"mesh": Mesh.single("cpu"), "seed": 3, "dtype": torch.float64}
    model = Transformer(replace(CONFIG, norms="both"), MOE, GATE, **options)
    layer, found = model.layer(1), products(monkeypatch)
    expected = in_one_piece(model, 1)
    assert layer.moe is not None
    layer.moe.fused, layer.again = True, "full"
    found.clear()
    values = in_one_piece(model, 1)
    assert (found.count("up"), found.count("down"), found.count("shared")) == (2, 2, 4)
    for name, value in values.items():
        assert difference(value, expected[name]) <= 1e-13, name
