"""That communication really runs beside compute: order of events on a wire that is slow on purpose."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_parity import D, gradients, make, parity
from slow_wire import DELAY, Event, on_a_slow_wire

from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.moe.tokens import Tokens
from moeclipse.testing.run_ranks import run_ranks, run_ranks_raw


def timeline(mesh: Mesh) -> list[Event]:
    moe, events = on_a_slow_wire(mesh, schedule="smart", group_size=1, chunks=2)
    plain_forward, plain_dgrad = moe.experts.forward, moe.experts.dgrad

    def timed(name: str, function: Any) -> Any:
        def run(*args: Any) -> Any:
            events.append(("begin", name, time.monotonic()))
            result = function(*args)
            time.sleep(DELAY)
            events.append(("end", name, time.monotonic()))
            return result

        return run

    moe.experts.forward, moe.experts.dgrad = timed("C_F", plain_forward), timed("C_B", plain_dgrad)
    moe.experts.wgrad = timed("C_W", moe.experts.wgrad)
    gradients(moe, mesh, [20] * mesh.num_ranks)
    return events


def check(events: list[Event], form: str) -> None:
    """All S before the first C; each R right behind its C; no C waits for a later S."""
    names = [(what, label) for what, label, _ in events]
    sends = [i for i, (what, label) in enumerate(names) if what == "launch" and f" S_{form}@" in label]
    returns = [i for i, (what, label) in enumerate(names) if what == "launch" and f" R_{form}@" in label]
    begins = [i for i, (what, label) in enumerate(names) if (what, label) == ("begin", f"C_{form}")]
    ends = [i for i, (what, label) in enumerate(names) if (what, label) == ("end", f"C_{form}")]
    assert len(sends) == len(returns) == 2 * 2, "steps 1 and 2, two chunks each; step 0 stays at home"
    assert len(begins) == 3 * 2
    assert max(sends) < begins[0], "everything that can leave leaves before the first rows are computed"
    # Own rows (step 0): one chunk first and one last in forward, where it covers the last R; both first in
    # backward, where weight gradients do. Each R is launched before the next C begins.
    own = 1 if form == "F" else 2
    for number, index in enumerate(returns):
        assert ends[number + own] < index, "results leave after they are computed ..."
        if number + own + 1 < len(begins):
            assert index < begins[number + own + 1], "... and before anything else is computed"
    if form == "F":
        assert returns[-1] < begins[-1], "own rows are computed while the last results travel"
        scores = next(i for i, (what, label) in enumerate(names) if what == "wait" and "scores" in label)
        assert begins[0] < scores, "own rows have their scores here: nobody waits for those of others"
    else:
        scores = names.index(("launch", "return of score gradients, layer 0, microbatch 0"))
        early, late = (i for i, (what, label) in enumerate(names) if (what, label) == ("begin", "C_W"))
        assert ends[own] < early < begins[own + 1], "own weight gradients run while rows are awaited"
        assert returns[-1] < late, "all others while the last results travel"
        assert scores < late, "... and while the scores' gradients do"
    waited = names.index(("wait", names[sends[-1]][1]))
    assert begins[0] < waited, "compute begins before anybody waits for the last rows"
    assert returns[0] < ends[-1], "the first results leave before the last C"


def test_rows_travel_while_experts_compute() -> None:
    for events in run_ranks(3, timeline):
        check(events, "F")
        check(events, "B")


def dies(mesh: Mesh) -> None:
    moe = make(GateConfig(top_k=2), 8, 0, mesh, exchange={"schedule": "smart", "chunks": 2, "group_size": 1})
    gradients(moe, mesh, [9, 9, 9])
    plain = moe.experts.forward

    def once(*args: Any) -> Any:
        if mesh.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*args)

    moe.experts.forward = once
    moe.run(torch.ones(9, D, dtype=torch.float64), Tokens(mesh=mesh, first=9 * mesh.rank, total=27))


def test_a_rank_that_dies_in_the_exchange_is_noticed() -> None:
    begun = time.monotonic()
    outcomes = run_ranks_raw(3, dies, collective_deadline_s=300)
    assert time.monotonic() - begun < 150
    for rank in (0, 1):
        ok, text = outcomes[rank]
        assert not ok
        assert re.search(r"CommError: .*lost rank 2 in .*layer 0, microbatch 0", text), text


STRANGE = {
    "sizes": st.lists(st.integers(0, 9), min_size=4, max_size=4),
    "group_size": st.integers(1, 4),
    "chunks": st.integers(1, 4),
    "num_experts": st.integers(4, 9),
    "top_k": st.integers(1, 4),
    "shadow": st.sets(st.integers(0, 3)),
}


def no_deadlock(
    sizes: list[int], group_size: int, chunks: int, num_experts: int, top_k: int, shadow: set[int]
) -> None:
    exchange = {"schedule": "smart", "group_size": group_size, "chunks": chunks, "shadow": tuple(shadow)}
    more = {"exchange": exchange}
    parity(GateConfig(top_k=top_k), 1, 4, num_experts=num_experts, sizes=sizes, more=more)


@settings(max_examples=settings.default.max_examples // 10, deadline=None)
@given(**STRANGE)
def test_no_deadlock(**case: Any) -> None:
    no_deadlock(**case)


@pytest.mark.full
@settings(max_examples=1000, deadline=None)
@given(**STRANGE)
def test_no_deadlock_in_a_thousand_cases(**case: Any) -> None:
    no_deadlock(**case)
