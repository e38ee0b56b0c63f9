"""What rows and parameters cost on near and far links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moeclipse.core.errors import ConfigError
from moeclipse.cost.exchange import ExchangeCosts


def test_exchange_costs() -> None:
    costs = ExchangeCosts(
        row_bytes=100, near_bandwidth=1000, far_bandwidth=100, row_seconds=2, latency=1, kernel=3
    )
    assert costs.transfer(10, near=True) == 2.0
    assert costs.transfer(10, near=False) == 11.0
    assert costs.compute(4) == 11.0
    with pytest.raises(ConfigError, match="3 problems"):
        ExchangeCosts(row_bytes=0, near_bandwidth=1, far_bandwidth=1, row_seconds=-1, far_latency=-1)


def test_what_goes_far_pays_the_far_latency() -> None:
    costs = ExchangeCosts(
        row_bytes=100, near_bandwidth=1000, far_bandwidth=100, row_seconds=2, expert_bytes=500, latency=1,
        far_latency=7,
    )  # fmt: skip
    assert costs.transfer(10, near=True) == 1 + 1
    assert costs.transfer(10, near=False) == 7 + 10
    assert costs.parameters(2) == 7 + 10, "copies of experts are for ranks of other hosts, too"
    assert replace(costs, far_latency=0.0).transfer(10, near=False) == 10, "0 is a latency"
