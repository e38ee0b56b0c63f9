"""What a layer costs with and without shadows: prices, and the smooth stand-in that leads the walk."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plans import shadow_costs as costs
from strategies import zipf_counts

from moeclipse.balance.placement import Placement
from moeclipse.balance.shadow import predict
from moeclipse.balance.shadow_model import Work, latency, merit
from moeclipse.core.errors import ConfigError


def test_enough_rows_cost_as_much_as_a_copy() -> None:
    """Rows travel four times: there and back, forward and backward."""
    prices = costs(copy=1e-3)
    row = 4 * prices.row_send + prices.row_forward + prices.row_backward
    copy = prices.parameter_seconds + prices.gradient_seconds
    assert prices.enough_rows * row == pytest.approx(copy)
    assert costs(min_rows=10**6).enough_rows == 10**6
    assert replace(prices, row_send=0.0, row_forward=0.0, row_backward=0.0).enough_rows == np.inf


def test_gradients_of_twice_the_bytes_cost_twice() -> None:
    counts_PE = zipf_counts(4, 16, 1.2)
    shadows = ((int(counts_PE.sum(0).argmax()), (0,)),)
    placement = Placement.contiguous(16, 4)
    dear, cheap = (costs(dtype="bf16", gradient_dtype=dtype, shared_wire=True) for dtype in ("fp32", "bf16"))
    assert dear.parameter_bytes == cheap.parameter_bytes == cheap.gradient_bytes == dear.gradient_bytes / 2
    more = predict(counts_PE, placement, dear, shadows).backward_wire
    less = predict(counts_PE, placement, cheap, shadows).backward_wire
    assert more - less == pytest.approx(cheap.gradient_seconds)


def test_what_crosses_hosts_counts_as_several() -> None:
    """Four ranks on two hosts: rank 0 holds the expert; 10 rows come from its host, 20 from the other."""
    counts_PE = np.zeros((4, 4), dtype=np.int64)
    counts_PE[1, 0], counts_PE[2, 0] = 10, 20
    placement, prices = Placement.contiguous(4, 4), costs(far=2.5)
    where = {"node_P": (0, 0, 1, 1)}
    none = predict(counts_PE, placement, prices, (), **where)
    assert none.forward_wire == pytest.approx(2 * prices.row_send * (10 + 2.5 * 20))
    assert none.forward_compute == pytest.approx(30 * prices.row_forward), (
        "near or far, a row is computed once"
    )
    lent = predict(counts_PE, placement, prices, ((0, (2,)),), **where)
    assert lent.forward_wire == pytest.approx(2 * prices.row_send * 10 + 2.5 * prices.parameter_seconds)
    near = predict(counts_PE, placement, prices, ((0, (1,)),), **where)
    assert near.forward_wire == pytest.approx(2 * prices.row_send * 2.5 * 20 + prices.parameter_seconds)
    assert predict(counts_PE, placement, prices, ()) == predict(counts_PE, placement, costs(), ())


@pytest.mark.parametrize("overlap", [0.0, 1.0])
@pytest.mark.parametrize("shared_wire", [False, True])
def test_the_walk_is_led_by_the_prices_of_the_prediction(shared_wire: bool, overlap: float) -> None:
    """Where all ranks do the same, the smooth stand-in is the prediction itself, backward included."""
    prices = costs(overlap=overlap, shared_wire=shared_wire, copy=1e-3, row_backward=1.1e-4)
    for rows, sent, copies in ((500, 40, 1), (20, 300, 3), (0, 0, 1)):
        each = np.full(4, float(sent))
        taken = np.full(4, float(copies))
        work = Work(
            rows=np.full(4, float(rows)), rows_in=each, rows_out=each, copies_in=taken, copies_out=taken
        )
        assert merit(work, prices) == pytest.approx(latency(work, prices).total)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row_forward": -1.0}, r"row_forward \(-1.0\) must not be negative"),
        ({"overlap": 1.5}, r"overlap \(1.5\) must lie between 0 \(blocking\) and 1"),
        ({"far": 1.3}, r"far \(1.3\) must be at least 1, and a multiple of 1/16"),
        ({"min_rows": 0}, r"min_rows \(0\) must be at least 1"),
        ({"dtype": "int3"}, "unknown dtype 'int3'; choose one of fp64, fp32"),
        ({"bandwidth": 0}, r"bandwidth \(0\) must be positive"),
    ],
)
def test_costs_are_checked(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        costs(**changes)
