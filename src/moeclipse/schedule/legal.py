"""Which (ranks, microbatches, stages per rank) a schedule accepts, and the nearest ones that it does.

A rule is a predicate with a sentence. Being refused is useful only with a way out, so the error tries
other microbatch counts first (cheapest to change), then stages per rank, then ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from moeclipse.core.errors import ScheduleError

SEARCH_FACTOR = 4
"""How far beyond the given number a suggestion may lie."""


class Setting(NamedTuple):
    """P ranks, M microbatches, V stages per rank."""

    P: int
    M: int
    V: int


@dataclass(frozen=True, kw_only=True)
class Rule:
    text: str
    holds: Callable[[Setting], bool]


ONE_RANK = Rule(text="one rank", holds=lambda s: s.P == 1)
ONE_STAGE = Rule(text="one stage per rank", holds=lambda s: s.V == 1)
TWO_STAGES = Rule(text="two stages per rank", holds=lambda s: s.V == 2)
RULES: dict[str, tuple[Rule, ...]] = {
    "gpipe": (ONE_STAGE,),
    "1f1b": (ONE_STAGE,),
    "1f1b-pairs": (ONE_STAGE,),
    "pp1": (ONE_RANK, ONE_STAGE),
    "vpp": (),
    "vpp+1": (),
    "zb-h1": (ONE_STAGE,),
    "zb-h2": (ONE_STAGE,),
    "zb-m": (),
    "zb-v": (TWO_STAGES,),
    "dualpipe": (
        TWO_STAGES,
        Rule(text="an even number of ranks", holds=lambda s: s.P % 2 == 0),
        Rule(text="an even number of microbatches", holds=lambda s: s.M % 2 == 0),
        Rule(text="at least two microbatches per rank", holds=lambda s: s.M >= 2 * s.P),
    ),
    "dualpipev": (
        TWO_STAGES,
        Rule(text="at least two microbatches per rank", holds=lambda s: s.M >= 2 * s.P),
    ),
    "layers": (ONE_RANK,),
}
SCHEDULES = tuple(RULES)


def default_stages_per_rank(name: str) -> int:
    """What a schedule takes when nobody says."""
    if TWO_STAGES in RULES.get(name, ()) or name in ("vpp", "vpp+1"):
        return 2
    return 1


def broken_rules(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[str]:
    setting = Setting(num_ranks, num_microbatches, stages_per_rank)
    if min(setting) < 1:
        return ["at least one rank, one microbatch and one stage per rank"]
    return [rule.text for rule in RULES[name] if not rule.holds(setting)]


def nearest_legal(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> list[tuple[int, int, int]]:
    """The nearest legal settings: fewest numbers changed, then smallest change, one on each side."""

    def around(value: int) -> Iterator[int]:
        yield value
        for distance in range(1, SEARCH_FACTOR * max(value, 4) + 1):
            yield value + distance
            if value > distance:
                yield value - distance

    def legal(P: int, M: int, V: int) -> bool:
        return not broken_rules(name, P, M, V)

    P, M, V = max(num_ranks, 1), max(num_microbatches, 1), max(stages_per_rank, 1)
    found = [
        next(((P, m, V) for m in around(M) if m <= M and legal(P, m, V)), None),
        next(((P, m, V) for m in around(M) if m >= M and legal(P, m, V)), None),
        next(((P, M, v) for v in around(V) if legal(P, M, v)), None),
        next(((p, M, V) for p in around(P) if p <= P and legal(p, M, V)), None),
        next(((p, M, V) for p in around(P) if p >= P and legal(p, M, V)), None),
    ]
    if not any(found):  # two numbers must change
        V = default_stages_per_rank(name)
        found = [next(((p, m, V) for p in around(P) for m in around(M) if legal(p, m, V)), None)]
    return list(dict.fromkeys(setting for setting in found if setting is not None))


def require_legal(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> None:
    """Raise with the broken rules and the nearest legal settings."""
    broken = broken_rules(name, num_ranks, num_microbatches, stages_per_rank)
    if not broken:
        return
    choices = nearest_legal(name, num_ranks, num_microbatches, stages_per_rank)
    listed = "; ".join(f"ranks={p}, microbatches={m}, stages_per_rank={v}" for p, m, v in choices)
    raise ScheduleError(
        f"{name} needs {' and '.join(broken)}, but got ranks={num_ranks}, microbatches={num_microbatches}, "
        f"stages_per_rank={stages_per_rank}; nearest legal: {listed}"
    )
