"""Everything goes together with everything: each pair of levels is trained and exact, or refused at once.

`factors` says what is combined, `cover` chose the rows, `bed` trains and compares them.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from bed import compare
from cover import Item, all_of, combined, covered, read_cases, read_refused
from factors import FACTORS, Case, expert_ranks, usual_row

CASES = read_cases()
EXACT = [case for case in CASES if case.dtype == "float64"]


def sample() -> set[int]:
    """Rows, few, in which every level appears."""
    left: set[Item] = {(factor, level) for factor, levels in FACTORS.items() for level in levels}
    chosen: set[int] = set()
    while left:
        gains = [len(left & set(case.row.items())) for case in EXACT]
        best = gains.index(max(gains))
        chosen.add(best)
        left -= set(EXACT[best].row.items())
    return chosen


SAMPLE = sample()
MANY = ("many", "uneven")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A text that stays: whether it pays to lend an expert hangs on it."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(Path(__file__).with_name("corpus.txt").read_text())
    return str(path)


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.full) for n in range(len(CASES))],
)
def test_a_combination_is_exact(number: int, corpus: str, tmp_path: Path) -> None:
    case = CASES[number]
    assert not case.refused, f"{case}: write the table anew with cover.py"
    try:
        happened = compare(case, corpus, tmp_path)
    except AssertionError as error:
        raise AssertionError(f"{case}\n{error}") from None
    # What is to be combined must have taken place. The loads of few tokens may be even by chance, and then
    # there is nothing to move or to lend; it was asked for.
    stays = number not in SAMPLE and case.row["tokens"] not in MANY and happened["proposals"]
    assert happened["plans"] or stays or not plans(case), case
    by_chance = number not in SAMPLE and happened["asked"]
    assert happened["lent"] or by_chance or not lends(case), case


def plans(case: Case) -> bool:
    """Whether experts move between the first step and the last: a plan is taken behind the second."""
    several = expert_ranks(case.setting.layout, case.row) > 1
    return several and case.setting.config("any").placement.moves and case.row["hand-over"] != "from one"


def lends(case: Case) -> bool:
    """Whether costs and tokens are such that the policy lends in any case."""
    several = expert_ranks(case.setting.layout, case.row) > 1
    return several and case.row["shadow"] == "auto" and case.row["tokens"] in MANY


def test_every_pair_is_in_a_row_or_refused() -> None:
    found, refused = covered(EXACT, 2), set(read_refused())
    assert found | refused == set(all_of(2)), "write the table anew with cover.py"
    assert not found & refused


def test_every_level_goes_with_every_type() -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        rows = [case for case in CASES if case.dtype == dtype]
        assert covered(rows, 1) == set(all_of(1))


@pytest.mark.parametrize("pair", read_refused(), ids=str)
def test_a_refused_pair_is_refused_with_that_reason(pair: tuple[Item, Item]) -> None:
    said = Case(usual_row(dict(pair))).refused
    assert "; ".join(said) == read_refused()[pair]
    assert said


def test_a_row_has_one_level_of_each_factor() -> None:
    assert all(list(case.row) == list(FACTORS) for case in CASES)
    assert len({(case.dtype, *case.row.values()) for case in CASES}) == len(CASES)
    assert len(list(combined(usual_row(), 2))) == len(list(itertools.combinations(FACTORS, 2)))
