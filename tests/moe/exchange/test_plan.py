"""From a decision to a plan: pairs that stay, replicas that share the rest, and who is asked for counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from layer_parity import inputs, make

from moeclipse.balance.placement import Placement
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.moe.exchange.plan import plan_exchange, shadows_of, travelling
from moeclipse.moe.tokens import Structure, Tokens
from moeclipse.moe.tune.exchange_policy import Decision
from moeclipse.testing.run_ranks import run_ranks

SHADOWED = 3
"""Rank 1 has it."""
REPLICATED = Placement(slots=((0, 1, 2), (2, 3, 0)), primary=(0, 0, 0, 1))


def planned(mesh: Mesh, shadow: Any, placement: Placement | None) -> dict[str, Any]:
    exchange = {"schedule": "blocking", "shadow": shadow}
    moe = make(GateConfig(top_k=2), 4, 0, mesh, exchange=exchange, placement=placement)
    x_TD, _ = inputs(20)
    x_TD = x_TD[10 * mesh.rank :][:10]
    tokens = Tokens(mesh=mesh, first=10 * mesh.rank, total=20)
    routing = moe.gate(x_TD, tokens)
    experts = moe._pairwise(Structure(), (x_TD,))
    decision = moe.schedule.decide(routing, moe.dispatcher, experts, mesh, "here", learns=False)
    given = (decision, routing, moe.dispatcher, moe.schedule.hosts, "here")
    plan, staying = plan_exchange(*given, loads=moe.gather_loads([routing], tokens))
    lent = shadows_of(decision, staying, experts, moe.dispatcher, "here")
    flat = routing.expert_ids_TK.flatten()
    rows = (
        None if moe.dispatcher.table is None else travelling(*given[:1], flat, moe.dispatcher, "here", None)
    )
    return {
        "ids": flat,
        "staying": staying,
        "sent": plan.pair_place_n,
        "lent": lent is not None,
        "rows": [] if rows is None else rows.tolist(),
    }


@pytest.mark.parametrize("placement", [None, REPLICATED], ids=["single", "replicas"])
def test_every_pair_is_sent_or_stays_and_none_does_both(placement: Placement | None) -> None:
    for rank, found in enumerate(run_ranks(2, planned, (SHADOWED,), placement)):
        together = torch.cat([found["staying"], found["sent"]]).sort().values
        assert together.tolist() == list(range(len(found["ids"])))
        assert found["lent"]
        if rank == 0:
            assert set(found["ids"][found["staying"]].tolist()) == {SHADOWED}
        else:
            assert not len(found["staying"])


def test_what_replicas_share_leaves_out_what_stays() -> None:
    found = run_ranks(2, planned, (SHADOWED,), REPLICATED)
    rows_PE = np.array(found[0]["rows"])
    assert rows_PE.tolist() == found[1]["rows"], "all ranks share out the same rows"
    counts = [np.bincount(one["ids"].numpy(), minlength=4) for one in found]
    assert rows_PE[0, SHADOWED] == 0 < counts[0][SHADOWED]
    assert (rows_PE[1] == counts[1]).all()


def test_without_shadows_nothing_stays_and_counts_are_asked_for() -> None:
    found = run_ranks(2, planned, "off", REPLICATED)
    assert not any(one["lent"] or len(one["staying"]) for one in found)
    counts = [np.bincount(one["ids"].numpy(), minlength=4).tolist() for one in found]
    assert found[0]["rows"] == counts


def test_counts_that_were_asked_for_are_left_as_they_are() -> None:
    counts = np.arange(9).reshape(3, 3)
    plan, nothing = SimpleNamespace(shadows=((1, (0, 2)), (2, (1,)))), cast(Any, None)
    decision = cast(Decision, SimpleNamespace(counts_PE=counts, plan=plan))
    rows_PE = travelling(decision, nothing, nothing, "test", None)
    assert rows_PE.tolist() == [[0, 0, 2], [3, 4, 0], [6, 0, 8]]
    assert counts.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
