"""Segments: backward in two parts, forward twice with the same random numbers, and what they let go."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from moeclipse.comm.mesh import Mesh
from moeclipse.pipeline.backward import Deferral, Segment, leaf_of, random_state, set_random_state
from moeclipse.tensor.weight_grad import WeightGrads
from moeclipse.testing.run_ranks import run_alone


class Product(torch.autograd.Function):
    """x w, whose weight gradient goes where `wgrads` says."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.nn.Parameter, wgrads: WeightGrads) -> torch.Tensor:
        ctx.x, ctx.w, ctx.wgrads = x, w, wgrads
        return x @ w

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> Any:
        (d_w,) = ctx.wgrads.submit([ctx.w], lambda: [ctx.x.t() @ d_y])
        return d_y @ ctx.w.t(), d_w, None


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.arange(6.0).view(3, 2))


def two_parts(mesh: Mesh) -> None:
    w, wgrads, x = weight(), WeightGrads(), torch.ones(4, 3)
    deferral = Deferral(wgrads=wgrads, microbatch=2, stage=1, part="ATTN")
    segment = Segment(lambda h: (Product.apply(h, w, wgrads),), [x], deferral)
    assert not segment.outputs[0].requires_grad, "whoever reads it begins a graph of its own"
    (d_x,) = segment.backward([torch.ones(4, 2)])
    assert d_x is not None
    assert torch.equal(d_x, torch.ones(4, 2) @ w.detach().t())
    assert w.grad is None, "W has not run"
    segment.weights()
    assert torch.equal(w.grad, x.t() @ torch.ones(4, 2))
    wgrads.check_empty()
    segment.weights()  # nothing is queued any more: nothing happens
    other = weight()
    at_once = Segment(lambda h: (Product.apply(h, other, wgrads),), [x])
    at_once.backward([torch.ones(4, 2)])
    assert torch.equal(other.grad, w.grad), "without a deferral, in backward"


def test_backward_in_two_parts() -> None:
    run_alone(two_parts)


def run_again(mesh: Mesh) -> None:
    """Dropout: both forwards must draw alike, and what is drawn later must not notice."""
    x, runs = torch.ones(50, 3), []

    def drop(h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        runs.append(torch.is_grad_enabled())
        return (torch.dropout(h * 2, 0.5, train=True),)

    torch.manual_seed(0)
    kept = Segment(drop, [x])
    first, later = torch.rand(3), torch.rand(3)
    torch.manual_seed(0)
    segment = Segment(drop, [x], again=True)
    assert torch.equal(segment.outputs[0], kept.outputs[0])
    segment.outputs = ()
    assert torch.equal(torch.rand(3), first)
    segment.recompute()
    assert torch.equal(torch.rand(3), later)
    assert runs == [True, False, True]
    (expected,), (found,) = kept.backward([torch.ones(50, 3)]), segment.backward([torch.ones(50, 3)])
    assert expected is not None
    assert found is not None
    assert torch.equal(found, expected)
    assert 0 < int((found == 0).sum()) < found.numel()


def test_a_segment_can_run_forward_again() -> None:
    run_alone(run_again)


def lets_go(mesh: Mesh) -> None:
    x = torch.ones(3)
    segment = Segment(lambda h: (h.exp(),), [x])
    refs = [StorageWeakRef(t.untyped_storage()) for t in (x, segment.outputs[0])]
    del x
    assert not any(ref.expired() for ref in refs)
    (d_x,) = segment.backward([torch.ones(3)])
    assert all(ref.expired() for ref in refs)
    assert d_x is not None
    assert torch.allclose(d_x, torch.ones(3).exp())


def test_a_segment_lets_go_in_backward() -> None:
    """Its weight gradients may be far away: until then it holds what they need, and nothing else."""
    run_alone(lets_go)


def other_gradients(mesh: Mesh) -> None:
    """Losses that hang on the same graph, outputs that nobody uses, inputs that are no floats."""
    x, index, inside = torch.ones(3), torch.tensor([2, 0]), []

    def choose(h: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inside.append((h * h).sum())
        return h[at] * 3, h * 5

    segment = Segment(choose, [x, index])
    d_x, d_index = segment.backward([torch.ones(2), None], more=[(inside[0], torch.tensor(0.5))])
    assert d_index is None
    assert d_x is not None
    assert d_x.tolist() == [3 + 1, 1, 3 + 1], "3 where it was chosen, and half of 2 x"
    unused = Segment(choose, [x, index])
    assert unused.backward([None, None]) == [None, None]


def test_gradients_of_several_things() -> None:
    run_alone(other_gradients)


def test_leaves_are_detached_and_floats_alone_want_gradients() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    leaf = leaf_of(x)
    assert leaf.is_leaf
    assert leaf.requires_grad
    assert leaf.data_ptr() == x.data_ptr()
    assert not leaf_of(torch.ones(2, dtype=torch.int64)).requires_grad


def test_random_numbers_can_be_drawn_again() -> None:
    state = random_state()
    first = torch.rand(4)
    set_random_state(state)
    assert torch.equal(torch.rand(4), first)
