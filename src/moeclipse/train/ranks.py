"""What saving and loading need of the other ranks: to hear from all of them.

`gather_objects` is the only collective, and a barrier as well. `together` turns it into an agreement: every
rank does its part, and if one of them fails, all of them know before anyone goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypedDict, TypeVar

from moeclipse.comm.mesh import Mesh

T = TypeVar("T")


class Ranks(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def gather_objects(self, obj: T, /) -> list[T]:
        """Every rank's JSON-able object, in rank order, on every rank."""
        ...


@dataclass(frozen=True)
class PatientRanks:
    """The ranks of a mesh, when one of them may be busy with a disk for minutes."""

    mesh: Mesh
    patience_s: float

    @property
    def rank(self) -> int:
        return self.mesh.rank

    @property
    def num_ranks(self) -> int:
        return self.mesh.num_ranks

    def gather_objects(self, obj: T, /) -> list[T]:
        return self.mesh.gather_objects(obj, self.patience_s)


class OneRank:
    """A process on its own: enough to read a checkpoint from a script."""

    rank = 0
    num_ranks = 1

    def gather_objects(self, obj: T) -> list[T]:
        return [obj]


class RanksFailed(Exception):
    """Some ranks could not do their part; the same text on every rank."""


class Attempt(TypedDict, Generic[T], total=False):
    """What came of one rank's part: one of both."""

    result: T
    problem: str


def together(ranks: Ranks, work: Callable[[], T], words: Callable[[Exception], str] = str) -> list[T]:
    """The JSON-able results of `work` on all ranks; RanksFailed on all ranks if it failed on one."""
    return agree(ranks, attempt(work, words))


def attempt(work: Callable[[], T], words: Callable[[Exception], str] = str) -> Attempt[T]:
    """What came of this rank's part, JSON-able; it may be done on any thread."""
    try:
        return {"result": work()}
    except Exception as error:
        return {"problem": words(error) or repr(error)}


def agree(ranks: Ranks, mine: Attempt[T]) -> list[T]:
    """The second half of `together`: all ranks learn what came of every `attempt`. Collective."""
    everyone = ranks.gather_objects(mine)
    problems = [f"rank {rank}: {one['problem']}" for rank, one in enumerate(everyone) if "problem" in one]
    if problems:
        raise RanksFailed("; ".join(problems))
    return [one["result"] for one in everyone if "result" in one]
