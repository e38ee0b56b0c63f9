"""How long loads are expected to stay as they are, from how long others have stayed."""

from __future__ import annotations

import numpy as np
import pytest

from moeclipse.balance.config import PlacementConfig
from moeclipse.balance.drift import Drift
from moeclipse.balance.load import LoadTrace
from moeclipse.balance.regimes import KEPT, NUMBERS, Regimes, unevenness
from moeclipse.balance.workloads import SharedLayer, counts

SHAPE = SharedLayer(num_experts=16, top_k=2, num_ranks=4, tokens=256)
CONFIG = PlacementConfig(planner="incremental")
EVEN, HOT = np.ones((1, 8)), np.array([[6.0, 4, 1, 1, 1, 1, 1, 1]])


def after(*regimes: tuple[np.ndarray, int]) -> Regimes:
    """Behind so many steps of each."""
    found = Regimes()
    for number, (rows_LE, steps) in enumerate(regimes):
        for step in range(steps):
            found = found.add(rows_LE, jumped=number > 0 and step == 0)
    return found


def test_before_a_jump_nothing_is_known_to_end() -> None:
    assert Regimes().lasting(50) == 50
    assert after((HOT, 7)).lasting(50) == 50
    assert not after((HOT, 8)).looks_again


def test_what_is_new_is_expected_to_last_as_long_as_it_has() -> None:
    """Even steps before it say nothing of heat."""
    assert after((EVEN, 30), (HOT, 1)).lasting(50) == 1
    assert after((EVEN, 30), (HOT, 12)).lasting(50) == 12
    assert after((EVEN, 30), (HOT, 90)).lasting(50) == 50


def test_others_that_were_as_uneven_say_how_long() -> None:
    assert after((HOT, 20), (HOT[:, ::-1], 1)).lasting(50) == 19
    assert after((HOT, 20), (HOT, 10), (HOT, 4)).lasting(50) == round((16 + 6) / 2)
    assert after((HOT, 20), (HOT, 10), (HOT, 12)).lasting(50) == 8, "those that ended sooner count no more"
    assert after((HOT, 20), (HOT, 25)).lasting(50) == 25, "none lasted as long"
    assert after((EVEN, 35), (HOT, 5), (EVEN, 35), (HOT, 1)).lasting(50) == 4
    assert after((EVEN, 35), (HOT, 5), (EVEN, 1)).lasting(50) == round((34 + 4) / 2)


def test_one_that_is_like_no_other_is_looked_at_whenever_it_has_doubled() -> None:
    ages = [age for age in range(1, 40) if after((EVEN, 9), (HOT, age)).looks_again]
    assert ages == [2, 4, 8, 16, 32]
    ages = [age for age in range(1, 40) if after((HOT, 9), (HOT, age)).looks_again]
    assert ages == [16, 32], "of one like others more is known from the start"


def test_it_is_kept_in_checkpoints() -> None:
    many = after(*[(HOT, 2 + number) for number in range(KEPT + 3)])
    assert len(many.past) == KEPT
    for regimes in (Regimes(), after((HOT, 3)), after((EVEN, 3), (HOT, 2)), many):
        assert len(regimes.numbers()) == NUMBERS
        assert Regimes.from_numbers(regimes.numbers()) == regimes


def test_layers_without_rows() -> None:
    assert unevenness(np.zeros((2, 4))) == pytest.approx(1.0)
    assert unevenness(EVEN) == 0.0
    assert after((np.zeros((1, 4)), 3), (np.zeros((1, 4)), 1)).lasting(50) == 2


def asked(workload: str, steps: int) -> list[tuple[int, int]]:
    """(steps after which a plan is asked for, and for how many it has to pay), if each is taken in time."""
    trace, found, pending = LoadTrace(drift=Drift()), [], -1
    for step in range(steps):
        trace.add(step, counts(workload, 1, step, SHAPE)[None])
        if trace.asks(CONFIG, step, idle=step >= pending + CONFIG.delay):
            found.append((step, trace.lasting(CONFIG)))
            pending = step
    return found


def test_the_first_burst_is_waited_out_and_moving_heat_is_followed() -> None:
    assert [(step, left) for step, left in asked("hot rank", 44)] == [(s, 50) for s in (9, 19, 29, 39)]
    burst = dict(asked("burst", 44))
    assert 35 not in burst, "nothing like it is known"
    assert burst.get(38, 0) <= 2
    rotating = dict(asked("rotating", 44))
    assert rotating[20] == rotating[40] == 19 - CONFIG.delay
