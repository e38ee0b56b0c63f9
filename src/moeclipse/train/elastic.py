"""Runs whose number of ranks may change: `--ranks 2:4`, or torchrun with `--nnodes 1:2`.

    layout_for(config, 3, most=4)      # the configuration of the same run on three ranks

What was written down stays: tp and pp, because they say what of the model fits on a rank, and ep where it is
a number. dp follows the ranks, and so does an ep that is "auto". The batch of a step is that of all ranks
together, so samples and losses stay, too; checkpoints are read at any layout.

Contract. Every number that a run could be left with is tried before a rank starts. Those between the least
and the most that no layout fits (three ranks with tp = 2) are passed over, and ranks stay idle; the least and
the most themselves must fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moeclipse.core.config import with_values
from moeclipse.train.config import TrainConfig, layout_problems

RANGE = re.compile(r"(\d{1,6})(?::(\d{1,6}))?")
EXPECTED = 'a number, two as in 2:4, or "auto"'


@dataclass(frozen=True, kw_only=True)
class RankRange:
    """How many ranks a run may have; both 0: as many as there are devices."""

    least: int = 0
    most: int = 0

    @classmethod
    def read(cls, text: str) -> RankRange | None:
        """None for what is no range."""
        found = RANGE.fullmatch(text)
        if text == "auto":
            return cls()
        if found is None:
            return None
        least = int(found[1])
        return cls(least=least, most=int(found[2] or least))

    @property
    def changes(self) -> bool:
        return self.least < self.most


def layout_for(config: TrainConfig, num_ranks: int, most: int) -> TrainConfig:
    """The configuration for so many ranks of at most `most`, for which it was written."""
    return config if num_ranks == most else with_values(config, {"parallel.dp": "auto"})


def possible(config: TrainConfig, ranks: RankRange) -> list[int]:
    """The numbers of ranks that the run can go on with."""
    return [
        number
        for number in range(ranks.least, ranks.most + 1)
        if not any(layout_problems(layout_for(config, number, ranks.most), number))
    ]


def range_problems(config: TrainConfig, ranks: RankRange, host: int = 0) -> Iterator[str]:
    """Why a run could not shrink as far as it is meant to; of the most the usual rules speak.

    `host`: under torchrun, whose hosts of so many ranks come and go as a whole; none can be passed over.
    """
    if not ranks.changes:
        return
    given = f"ranks ({ranks.least}:{ranks.most})"
    if host and (ranks.least % host or ranks.most % host):
        yield f"{given}: both must be multiples of {host}, the ranks of a host, which come and go together"
        return
    for number in range(ranks.least, ranks.most, host) if host else (ranks.least,):
        for problem in layout_problems(layout_for(config, number, ranks.most), number):
            yield f"{given}: with {number} of them {problem}"


def largest(numbers: Sequence[int], ranks: int) -> int:
    """The largest of `numbers` that so many ranks suffice for; 0 where there is none."""
    return max((number for number in numbers if number <= ranks), default=0)
