"""What stays of several candidates: the cheapest that wins, the plain one where none does."""

from __future__ import annotations

from moeclipse.core.auto import Auto


def test_the_cheapest_of_those_that_win_is_taken() -> None:
    costs = {"plain": 10.0, "cut": 9.0, "peer": 7.0, "lucky": 6.0}

    def choice(margin: float, but: str = "") -> str:
        wins = Auto(costs=costs, plain="plain", wins=lambda one: one != but and costs[one] * margin <= 10.0)
        return wins.choice

    assert choice(1.2) == "lucky"
    assert choice(1.2, but="lucky") == "peer"
    assert choice(1.5, but="lucky") == "plain"
    assert choice(2.0) == "plain"


def test_of_equal_ones_the_first_is_taken_and_the_plain_one_need_not_be_among_them() -> None:
    assert Auto(costs={"b": 1, "a": 1}, plain="as it is", wins=lambda _: True).choice == "b"
    assert Auto(costs={}, plain="as it is", wins=lambda _: True).choice == "as it is"
    order = {"few": (1, 5.0), "many, fast": (2, 1.0), "few, fast": (1, 2.0)}
    assert Auto(costs=order, plain="none", wins=lambda _: True).choice == "few, fast"
