"""How ranks are laid out: what is chosen, and what cannot be, with the choices there are."""

from __future__ import annotations

import pytest

from moeclipse.comm.config import ParallelConfig, deadline_problems, list_divisors


@pytest.mark.parametrize(
    ("dp", "ep", "ranks", "experts", "expected"),
    [
        ("auto", "auto", 8, 16, (1, 8)),
        ("auto", "auto", 8, 6, (2, 4)),
        (2, "auto", 8, 16, (2, 4)),
        ("auto", 2, 6, 4, (3, 2)),
    ],
)
def test_sizes_of_axes(dp, ep, ranks: int, experts: int, expected: tuple[int, int]) -> None:
    assert ParallelConfig(dp=dp, ep=ep).sizes(ranks, experts) == expected


@pytest.mark.parametrize(
    ("dp", "ep", "message"),
    [
        ("auto", 3, r"parallel.ep \(3\) must divide the number of ranks \(8\); choose 1, 2, 4, 8"),
        (3, "auto", r"must divide the number of ranks \(8\)"),
        (2, 2, r"parallel.dp \(2\) x parallel.ep \(2\) must equal the number of ranks \(8\)"),
        (1, 8, r"parallel.ep \(8\) must not exceed moe.num_experts \(4\)"),
    ],
)
def test_sizes_that_do_not_fit(dp, ep, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelConfig(dp=dp, ep=ep).sizes(8, 4)


@pytest.mark.parametrize(
    ("given", "expert_tp", "ranks", "experts", "expected"),
    [
        ({"tp": 2}, "folded", 8, 16, (1, 4)),
        ({"tp": 2}, "folded", 8, 4, (2, 2)),
        ({"tp": 2}, "sharded", 8, 4, (1, 4)),
        ({"tp": 4, "dp": 2}, "folded", 8, 4, (2, 1)),
    ],
)
def test_sizes_with_tp(given, expert_tp, ranks: int, experts: int, expected: tuple[int, int]) -> None:
    assert ParallelConfig(**given).sizes(ranks, experts, expert_tp) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tp": 3}, r"parallel.tp \(3\) must divide the number of ranks \(8\); choose 1, 2, 4, 8"),
        ({"tp": 2, "ep": 8}, r"parallel.ep \(8\) must divide the number of ranks over parallel.tp \(4\); ch"),
        ({"tp": 2, "ep": 4}, r"parallel.ep \(4\) x parallel.tp \(2\) must not exceed moe.num_experts \(4\)"),
    ],
)
def test_sizes_with_tp_that_do_not_fit(given, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**given).sizes(8, 4)


def test_async_all_reduce_with_sequence_parallel_is_refused_with_a_reason() -> None:
    both = ParallelConfig(tp=2, sequence_parallel=True, async_all_reduce="on")
    assert "with sequence parallelism no gradient is all-reduced" in next(both.problems())
    assert not list(ParallelConfig(tp=2, sequence_parallel=False, async_all_reduce="on").problems())


def test_pipelines_take_their_ranks_first() -> None:
    assert ParallelConfig(pp=2, tp=2).sizes(16, 8) == (1, 4)
    with pytest.raises(
        ValueError, match=r"parallel.pp \(3\) must divide the number of ranks \(8\); choose 1, 2, 4, 8"
    ):
        ParallelConfig(pp=3).sizes(8, 4)
    with pytest.raises(
        ValueError, match=r"parallel.ep \(3\) must divide the number of ranks over parallel.pp \(4\)"
    ):
        ParallelConfig(pp=2, ep=3).sizes(8, 4)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (ParallelConfig(tp=0), "parallel.tp (0) must be at least 1"),
        (ParallelConfig(pp=-1), "parallel.pp (-1) must be at least 1"),
        (ParallelConfig(ep=0), 'parallel.ep (0) must be at least 1, or "auto"'),
        (ParallelConfig(deadline_s=0), "parallel.deadline_s (0) must be positive and at most 1e+09 seconds"),
    ],
)
def test_values_that_cannot_be(config: ParallelConfig, problem: str) -> None:
    assert list(config.problems()) == [problem]
    assert not list(ParallelConfig().problems())


def test_deadlines_that_clocks_cannot_hold() -> None:
    assert not list(deadline_problems("run.patience", 1e9))
    for seconds in (1.1e9, float("inf"), float("nan"), -1.0):
        assert len(list(deadline_problems("run.patience", seconds))) == 1


def test_choices_are_listed() -> None:
    assert list_divisors(12) == "1, 2, 3, 4, 6, 12"
