"""The node: however rows are cut and ordered, gradients are those of one process, and little is kept."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_parity import GATES, compare, gradients, inputs, make, parity, run
from torch.multiprocessing.reductions import StorageWeakRef

from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.moe.exchange.dispatch_combine import ForwardRun
from moeclipse.moe.tokens import Tokens
from moeclipse.tensor.weight_grad import attach
from moeclipse.testing.run_ranks import run_alone, run_ranks

SIZES = [5, 0, 9, 4, 3, 7, 1, 6]


def smart(**more: Any) -> dict[str, Any]:
    return {"exchange": {"schedule": "smart", **more}}


CASES = [(ranks, size) for ranks in (1, 2, 3, 4, 6, 8) for size in range(1, ranks + 1)]


@pytest.mark.parametrize(("ranks", "size"), CASES)
def test_every_group_size_ragged_too(ranks: int, size: int) -> None:
    chunks = 1 + (ranks + size) % 3
    more = smart(group_size=size, chunks=chunks)
    parity(GateConfig(top_k=2), 1, ranks, num_experts=ranks * 2, sizes=SIZES[:ranks], more=more)


@pytest.mark.parametrize("name", [name for name in GATES if not name.endswith("pad")])
def test_every_gate(name: str) -> None:
    parity(GATES[name], 1, 4, shared=1, more=smart(group_size=1, chunks=2))


@pytest.mark.parametrize("per_rank", [1, 2, 3])
def test_experts_per_rank(per_rank: int) -> None:
    more = smart(chunks=3)
    parity(GateConfig(top_k=2), 1, 4, num_experts=4 * per_rank, more=more)
    parity(GateConfig(top_k=2), 2, 2, num_experts=2 * per_rank, more=more)


def run_far(mesh: Mesh, *args: Any) -> dict:
    mesh.hosts = tuple(range(mesh.num_ranks))  # rows then go by pairs
    found = run(mesh, *args)
    assert any(key.startswith("gloo pairs") for key in mesh._kept), "nothing went by pairs"
    return found


@pytest.mark.parametrize("schedule", ["smart", "blocking"])
def test_every_rank_on_a_host_of_its_own(schedule: str) -> None:
    more = {"exchange": {"schedule": schedule, **({"chunks": 2} if schedule == "smart" else {})}}
    gate, sizes = GateConfig(top_k=2), [5, 0, 9, 4]
    reference = run_alone(run, gate, 8, 0, [sum(sizes)])
    compare(run_ranks(4, run_far, gate, 8, 0, sizes, more), reference, 1, 4)


def with_weights_last(mesh: Mesh, late: bool, main_grads: bool) -> dict[str, torch.Tensor]:
    """Gradients with the weight gradients of own rows placed early, or all of them last."""
    exchange = {"schedule": "smart", "group_size": 1, "chunks": 2}
    moe = make(GateConfig(top_k=2), 6, 0, mesh, exchange=exchange)
    if main_grads:
        for parameter in moe.experts.parameters():
            attach(parameter, torch.full_like(parameter, 0.25), lambda: None)
    if late:
        both = moe.schedule.programs
        moe.schedule.programs = lambda shape: replace(both(shape), backward=both(shape).pieces)
    found = gradients(moe, mesh, [7, 9, 5])
    places = {name: getattr(p, "main_grad", None) for name, p in moe.experts.named_parameters()}
    return {**found, **{f"main {name}": grad for name, grad in places.items() if grad is not None}}


@pytest.mark.parametrize("main_grads", [False, True])
def test_early_weight_gradients_change_no_bit(main_grads: bool) -> None:
    late, early = (run_ranks(3, with_weights_last, when, main_grads) for when in (True, False))
    for one, other in zip(late, early, strict=True):
        assert one.keys() == other.keys()
        assert ("main up" in one) == main_grads
        assert ("experts.up" in one) != main_grads
        for name, value in one.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[name])), name


def test_more_chunks_than_rows_and_no_rows_at_all() -> None:
    parity(GateConfig(top_k=3), 1, 3, sizes=[1, 0, 2], more=smart(chunks=5))
    parity(GateConfig(top_k=1), 1, 4, sizes=[0, 0, 1, 0], more=smart(chunks=2, group_size=3))


@settings(max_examples=settings.default.max_examples // 10, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    size=st.integers(1, 4),
    chunks=st.integers(1, 4),
    num_experts=st.integers(4, 9),
    top_k=st.integers(1, 4),
)
def test_random_exchanges(sizes: list[int], size: int, chunks: int, num_experts: int, top_k: int) -> None:
    more = smart(group_size=size, chunks=chunks)
    parity(GateConfig(top_k=top_k), 1, 4, num_experts=num_experts, sizes=sizes, more=more)


def kept(mesh: Mesh) -> list[list[str]]:
    """Of the rows that arrived and of those that the experts read: after forward, and after backward."""
    gc.disable()
    refs: list[tuple[str, StorageWeakRef]] = []

    def note(name: str, tensor: Any) -> None:
        refs.append((name, StorageWeakRef(tensor.untyped_storage())))

    def left() -> list[str]:
        return sorted({name for name, ref in refs if not ref.expired()})

    moe = make(GateConfig(top_k=2), 8, 0, mesh, exchange={"schedule": "smart", "group_size": 1, "chunks": 2})
    start, experts = ForwardRun.start, moe.experts.forward

    def noted_start(self: ForwardRun) -> None:
        start(self)
        note("arrived", self.arrived[0])

    def noted_experts(x: Any, *args: Any) -> Any:
        note("read by experts", x)
        return experts(x, *args)

    ForwardRun.start, moe.experts.forward = noted_start, noted_experts  # type: ignore[method-assign]
    x = inputs(20)[0][10 * mesh.rank : 10 * mesh.rank + 10].requires_grad_()
    y, _ = moe.run(x, Tokens(mesh=mesh, first=10 * mesh.rank, total=20))
    after_forward = left()
    y.sum().backward()
    return [after_forward, left()]  # y is still here, and with it the node


def test_rows_go_when_they_have_been_computed_and_all_goes_with_backward() -> None:
    assert run_ranks(2, kept) == [[["read by experts"], []]] * 2
