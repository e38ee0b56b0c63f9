"""Rows of levels that together contain every pair of them, as few as a greedy search finds.

    python tests/combinations/cover.py          # writes cases.csv and refused.csv anew; says how many

Each row begins with a pair that no row has yet and goes on factor by factor, in random order, with the level
that adds most pairs. Only a whole configuration can say whether it is refused, so rows are made and asked;
the more often that fails, the more factors stay as usual. A pair that is refused even then goes to
refused.csv with the reason. The seed is fixed: the same factors give the same table.
"""

from __future__ import annotations

import csv
import itertools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from factors import DTYPES, FACTORS, Case, Row, usual_row

HERE = Path(__file__).parent
CASES, REFUSED = HERE / "cases.csv", HERE / "refused.csv"
TRIES, ENOUGH = 120, 6
Item = tuple[str, str]
Pair = tuple[Item, Item]


def items() -> list[Item]:
    return [(factor, level) for factor, levels in FACTORS.items() for level in levels]


def combined(row: Row, size: int) -> Iterator[tuple[Item, ...]]:
    """All combinations of so many levels of a row, in the order of factors."""
    return itertools.combinations([(factor, row[factor]) for factor in FACTORS], size)


def all_of(size: int) -> Iterator[tuple[Item, ...]]:
    """All combinations of so many levels, of different factors."""
    for factors in itertools.combinations(FACTORS, size):
        yield from itertools.product(*([(factor, level) for level in FACTORS[factor]] for factor in factors))


def grow(
    start: Iterable[Item], open_pairs: set[Pair], usual_share: float, draw: random.Random
) -> dict[str, str]:
    """A whole row that contains `start`."""
    order = {factor: number for number, factor in enumerate(FACTORS)}
    row = dict(start)
    usual = usual_row(row)
    left = [factor for factor in FACTORS if factor not in row]
    draw.shuffle(left)
    for factor in left:
        if draw.random() < usual_share:
            row[factor] = usual[factor]
            continue

        def gain(level: str, factor: str = factor) -> int:
            pairs = (
                ((other, chosen), (factor, level))
                if order[other] < order[factor]
                else ((factor, level), (other, chosen))
                for other, chosen in row.items()
            )
            return sum(pair in open_pairs for pair in pairs)

        levels = draw.sample(list(FACTORS[factor]), len(FACTORS[factor]))
        row[factor] = max(levels, key=gain)
    return {factor: row[factor] for factor in FACTORS}


def search(pair: Pair, open_pairs: set[Pair], dtype: str, draw: random.Random) -> dict[str, str] | None:
    """The best of a few rows with this pair that are not refused; None where all are."""
    best, best_gain, found = None, 0, 0
    for attempt in range(TRIES):
        row = grow(pair, open_pairs, min(attempt / (TRIES - 1), 1.0), draw)
        gain = sum(new in open_pairs for new in combined(row, 2))
        if gain > best_gain and not Case(row, dtype).refused:
            best, best_gain, found = row, gain, found + 1
            if found == ENOUGH:
                break
    return best


def cover(draw: random.Random) -> tuple[list[Case], dict[Pair, str]]:
    """Rows in float64 for all pairs; then some for every level in each other type."""
    cases: list[Case] = []
    refused: dict[Pair, str] = {}
    pairs: list[Pair] = list(all_of(2))  # type: ignore[arg-type]
    draw.shuffle(pairs)
    open_pairs = set(pairs)
    for pair in pairs:
        if pair not in open_pairs:
            continue
        row = search(pair, open_pairs, "float64", draw)
        if row is None:
            refused[pair] = "; ".join(Case(usual_row(dict(pair))).refused)
            open_pairs.discard(pair)
        else:
            cases.append(Case(row))
            open_pairs.difference_update(combined(row, 2))
    chance = covered(cases, 2)  # some were found on the way to others
    refused = {pair: reason for pair, reason in refused.items() if pair not in chance}
    for dtype in DTYPES:
        cases += every_level_once(dtype, draw)
    return cases, refused


def every_level_once(dtype: str, draw: random.Random) -> Iterator[Case]:
    left = items()
    draw.shuffle(left)
    while left:
        first = left[0]
        wanted = set(left)
        for attempt in range(TRIES):
            usual, row = usual_row(dict([first])), {}
            for factor, levels in FACTORS.items():
                new = [level for level in levels if (factor, level) in wanted] or list(levels)
                keep_usual = draw.random() < attempt / TRIES
                row[factor] = usual[factor] if keep_usual else draw.choice(new)
            row[first[0]] = first[1]
            if not Case(row, dtype).refused:
                yield Case(row, dtype)
                left = [item for item in left if row[item[0]] != item[1]]
                break
        else:
            raise AssertionError(f"{first} is refused in every row of {dtype}")


def write(cases: Iterable[Case], refused: dict[Pair, str]) -> None:
    with CASES.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["dtype", *FACTORS])
        table.writerows([case.dtype, *(case.row[factor] for factor in FACTORS)] for case in cases)
    with REFUSED.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["factor", "level", "factor", "level", "reason"])
        table.writerows([*first, *second, reason] for (first, second), reason in sorted(refused.items()))


def read_cases() -> list[Case]:
    with CASES.open(newline="") as file:
        return [
            Case({factor: line[factor] for factor in FACTORS}, line["dtype"]) for line in csv.DictReader(file)
        ]


def read_refused() -> dict[Pair, str]:
    with REFUSED.open(newline="") as file:
        return {((a, b), (c, d)): reason for a, b, c, d, reason in list(csv.reader(file))[1:]}


def covered(cases: Iterable[Case], size: int) -> set[tuple[Item, ...]]:
    return {found for case in cases for found in combined(case.row, size)}


if __name__ == "__main__":
    found, out = cover(random.Random(1))
    write(found, out)
    exact = [case for case in found if case.dtype == "float64"]
    print(f"{len(found)} cases, {len(exact)} of them in float64; {len(out)} pairs refused")
    for size, what in ((2, "pairs"), (3, "triples")):
        print(f"{what}: {len(covered(exact, size))} of {sum(1 for _ in all_of(size))}")
