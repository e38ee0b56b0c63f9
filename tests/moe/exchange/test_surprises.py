"""A call whose own sizes are a surprise is planned anew, with shadows, and stays exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from layer_parity import compare, gradients, make

from moeclipse.balance.placement import Placement
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.moe.exchange import plan
from moeclipse.testing.run_ranks import run_alone, run_ranks
from probed import SLOW_EXPERTS, lend

PROBE = replace(SLOW_EXPERTS, num_ranks=2, loan=8e-3, look=2e-3)


def calls(mesh: Mesh, sizes: list[int], replicas: bool) -> tuple[list[dict], list[Any], list[int]]:
    """Gradients of even calls and of others, what each lent, and how often sizes travelled for it."""
    more: dict[str, Any] = lend("auto", schedule="blocking", chunks=1)
    if replicas and mesh.num_ranks > 1:
        more["placement"] = Placement(((0, 1, 2, 3), (0, 4, 5, 6, 7)))
    moe = make(GateConfig(top_k=1, z_loss=0.1), 8, 0, mesh, **more)
    moe.schedule.probe = PROBE
    found, lent, sent, counted = [], [], [], [0]
    real = plan.exchange_sizes

    def counting(*given: Any) -> Any:
        counted[0] += 1
        return real(*given)

    plan.exchange_sizes = counting
    for call in range(4):
        with torch.no_grad():
            moe.gate.weight.copy_(8.0 * torch.eye(8, moe.gate.weight.shape[1]))
            if call > 1:
                moe.gate.weight[5] = 0.0
                moe.gate.weight[5, 0] = 9.0  # more want expert 5
        moe.zero_grad()
        counted[0] = 0
        found.append(gradients(moe, mesh, sizes))
        lent.append(moe.schedule.shadow_plan and moe.schedule.shadow_plan.shadows)
        sent.append(counted[0])
    plan.exchange_sizes = real
    return found, lent, sent


@pytest.mark.parametrize("sizes", [[300, 300], [601, 0]], ids=["even sources", "one source"])
def test_it_lends_in_the_call_that_is_not_even(sizes: list[int]) -> None:
    reference, *_ = run_alone(calls, [sum(sizes)], False)
    outcomes = run_ranks(2, calls, sizes, False)
    for call in range(4):
        compare([found[call] for found, *_ in outcomes], reference[call], 1, 2)
    for _, lent, sent in outcomes:
        assert not lent[1]
        assert sent[1] == 1
        if sizes[1]:
            assert lent[2], "the first call that is not even"
            assert sent[2:] == [2, 1], "and planned once more; the next one asks first"


def test_replicas_take_part_in_it() -> None:
    reference, *_ = run_alone(calls, [600], False)
    outcomes = run_ranks(2, calls, [300, 300], True)
    for call in range(4):
        joined = torch.cat([found[call]["y"] for found, *_ in outcomes])
        assert (joined - reference[call]["y"]).abs().max() < 1e-12
    assert {sent[2] for *_, sent in outcomes} == {2}
