"""Which rank holds which expert.

Idea: a placement is a table of slots. `slots[p]` lists what the slots of rank p of an expert group hold: an
expert, or -1 for an empty slot. An expert may stand on several ranks (replicas); one of them is its primary,
which speaks for it where one has to. Ranks may differ in how many experts they hold.

Contract: immutable, and checked when it is made: every expert stands somewhere, never twice on one rank, and
its primary holds it. `old.moves(new)` says what has to travel, and nothing else does: the router speaks of
experts, not of slots, so it never changes.

Hazard: a slot is a place in memory. Build the next placement with `arranged_like(current)`; otherwise experts
that stay on their rank may change slots, which costs a copy for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from moeclipse.core.errors import ConfigError
from moeclipse.core.outside import parse_json, read_text
from moeclipse.core.shares import even_bounds

EMPTY = -1
LISTED = 8
"""So many experts that no rank holds are named."""


def primary_bounds(num_experts: int, num_replicas: int, first: int) -> list[int]:
    """Who is primary for which of a rank's experts, spread evenly over the replicas.

    Returns bounds per replica: replica r is primary for experts bounds[r]:bounds[r+1] of the rank. The
    larger shares start at replica `first` (the layer's number), so that over layers they even out.
    """
    share, more = divmod(num_experts, num_replicas)
    sizes = [share + ((replica - first) % num_replicas < more) for replica in range(num_replicas)]
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return bounds


@dataclass(frozen=True, kw_only=True)
class Move:
    """One expert's way to `slot` of rank `target`."""

    expert: int
    source: int
    target: int
    slot: int
    weights: bool
    """The target did not hold the expert: parameters travel."""
    state: bool
    """The target becomes the primary: master weights, moments and step counts travel."""


@dataclass(frozen=True)
class Placement:
    slots: tuple[tuple[int, ...], ...]
    primary: tuple[int, ...] = ()
    """The rank of each expert's primary; left out: the first rank that holds it."""

    def __post_init__(self) -> None:
        problems = _slot_problems(self.slots, len(self.primary) or None)
        if problems:
            raise ConfigError(problems)
        if not self.primary:
            object.__setattr__(self, "primary", tuple(ranks[0] for ranks in self.holders))
        problems = [
            f"the primary of expert {expert} is rank {rank}, which does not hold it; "
            f"choose one of its ranks {list(self.holders[expert])}"
            for expert, rank in enumerate(self.primary)
            if rank not in self.holders[expert]
        ]
        if problems:
            raise ConfigError(problems)

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int) -> Placement:
        bounds = even_bounds(num_experts, num_ranks)
        return cls(tuple(tuple(range(bounds[p], bounds[p + 1])) for p in range(num_ranks)))

    @classmethod
    def parse(
        cls,
        value: Any,
        *,
        num_experts: int | None = None,
        num_ranks: int | None = None,
        max_slots: int | None = None,
    ) -> Placement:
        """A placement from `[[0, 3], [1, 2], ...]`, or from `{"slots": [...], "primary": [...]}`.

        What is expected of it is checked at once: all problems come in one error.
        """
        table: Any = value
        primary: Any = None
        if isinstance(value, dict):
            table, primary = value.get("slots"), value.get("primary")
        if isinstance(value, dict) and set(value) - {"slots", "primary"}:
            unknown = sorted(set(value) - {"slots", "primary"})
            raise ConfigError(
                f"a placement has the keys slots and primary, not {', '.join(map(repr, unknown))}"
            )
        if not _is_table(table):
            raise ConfigError(
                f"a placement is a list of experts for each rank, like [[0, 3], [1, 2], [1, 2], [0, 3]]; "
                f"given: {_shortened(value)}"
            )
        if primary is not None and not _is_row(primary):
            raise ConfigError(f"primary must list one rank for each expert; given: {_shortened(primary)}")
        slots = tuple(tuple(map(int, row)) for row in table)
        problems = [] if not primary else _primary_problems(primary, num_experts)
        problems += _slot_problems(slots, num_experts or (len(primary) if primary else None))
        if num_ranks is not None and len(slots) != num_ranks:
            problems.append(f"the placement speaks of {len(slots)} ranks, but there are {num_ranks}")
        if max_slots is not None:
            problems += [
                f"rank {rank} is given {len(row)} slots, but has {max_slots}; "
                "take experts away or raise the number of slots"
                for rank, row in enumerate(slots)
                if len(row) > max_slots
            ]
        if problems:
            raise ConfigError(problems)
        return cls(slots, tuple(map(int, primary or ())))

    @classmethod
    def from_json(cls, text: str, **expected: int | None) -> Placement:
        try:
            value = parse_json(text)
        except ValueError as error:
            raise ConfigError(f"a placement must be JSON, like [[0, 3], [1, 2]]: {error}") from None
        return cls.parse(value, **expected)

    @classmethod
    def load(cls, path: Path, **expected: int | None) -> Placement:
        if not path.is_file():
            raise ConfigError(f"there is no placement file {path}")
        try:
            return cls.from_json(read_text(path), **expected)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from None

    def to_json(self) -> str:
        rows = ",\n  ".join(json.dumps(row) for row in self.slots)
        return f'{{\n "slots": [\n  {rows}\n ],\n "primary": {json.dumps(self.primary)}\n}}\n'

    @property
    def num_ranks(self) -> int:
        return len(self.slots)

    @property
    def num_experts(self) -> int:
        return len(self.primary)

    @cached_property
    def num_replicas(self) -> int:
        """Slots that hold an expert."""
        return sum(len(experts) for experts in self.held)

    @cached_property
    def max_slots(self) -> int:
        return max(map(len, self.slots), default=0)

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """The experts of each rank in slot order, empty slots left out."""
        return tuple(tuple(expert for expert in row if expert != EMPTY) for row in self.slots)

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each expert, ascending."""
        where: dict[int, list[int]] = {}
        for rank, experts in enumerate(self.held):
            for expert in experts:
                where.setdefault(expert, []).append(rank)
        return tuple(tuple(where[expert]) for expert in range(len(where)))

    @cached_property
    def slot_of(self) -> tuple[int, ...]:
        """The place of each expert's primary when slots are counted rank by rank."""
        place, places = 0, {}
        for rank, row in enumerate(self.slots):
            for expert in row:
                places[rank, expert] = place
                place += 1
        return tuple(places[rank, expert] for expert, rank in enumerate(self.primary))

    @cached_property
    def slots_PS(self) -> np.ndarray:  # noqa: N802
        """The table as an array, short rows filled with -1. Read-only."""
        table = np.full((self.num_ranks, self.max_slots), EMPTY, dtype=np.int64)
        for rank, row in enumerate(self.slots):
            table[rank, : len(row)] = row
        table.setflags(write=False)
        return table

    @cached_property
    def holds_EP(self) -> np.ndarray:  # noqa: N802
        """Whether a rank holds an expert. Read-only."""
        holds = np.zeros((self.num_experts, self.num_ranks), dtype=bool)
        for rank, experts in enumerate(self.held):
            holds[list(experts), rank] = True
        holds.setflags(write=False)
        return holds

    def moves(self, new: Placement) -> tuple[Move, ...]:
        """What has to travel for `new` to hold, sorted by expert and target.

        State comes from the old primary. Parameters alone come from the holder that sends least so far: all
        replicas are equal, and a hot expert's primary should not send them all.
        """
        _refuse_other_shape(self, new)
        sends = [0] * self.num_ranks
        found: list[Move] = []
        for expert, ranks in enumerate(new.holders):
            old_primary, new_primary = self.primary[expert], new.primary[expert]
            for target in ranks:
                weights = target not in self.holders[expert]
                state = target == new_primary != old_primary
                if not (weights or state):
                    continue
                source = old_primary
                if not state:
                    source = min(self.holders[expert], key=lambda rank: (sends[rank], rank))
                sends[source] += 1
                slot = new.slots[target].index(expert)
                found.append(
                    Move(expert=expert, source=source, target=target, slot=slot, weights=weights, state=state)
                )
        return tuple(found)

    def arranged_like(self, old: Placement) -> Placement:
        """The same experts on the same ranks, in the slots and with the primaries of `old` where it can."""
        _refuse_other_shape(old, self)
        rows = []
        for after, before in zip(self.slots, old.slots, strict=True):
            row = [expert if expert in after else EMPTY for expert in before]
            row += [EMPTY] * (len(after) - len(row))
            coming = [expert for expert in after if expert != EMPTY and expert not in before]
            for place, expert in enumerate(row):
                if expert == EMPTY and coming:
                    row[place] = coming.pop(0)
            rows.append(tuple(row))
        primary = tuple(
            before if before in ranks else chosen
            for before, ranks, chosen in zip(old.primary, self.holders, self.primary, strict=True)
        )
        return Placement(tuple(rows), primary)

    def with_replicas(self, more: Iterable[tuple[int, Sequence[int]]]) -> Placement:
        """With experts added on ranks, behind their slots: what shadows make of it for one step."""
        rows = [list(row) for row in self.slots]
        for expert, ranks in more:
            for rank in ranks:
                rows[rank].append(expert)
        return Placement(tuple(map(tuple, rows)), self.primary)


def _refuse_other_shape(old: Placement, new: Placement) -> None:
    if (old.num_experts, old.num_ranks) != (new.num_experts, new.num_ranks):
        raise ConfigError(
            f"a placement of {old.num_experts} experts on {old.num_ranks} ranks cannot become one of "
            f"{new.num_experts} experts on {new.num_ranks} ranks"
        )


def _slot_problems(slots: Sequence[Sequence[int]], num_experts: int | None) -> list[str]:
    if not slots:
        return ["a placement needs at least one rank"]
    flat = [expert for row in slots for expert in row]
    if num_experts is None:
        num_experts = max(flat, default=EMPTY) + 1
    problems = []
    for rank, row in enumerate(slots):
        kept = [e for e in row if e != EMPTY]
        if len(set(kept)) == len(kept) and min(kept, default=0) >= 0 and max(kept, default=0) < num_experts:
            continue
        for expert in sorted({e for e in row if not EMPTY <= e < num_experts}):
            problems.append(
                f"rank {rank} is given expert {expert}, but experts are 0 to {num_experts - 1} "
                "(-1: empty slot)"
            )
        for expert in sorted({e for e in row if e != EMPTY and row.count(e) > 1}):
            problems.append(
                f"rank {rank} is given expert {expert} {row.count(expert)} times; "
                "a second copy on one rank helps nobody"
            )
    held = {expert for expert in flat if 0 <= expert < num_experts}
    missing = num_experts - len(held)
    if missing:
        # Only the first few are looked for: the number of experts is a user's, and may be absurd.
        first = list(islice((expert for expert in range(num_experts) if expert not in held), LISTED))
        word = "expert" if missing == 1 else "experts"
        problems.append(f"no rank holds {word} {_listed(first, missing)}; give each expert at least one slot")
    if num_experts == 0 and not problems:
        problems.append("a placement needs at least one expert; all slots are empty")
    return problems


def _primary_problems(primary: Sequence[int], num_experts: int | None) -> list[str]:
    if num_experts is not None and len(primary) != num_experts:
        return [f"primary lists {len(primary)} ranks, but there are {num_experts} experts"]
    return []


def _is_row(value: object) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(entry, int | np.integer) and not isinstance(entry, bool) for entry in value
    )


def _is_table(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(map(_is_row, value))


def _listed(first: Sequence[int], count: int) -> str:
    more = f" and {count - len(first)} more" if count > len(first) else ""
    return ", ".join(map(str, first)) + more


def _shortened(value: object, width: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= width else text[: width - 3] + "..."
