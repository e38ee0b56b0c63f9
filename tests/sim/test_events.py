"""The event queue: lanes that slow each other, by hand; where none does, the times of the fast pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moeclipse.cost.model import DEEPSEEK_V3, UNIT, Costs
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.graph import DATA, Edges, sort_graph
from moeclipse.schedule.lower import lower
from moeclipse.schedule.shape import LayerShape
from moeclipse.schedule.smart import exchange_shape, smart
from moeclipse.schedule.templates import Expansion, expand, replicate
from moeclipse.sim.engine import simulate
from moeclipse.sim.events import EventQueue

NO_CONTENTION = {("compute", "dp"): 0.5}
"""Sends simulations through the event queue without changing anything: nothing runs on dp here."""


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("launch", [0.0, 1e-4])
def test_queue_and_pass_agree_on_layer_ops(inline: bool, launch: float) -> None:
    program = verify(
        replicate(expand(build("dualpipev", 2, 5), [LayerShape(shared=False)] * 2, Expansion(chunks=2)), 2)
    )
    costs = replace(
        DEEPSEEK_V3, inline_compute=inline, launch=launch, wire=1e-3, rank_speed=(1.0, 0.7, 1.0, 1.2)
    )
    one = simulate(program, costs)
    other = simulate(program, replace(costs, contention=NO_CONTENTION))
    np.testing.assert_allclose(one.start, other.start)
    np.testing.assert_allclose(one.finish, other.finish)
    np.testing.assert_allclose(one.ready, other.ready)


@pytest.mark.parametrize("inline", [False, True])
def test_queue_and_pass_agree_on_an_exchange(inline: bool) -> None:
    program = verify(smart(exchange_shape(6, group_size=4, chunks=2, backward=True)))
    rng = np.random.default_rng(0)
    durations = [rng.uniform(0.1, 1.0, len(ops)).tolist() for ops in program.program.ranks]
    costs = Costs(seconds={}, inline_compute=inline, launch=0.01)
    one = simulate(program, costs, durations)
    other = simulate(program, replace(costs, contention=NO_CONTENTION), durations)
    np.testing.assert_allclose(one.finish, other.finish)


def test_contention_slows_compute_by_hand() -> None:
    """Compute at half rate while the exchange (4 s) runs: 3 s of work take 2 + 4 - ... = 5 s."""
    program = smart(exchange_shape(2, group_size=1))
    # Per rank: S0 S1 C0 R0 C1 R1. S0 is instant; S1 runs from 0 to 4 beside C0.
    durations = [[0.0, 4.0, 3.0, 0.0, 0.0, 0.0]] * 2
    costs = Costs(seconds={}, contention={("compute", "a2a"): 0.5})
    result = simulate(program, costs, durations)
    # Until 4 s half of 4 = 2 s of the work are done, the last second runs alone: C0 ends at 5.
    assert result.finish[2] == pytest.approx(5.0)
    assert simulate(program, Costs(seconds={}), durations).finish[2] == pytest.approx(3.0)


def test_contention_slows_communication_too() -> None:
    program = smart(exchange_shape(2, group_size=1))
    durations = [[0.0, 4.0, 3.0, 0.0, 0.0, 0.0]] * 2
    result = simulate(program, Costs(seconds={}, contention={("a2a", "compute"): 0.25}), durations)
    # S1 gets a quarter of its rate for 3 s (0.75 done), then 3.25 s alone.
    assert result.finish[1] == pytest.approx(6.25)


def test_two_wires_of_one_rank_can_share_its_link() -> None:
    """The middle rank of three receives F1 and sends F0 at once; sharing halves both rates."""
    costs = replace(UNIT, wire=1.0)
    program = lower(build("1f1b", 3, 4))
    alone = simulate(program, replace(costs, contention=NO_CONTENTION)).makespan
    shared = simulate(program, replace(costs, contention={("p2p", "p2p"): 0.5})).makespan
    assert alone == pytest.approx(simulate(program, costs).makespan)
    assert shared > alone


def finish(seconds: list[float], lanes: list[str], ranks: list[int], contention: dict) -> list[float]:
    """When ops end that all begin at once and need nothing from each other."""
    nothing = np.zeros(0, dtype=np.int64)
    graph = sort_graph(len(seconds), len(seconds), Edges.join([(nothing, nothing, DATA)]), str)
    earliest = [0.0] * len(seconds)
    queue = EventQueue(
        graph,
        seconds,
        earliest,
        lanes=lanes,
        ranks=ranks,
        peers={},
        contention=contention,
        launch=0.0,
        inline_compute=False,
    )
    return queue.run().finish


def test_rates_multiply_and_change_while_an_op_runs() -> None:
    """8 s of compute beside 2 s on one lane and 6 s on another: a quarter of the rate, a half, then all."""
    contention = {("compute", "a2a"): 0.5, ("compute", "p2p"): 0.5}
    ends = finish([8.0, 2.0, 6.0], ["compute", "a2a", "p2p"], [0, 0, 0], contention)
    assert ends == pytest.approx([6.0 + (8.0 - 2 * 0.25 - 4 * 0.5), 2.0, 6.0])


def test_other_ranks_do_not_slow_an_op() -> None:
    contention = {("compute", "a2a"): 0.5, ("a2a", "compute"): 0.5}
    assert finish([3.0, 4.0], ["compute", "a2a"], [0, 1], contention) == [3.0, 4.0]
    assert finish([3.0, 4.0], ["compute", "a2a"], [0, 0], contention) == [6.0, 7.0]
