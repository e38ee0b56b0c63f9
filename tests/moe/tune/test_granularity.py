"""Which cuts of an exchange there are, and which of them the simulator prefers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moeclipse.cost.exchange import ExchangeCosts
from moeclipse.moe.tune.granularity import (
    against_blocking,
    cut_in_words,
    partitions_to_try,
    rank_by_simulation,
)
from moeclipse.schedule.shape import even_groups


def test_choices_in_words() -> None:
    assert [cut_in_words(1, 1), cut_in_words(2, 1)] == ["one go", "2 steps x 1 chunks"]
    assert against_blocking([{"over_plain": None}]) == ""
    assert against_blocking([{"over_plain": 1.0}, {"over_plain": 1.0}]) == ""
    sure = against_blocking([{"over_plain": 1.1, "scatter": 0.04}, {"over_plain": 1.3, "scatter": 0.02}])
    assert sure == ", blocking took 1.20 times as long (calls scattered by 4 %)"
    assert against_blocking([{"over_plain": 1.1}, {"over_plain": None}, {"over_plain": 1.3}]).endswith(
        " 1.20 times as long"
    )


@pytest.mark.parametrize(
    ("hosts", "size", "groups"),
    [
        ((0,) * 8, "auto", [8, 4, 2, 1]),
        ((0,) * 3, "auto", [3, 1]),
        ((0, 0, 1, 1), "auto", [2, 1]),
        ((0, 1, 2, 3, 0, 1, 2, 3), "auto", [4, 2, 1]),
        ((0,) * 4, 2, [2]),
    ],
    ids=["eight ranks", "three", "two hosts", "four hosts", "as told"],
)
def test_groups_that_are_tried(hosts: tuple[int, ...], size: Any, groups: list[int]) -> None:
    """Ever larger ones, and last the blocking exchange; but ranks of one host stay together."""
    tried = partitions_to_try(size, hosts)
    assert [len(ring) for ring in tried] == groups
    for ring in tried:
        step_of = {rank: step for step, group in enumerate(ring) for rank in group}
        assert sorted(step_of) == [*range(len(hosts))]
        if size == "auto":
            host_steps = {(host, step_of[rank]) for rank, host in enumerate(hosts)}
            assert len(set(hosts)) == 1 or len(host_steps) == len(set(hosts))


def test_one_go_over_two_hosts_pays_for_the_far_link() -> None:
    """Far links ten times as slow: sending all at once costs what far rows take, as the cut exchange does."""
    costs = ExchangeCosts(
        row_bytes=1000, near_bandwidth=1e8, far_bandwidth=1e7, row_seconds=1e-5, hosts=(0, 0, 1, 1)
    )
    partitions = partitions_to_try("auto", costs.hosts)
    ranked = rank_by_simulation(partitions, (1,), np.full((4, 4), 100), costs)
    assert len(ranked[0].groups) == 2, "far rows hide what is computed of near ones"
    sent_and_back = 2 * (100 * 1000 / 1e8 + 200 * 1000 / 1e7)
    assert ranked[-1].plain
    assert ranked[-1].predicted_s == pytest.approx(sent_and_back + 400 * 1e-5)


def test_own_rows_stand_at_both_ends_where_orders_are_alike() -> None:
    """A latency that fills the wire makes orders equal on paper; the ends are hidden all the same."""
    costs = ExchangeCosts(
        row_bytes=1024, near_bandwidth=7.5e6, far_bandwidth=7.5e6, row_seconds=1.9e-4, latency=5e-3
    )
    partitions = [even_groups(4, size) for size in (1, 2, 4)]
    ranked = rank_by_simulation(partitions, (1, 2), np.full((4, 4), 320), costs)
    assert {use.rule for use in ranked if len(use.groups) > 1} == {"ends"}
    for use in ranked:
        if use.rule == "ends":
            assert use.units is not None
            assert use.units[0] == (0, 0)
            assert use.units[-1][0] == 0
        assert use.both_s > use.predicted_s
    assert [use.both_s for use in ranked[:3]] == sorted(use.both_s for use in ranked[:3])
