"""A layer in pieces that a pipeline places: the same bits as in one go, however microbatches interleave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_parity import inputs, make
from slow_wire import on_a_slow_wire

from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.moe.exchange.dispatch_combine import DispatchCombine, LayerCall
from moeclipse.moe.exchange.pipeline_pieces import ExpertPass
from moeclipse.moe.layer import MoE
from moeclipse.moe.tokens import Structure, Tokens
from moeclipse.testing.run_ranks import run_ranks

SIZES = [7, 0, 9]
EXCHANGES: dict[str, dict[str, Any]] = {
    "blocking": {},
    "smart": {"schedule": "smart", "group_size": 1, "chunks": 2},
    "shadows": {"schedule": "smart", "group_size": 1, "chunks": 2, "shadow": (0, 3)},
}
RECOMPUTE = {"none": (False, False), "experts": (True, True), "experts and dispatch": (True, False)}
"""Whether experts run again before backward, and whether their rows are kept for that."""
Results = tuple[list[torch.Tensor], list[torch.Tensor]]


def microbatches(moe: MoE, mesh: Mesh) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, LayerCall]]:
    """(x, d_y, scores, what a call needs) of two of them."""
    found = []
    for number in range(2):
        first, total = sum(SIZES[: mesh.rank]), sum(SIZES)
        x, d_y = (both[first : first + SIZES[mesh.rank]].roll(number, 1) for both in inputs(total))
        tokens = Tokens(mesh=mesh, first=first, total=total, microbatch=number)
        routing = moe.gate(x, tokens)
        call = moe.plan(routing, Structure(), (x,), tokens)
        found.append((x, d_y, routing.scores_TK.detach(), call))
    return found


def in_one_go(moe: MoE, mesh: Mesh) -> Results:
    found = []
    for x, d_y, scores, call in microbatches(moe, mesh):
        leaves = [x.requires_grad_(), scores.requires_grad_()]
        y = DispatchCombine.apply(scores, call, x, *moe.experts.weights)
        y.backward(d_y)
        found += [y.detach(), *(leaf.grad for leaf in leaves)]
    return found, [weight.grad for weight in moe.experts.weights]


@torch.no_grad()
def interleaved(moe: MoE, mesh: Mesh, again: bool, keep_rows: bool) -> Results:
    """Each piece of the first microbatch, then the same piece of the second."""
    given = microbatches(moe, mesh)
    passes = [ExpertPass(call, scores, (x,)) for x, _, scores, call in given]
    for waiting in [one.dispatch() for one in passes]:
        waiting.get()
    for one in passes:
        one.compute()
    for waiting in [one.combine() for one in passes]:
        waiting.get()
    outputs = [one.output(again, keep_rows) for one in passes]
    assert [bool(one.state.saved) for one in passes] == [not again] * 2, (
        "what will be computed again is let go"
    )
    assert [bool(one.state.arrived) for one in passes] == [keep_rows] * 2, (
        "what backward needs of rows that arrived, experts have saved"
    )
    if again and not keep_rows:
        for waiting in [one.dispatch_again((x,)) for one, (x, *_) in zip(passes, given, strict=True)]:
            waiting.get()
    if again:
        for one in passes:
            one.compute_again()
    for waiting in [one.combine_back(d_y) for one, (_, d_y, *_) in zip(passes, given, strict=True)]:
        waiting.get()
    for one in passes:
        one.compute_back()
    for one in passes:
        one.dispatch_back()
    for one in passes:
        one.weights()
    found = []
    for y, one in zip(outputs, passes, strict=True):
        (d_x,), d_scores = one.input_grads()
        found += [y, d_x, d_scores]
    return found, [weight.grad for weight in moe.experts.weights]


def same_bits(mesh: Mesh, exchange: dict[str, Any]) -> None:
    expected = in_one_go(make(GateConfig(top_k=2), 7, 0, mesh, exchange=exchange), mesh)
    for name, how in RECOMPUTE.items():
        found = interleaved(make(GateConfig(top_k=2), 7, 0, mesh, exchange=exchange), mesh, *how)
        for ours, reference in zip(found, expected, strict=True):
            for one, other in zip(ours, reference, strict=True):
                assert torch.equal(one, other), name


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_pieces_of_two_microbatches_give_the_bits_of_one_go(exchange: str) -> None:
    run_ranks(3, same_bits, EXCHANGES[exchange])


@torch.no_grad()
def in_pieces(mesh: Mesh, schedule: str) -> list[str]:
    """What a pipeline waits for before the experts may run, and what the experts wait for themselves."""
    moe, events = on_a_slow_wire(mesh, schedule=schedule, group_size=1, chunks=1)
    x = inputs(12)[0][6 * mesh.rank : 6 * mesh.rank + 6]
    tokens = Tokens(mesh=mesh, first=6 * mesh.rank, total=12)
    routing = moe.gate(x, tokens)
    call = moe.plan(routing, Structure(), (x,), tokens)
    routed = ExpertPass(call, routing.scores_TK, (x,))
    routed.dispatch().get()
    events.append(("experts", "", 0.0))
    routed.compute()
    routed.combine().get()
    return [
        what for what, label, _ in events if what == "experts" or ("dispatch S_F" in label and what == "wait")
    ]


def test_a_pipeline_leaves_the_waiting_for_units_to_the_experts() -> None:
    """Else all units would have to be there before the first is computed, and none would hide another."""
    assert run_ranks(2, in_pieces, "smart") == [["experts", "wait"]] * 2
    assert run_ranks(2, in_pieces, "blocking") == [["wait", "experts"]] * 2
