"""A shadow policy of one's own: what it is asked, and what of its answers is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moeclipse.balance.placement import Placement
from moeclipse.balance.serving import choose_serving
from moeclipse.balance.shadow import choose_shadows, predict
from moeclipse.balance.shadow_model import ShadowCosts
from moeclipse.balance.shadow_policy import ShadowQuestion
from moeclipse.core.errors import ConfigError

COSTS = ShadowCosts(
    row_forward=1.0,
    row_backward=2.0,
    row_send=0.01,
    parameter_bytes=1.0,
    gradient_bytes=2.0,
    parameter_byte=1.0,
    gradient_byte=1.0,
    overlap=0.0,
)
COUNTS = np.array([[60, 1, 1, 1], *[[0, 1, 1, 1]] * 3])
CALL = ShadowQuestion(
    counts_PE=COUNTS,
    rows_PE=COUNTS,
    placement=Placement.contiguous(4, 4),
    costs=COSTS,
    node_P=(0, 0, 0, 0),
    may_serve=True,
)


def test_what_is_lent_is_priced() -> None:
    plan = CALL.lend({0: [3, 1, 0, 1], 2: [2]})
    assert plan.shadows == ((0, (1, 3)),), "who holds an expert needs no copy"
    assert not plan.serving
    assert plan.after == predict(COUNTS, CALL.placement, COSTS, plan.shadows)
    serving = CALL.lend({0: [1, 3]}, serving=True)
    assert serving.serving
    assert serving.after.total < plan.after.total
    assert not replace(CALL, may_serve=False).lend({0: [1, 3]}, serving=True).serving
    assert not CALL.lend({}, serving=True).serving


def test_the_best_is_that_with_least_seconds() -> None:
    alone, serving = (choose(COUNTS, CALL.placement, COSTS) for choose in (choose_shadows, choose_serving))
    assert serving.after.total < alone.after.total
    assert CALL.best() == serving
    assert replace(CALL, may_serve=False).best() == alone
    dear = replace(COSTS, parameter_bytes=1e9)
    assert replace(CALL, costs=dear).best().shadows == ()
    assert replace(CALL, costs=None).best().shadows == (), "nothing is lent while nobody knows prices"


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({4: [0]}, "expert 4 cannot be lent; experts are 0 to 3"),
        ({-1: [0]}, "expert -1 cannot be lent"),
        ({0: [4]}, "expert 0 cannot be lent to rank 4; ranks are 0 to 3"),
    ],
)
def test_what_nobody_can_lend(wanted: dict[int, list[int]], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        CALL.lend(wanted)
