"""Uneven gates for benches: what each workload is, and that it is a function of seed and step alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moeclipse.balance.workloads import (
    BURST,
    CYCLE,
    TURN,
    WORKLOADS,
    SharedLayer,
    choices,
    counts,
    forced_even,
    tokens_of,
)

SHAPE = SharedLayer(num_experts=32, top_k=4, num_ranks=8, tokens=256)


def loads(workload: str, step: int = 0, seed: int = 3) -> np.ndarray:
    """Of each expert, as parts of the mean."""
    load_E = counts(workload, seed, step, SHAPE).sum(0)
    return load_E / load_E.mean()


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_token_takes_k_experts_and_equal_arguments_give_equal_choices(workload: str) -> None:
    first, again = (choices(workload, 3, 7, SHAPE) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert [len(ids_TK) for ids_TK in first] == tokens_of(workload, SHAPE)
    assert sum(tokens_of(workload, SHAPE)) == 8 * 256
    for ids_TK in first:
        assert ids_TK.shape[1] == 4
        assert (np.diff(ids_TK, axis=1) > 0).all(), "different experts"
        assert ids_TK.min() >= 0
        assert ids_TK.max() < 32
    other = choices(workload, 3, 8, SHAPE)
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("workload", sorted(WORKLOADS.keys() - {"hot rank", "spread heat"}))
def test_routing_does_not_know_of_ranks(workload: str) -> None:
    """All tokens together, on 8 ranks and on 2; heat that is one rank's is another thing on other ranks."""
    few = replace(SHAPE, num_ranks=2, tokens=1024)
    whole, same = (np.concatenate(choices(workload, 3, 39, shape)) for shape in (SHAPE, few))
    assert np.array_equal(whole, same)


def test_heat_is_where_it_should_be() -> None:
    assert np.abs(loads("even") - 1).max() < 0.3
    hot = np.sort(loads("hot experts"))
    assert hot[-4] > 2 * hot[-5], "4 of 32"
    assert hot[-4:].sum() / 32 == pytest.approx(0.4, abs=0.08), (
        "half of first choices; a token takes 4 others"
    )
    rank = loads("hot rank")
    assert rank[:4].min() > 1.8 * rank[4:].max()
    spread = loads("spread heat")
    assert sorted(np.argsort(spread)[-4:]) == [0, 8, 16, 24]
    assert loads("nothing")[:8].sum() == 0
    assert loads("nothing")[8:].min() > 1


def test_sources_are_ragged() -> None:
    tokens_P = tokens_of("ragged sources", SHAPE)
    assert sorted(tokens_P) == tokens_P
    assert tokens_P[0] < 0.4 * 256
    assert tokens_P[-1] > 1.6 * 256


def test_what_changes_and_when() -> None:
    hottest = [int(np.argmax(loads("rotating", step))) for step in range(4 * TURN)]
    sets = [set(hottest[first : first + TURN]) for first in range(0, 4 * TURN, TURN)]
    assert len(set.union(*sets)) > max(len(each) for each in sets)
    calm, stormy = loads("burst", CYCLE - BURST - 1), loads("burst", CYCLE - BURST)
    assert calm.max() < 1.3
    assert stormy.max() > 5
    assert loads("burst", CYCLE).max() < 1.3


@pytest.mark.parametrize("workload", ["burst", "ragged sources"])
def test_forced_even_is_even_for_the_same_tokens(workload: str) -> None:
    for tokens in (256, 7):
        shape = replace(SHAPE, tokens=tokens)
        counts_PE = forced_even(workload, shape)
        assert counts_PE.sum(1).tolist() == [4 * each for each in tokens_of(workload, shape)]
        assert np.ptp(counts_PE.sum(0)) <= 1
