"""What each cure leaves of uneven loads: the same steps, the planners' own seconds, and no look ahead."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moeclipse.balance.config import PlacementConfig
from moeclipse.balance.cures import CURES, EVEN, Bed, evened, replay
from moeclipse.balance.objective import PlacementCosts, score
from moeclipse.balance.placement import Placement
from moeclipse.balance.workloads import SharedLayer, counts, forced_even

COSTS = PlacementCosts.from_shapes(d_model=2048, d_ff=768, card_per_rank=True)
COSTS = replace(COSTS, row_seconds=64 * COSTS.row_seconds, row_bytes=64 * COSTS.row_bytes)
BED = Bed(costs=COSTS, slots=3, node_P=(0,) * 4)
SHAPE = SharedLayer(num_experts=8, top_k=2, num_ranks=4, tokens=64)


def steps_of(workload: str, number: int) -> list[np.ndarray]:
    return [counts(workload, 1, step, SHAPE) for step in range(number)]


@pytest.mark.parametrize("workload", ["even", "ragged sources"])
def test_an_even_gate_has_the_same_rows(workload: str) -> None:
    counts_PE = counts(workload, 1, 0, SHAPE)
    even_PE = evened(counts_PE)
    assert (even_PE == forced_even(workload, SHAPE)).all()
    assert (even_PE.sum(1) == counts_PE.sum(1)).all()
    assert np.ptp(even_PE.sum(0)) <= 1


def test_seconds_are_those_of_the_objective() -> None:
    steps = steps_of("hot rank", 5)
    found = replay(steps, BED)
    plain = Placement.contiguous(8, 4)
    told = [score(plain, counts_PE, COSTS).total for counts_PE in steps]
    assert found.seconds["static"] == pytest.approx(told)
    assert found.seconds[EVEN] == pytest.approx([score(plain, evened(c), COSTS).total for c in steps])
    assert found.throughput("static") == pytest.approx(sum(found.seconds[EVEN]) / sum(told))
    assert found.throughput("static", 3) == pytest.approx(sum(found.seconds[EVEN][3:]) / sum(told[3:]))


def test_a_plan_is_taken_three_steps_after_the_loads_that_it_was_made_from() -> None:
    config = PlacementConfig(planner="incremental", start_step=4, every=4)
    found = replay(steps_of("hot rank", 12), replace(BED, config=config))
    static, planned = (np.array(found.balance[way]) for way in ("static", "planned"))
    # Asked for after step 3, of which it must not be the first to profit.
    assert planned[:6] == pytest.approx(static[:6])
    assert (planned[6:] > static[6:] + 0.2).all()
    assert found.seconds["planned"][6] > 1.05 * found.seconds["planned"][7], "moves are paid for in that step"
    assert found.copies[0] > 0


def test_replicas_stay_and_plans_follow() -> None:
    found = replay(steps_of("rotating", 40), BED)
    replicas, planned = (np.array(found.balance[way]) for way in ("replicas", "planned"))
    assert planned[14:20] == pytest.approx(replicas[14:20])
    assert planned[26:].mean() > replicas[26:].mean() + 0.05
    later = {way: found.throughput(way, 20) for way in CURES}
    assert later["auto"] >= later["planned"] >= 0.99 * later["static"]
    assert later["shadows"] >= later["static"]


def test_steps_that_were_left_out() -> None:
    """Every fourth step recorded: a plan is due in time, and its moves are shared among four steps."""
    steps = [steps_of("hot rank", 1)[0]] * 12
    config = PlacementConfig(planner="incremental", start_step=8, every=8)
    whole = replay(steps, replace(BED, config=config))
    some = replay(steps[:3] * 4, replace(BED, config=config, apart=4))
    assert some.balance["planned"][2] > some.balance["planned"][1] + 0.2, "asked behind step 7, there at 12"
    first = int(np.argmax(np.array(whole.balance["planned"]) > whole.balance["static"][0] + 0.2))
    move = [
        found.seconds["planned"][at] - found.seconds["planned"][at + 1]
        for found, at in ((whole, first), (some, 2))
    ]
    assert move[0] == pytest.approx(4 * move[1])


def test_steps_without_rows() -> None:
    found = replay([np.zeros((4, 8), dtype=np.int64)] * 12, BED)
    assert all(len(each) == 12 for each in found.seconds.values())
    assert not found.copies


SLOW_CABLES = Bed(
    costs=PlacementCosts(
        row_seconds=1.3e-5,
        row_bytes=384.0,
        weight_bytes=98304.0,
        gradient_bytes=98304.0,
        state_bytes=294912.0,
        near_bandwidth=7.4e6,
        far_bandwidth=7.4e6,
        card_per_rank=True,
        loan_seconds=1.5e-3,
        replicas_seconds=7e-3,
        copy_bandwidth=8.7e6,
    ),
    slots=6,
    node_P=(0, 1, 2, 3),
    config=PlacementConfig(planner="incremental", start_step=4),
    look=6e-3,
    least_s=2e-3,
)
"""What four ranks of bench/skew_steps.py measured, a cable of 60 mbit each."""
REST_S = 0.1
"""Of a step, beside the layer."""


@pytest.mark.parametrize(
    ("workload", "static", "auto"),
    [("burst", 0.92, 0.92), ("rotating", 0.84, 0.87), ("hot experts", 0.84, 0.93), ("hot rank", 0.64, 0.97)],
)
def test_on_slow_cables_auto_is_never_slower_than_doing_nothing(
    workload: str, static: float, auto: float
) -> None:
    """Copies travel over the cables that rows need; an expert with its state takes half as long as a step.

    What static experts and auto reach of an even gate in the second half of 44 steps.
    """
    shape = SharedLayer(num_experts=16, top_k=2, num_ranks=4, tokens=256)
    found = replay((counts(workload, 1, step, shape) for step in range(44)), SLOW_CABLES)

    def throughput(way: str) -> float:
        even, other = (sum(found.seconds[key][22:]) + 22 * REST_S for key in (EVEN, way))
        return even / other

    assert throughput("static") == pytest.approx(static, abs=0.01)
    assert throughput("auto") > auto
    assert throughput("auto") > throughput("planned") - 0.002
