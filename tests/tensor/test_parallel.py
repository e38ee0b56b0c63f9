"""Ways of holding tokens: each move there and back by its definition, on even and uneven parts."""

from __future__ import annotations

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.reduce.begun import BegunReduction
from moeclipse.core.errors import ConfigError
from moeclipse.tensor.parallel import GatherBuffer, TensorParallel, move
from moeclipse.testing.run_ranks import run_ranks

D = 12


def moved(mesh: Mesh) -> None:
    """Each way there and back, against its definition, with uneven parts."""
    tp, bounds = TensorParallel.of(mesh), [0, 3, 5]
    x = torch.randn(5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine = slice(bounds[tp.index], bounds[tp.index + 1])
    weight = torch.arange(1.0, 6.0, dtype=torch.float64)[:, None]
    part = x[mine].clone().requires_grad_()
    whole = move(part, tp, "gather", "slice", "there", bounds=bounds)
    (whole * weight).sum().backward()
    assert torch.equal(whole, x)
    assert torch.equal(part.grad, weight[mine].expand(-1, D))
    full = x.clone().requires_grad_()
    taken = move(full, tp, "slice", "gather", "back", bounds=bounds)
    (taken * weight[mine]).sum().backward()
    assert torch.equal(taken, x[mine])
    assert torch.equal(full.grad, weight.expand(-1, D))
    scaled = (x * (tp.index + 1)).requires_grad_()
    summed = move(scaled, tp, "sum_scatter", "gather", "sum", bounds=bounds)
    (summed * weight[mine]).sum().backward()
    assert torch.equal(summed, (x + 2 * x)[mine])
    assert torch.equal(scaled.grad, weight.expand(-1, D))


def test_ways_of_holding_tokens() -> None:
    run_ranks(2, moved, tp=2)


def whole(mesh: Mesh) -> None:
    """Replicated tokens around a region of shares, and features that are cut."""
    tp, x = TensorParallel.of(mesh), torch.arange(12.0, dtype=torch.float64).view(3, 4)
    scale = 1 + tp.index
    into = x.clone().requires_grad_()
    entered = move(into, tp, "same", "sum", "enter")
    assert torch.equal(entered, x)
    (entered * scale).sum().backward()
    assert torch.equal(into.grad, torch.full_like(x, 3)), "each rank's share of the gradient"
    out = (x * scale).requires_grad_()
    left = move(out, tp, "sum", "same", "leave")
    left.sum().backward()
    assert torch.equal(left, 3 * x)
    assert torch.equal(out.grad, torch.ones_like(x))
    mine = x[:, 2 * tp.index : 2 * tp.index + 2].clone().requires_grad_()
    joined = move(mine, tp, "gather_columns", "slice_columns", "features")
    (joined * x).sum().backward()
    assert torch.equal(joined, x)
    assert torch.equal(mine.grad, mine.detach())
    parts = move(x.clone().requires_grad_(), tp, "slice_columns", "gather_columns", "features")
    assert torch.equal(parts, mine)


def test_replicated_tokens_and_features() -> None:
    run_ranks(2, whole, tp=2)


def gathered(mesh: Mesh) -> None:
    tp = TensorParallel.of(mesh, sequence_parallel=True)
    rows = torch.full((2, 3), float(tp.index))
    fresh, shared = tp.gather_rows(rows, "fresh").get(), tp.gather_rows(rows, "shared", reuse=True).get()
    assert torch.equal(fresh, torch.arange(2.0).repeat_interleave(2)[:, None].expand(4, 3))
    assert torch.equal(shared, fresh)
    again = tp.gather_rows(rows + 5, "shared", reuse=True).get()
    assert again.data_ptr() == shared.data_ptr() != fresh.data_ptr(), "valid until the next gather"
    assert tp.sum_scatter_rows(fresh, "back").get().tolist() == [[2.0 * tp.index] * 3] * 2
    with pytest.raises(ConfigError, match=r"3 rows cannot be shared out evenly over tp \(2\)"):
        tp.sum_scatter_rows(fresh[:3], "back")


def test_gathers_into_memory_that_is_used_again() -> None:
    run_ranks(2, gathered, tp=2)


def test_a_buffer_grows_to_the_largest() -> None:
    buffer, like = GatherBuffer(), torch.empty(0)
    small = buffer.take((2, 3), like)
    assert buffer.take((3, 2), like).data_ptr() == small.data_ptr()
    large = buffer.take((40, 3), like)
    assert large.shape == (40, 3)
    assert buffer.take((2, 3), like).data_ptr() == large.data_ptr()
    assert buffer.take((2, 3), like.double()).dtype == torch.float64


def alone(mesh: Mesh) -> None:
    tp = TensorParallel.of(mesh, sequence_parallel=True, fuse=False)
    one, x = tp.alone, torch.ones(3, 2)
    assert (one.size, one.index, one.parts_tokens, one.group.ranks) == (1, 0, False, (mesh.rank,))
    assert one.wgrads is tp.wgrads, "it defers with the others"
    assert one.gather_rows(x, "nobody").get() is x
    assert one.sum_scatter_rows(x, "nobody").get() is x
    assert move(x, one, "sum", "same", "nobody") is x


def test_a_rank_alone_sends_nothing() -> None:
    run_ranks(2, alone, tp=2)


def test_what_follows_from_options() -> None:
    of = TensorParallel.of
    mesh = Mesh.single()
    assert of(mesh).hides_all_reduce
    assert not of(mesh, overlap=False).hides_all_reduce, "left out: as overlap"
    assert of(mesh, overlap=False, async_all_reduce=True).hides_all_reduce
    assert not of(mesh, sequence_parallel=True).parts_tokens, "one rank has all tokens"
    assert [of(mesh, sequence_parallel=on).whole_share for on in (False, True)] == ["same", "sum"]
    with pytest.raises(ConfigError, match="with sequence parallelism input gradients are reduce-scattered"):
        of(mesh, sequence_parallel=True, async_all_reduce=True)


def under_way(mesh: Mesh) -> bool:
    """A sum that was launched is open until somebody asks for it."""
    tp = TensorParallel.of(mesh, peer="on")
    completed, complete = [], BegunReduction.get

    def noted(begun: BegunReduction) -> torch.Tensor:
        completed.append(begun)
        return complete(begun)

    BegunReduction.get = noted  # type: ignore[method-assign]
    launched = tp.sum_rows(torch.ones(4, 3), "test")
    assert not completed
    right = bool((launched.get() == 2).all())
    return right and len(completed) == 1


@pytest.mark.peer_memory
def test_sums_are_left_open_while_products_run() -> None:
    assert run_ranks(2, under_way, tp=2) == [True, True]
