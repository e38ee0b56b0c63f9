"""What the runtime asks of a layer, of one that knows its parts and of one that does not."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from user_model import WIDTH, Block, Rows

from moeclipse.comm.mesh import Mesh
from moeclipse.pipeline.stage import LayerPass, SplitLayer, Where, WholeLayer, begin, describe
from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import KINDS, Part
from moeclipse.schedule.shape import LayerShape
from moeclipse.tensor.weight_grad import WeightGrads
from moeclipse.testing.run_ranks import run_alone


def where(**more: Any) -> Where:
    return Where(wgrads=WeightGrads(), **{"microbatch": 3, "stage": 2, "layer": 1, "chunk": 0, **more})


class Halves:
    """A layer that knows its parts."""

    def describe(self) -> LayerShape:
        return LayerShape(shared=False)

    def begin(self, h: torch.Tensor, microbatch: Any, where: Where, layer: LayerShape) -> LayerPass:
        return ("a pass", h, microbatch, where.chunk, layer)  # type: ignore[return-value]


def test_a_layer_with_parts_is_asked_for_them() -> None:
    assert isinstance(Halves(), SplitLayer)
    assert describe(Halves()) == LayerShape(shared=False)
    h, shape = torch.ones(1), LayerShape(shared=False, recompute="mlp")
    found = begin(Halves(), h, "microbatch", where(chunk=1), shape)
    assert found == ("a pass", h, "microbatch", 1, shape)


def test_a_layer_without_looks_like_a_dense_one() -> None:
    assert not isinstance(nn.Linear(2, 2), SplitLayer)
    assert describe(nn.Linear(2, 2)) == LayerShape(moe=False, shared=False)
    assert isinstance(begin(Block(), torch.ones(1), None, where(), LayerShape(moe=False)), WholeLayer)


def test_weight_products_are_queued_under_the_place_of_their_pass() -> None:
    found = where(chunk=4).deferral("ATTN")
    assert (found.microbatch, found.stage, found.part) == (3, 2, "layer 1 ATTN chunk 4")


def whole(mesh: Mesh, recompute: bool) -> None:
    """All of the layer runs where its attention would; what the schedule says of MLP changes nothing."""
    torch.manual_seed(0)
    block = Block().double().eval()
    rows = Rows(1, torch.randn(4, WIDTH, dtype=torch.float64))
    x = rows.x.clone().requires_grad_()
    expected = block(x, rows)
    expected.sum().backward()
    weights = {name: p.grad.clone() for name, p in block.named_parameters()}  # type: ignore[union-attr]
    block.zero_grad()

    shape = LayerShape(moe=False, shared=False, recompute="full" if recompute else "off")
    one = begin(block, rows.x, rows, where(), shape)
    for kind in (kinds.ATTN_F, kinds.MLP_F):
        assert one.run(kind) is None
    assert torch.equal(one.output(), expected)
    one.take_gradient(torch.ones_like(expected))
    again = (kinds.ATTN_R, kinds.MLP_R) if recompute else ()
    for kind in (*again, kinds.MLP_B, kinds.MLP_W, kinds.ATTN_B, kinds.ATTN_W):
        assert one.run(kind) is None
    d_x = one.gradient()
    assert d_x is not None
    assert torch.equal(d_x, x.grad)  # type: ignore[arg-type]
    assert one.gradient() is None, "it is asked for once"
    assert all(torch.equal(p.grad, weights[name]) for name, p in block.named_parameters())  # type: ignore[arg-type]


def test_a_whole_layer_runs_where_its_attention_would() -> None:
    run_alone(whole, False)
    run_alone(whole, True)


def test_other_parts_of_a_whole_layer_do_nothing() -> None:
    one = WholeLayer(Block(), torch.ones(1, WIDTH), Rows(0, torch.ones(1, WIDTH)), where(), again=False)
    for kind in KINDS.values():
        if kind.part is not Part.ATTN:
            assert one.run(kind) is None
    assert one.gradient() is None
