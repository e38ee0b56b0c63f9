"""What is left at "auto": one way from what may be taken to what stays, whatever the setting.

    candidates   what may be taken, and what each costs: seconds of a trial, where the slowest rank counts, or
                 of a simulation, or bytes; all ranks know the same, so all decide alike
    decision     the cheapest that wins, by more than its cost may be off by; else the plain one stays
    record       what follows from a clock, or from memory that is left, is written before it acts
                 (`train/run/choices`); what follows from the configuration alone is decided anew
    resume       who goes on, or repeats a run, takes what is written and tries nothing

Where each setting is decided, and by what:

    wires                comm/transports/fastest         messages of two sizes
    chunks, groups       moe/tune/cut_choice             calls of a layer, forward and backward
    shadows              moe/tune/shadow_choice          a layer's prices, against what asking takes
    overlap, schedule    train/run/resolve_auto          the simulated step
    spare slots          train/placement/spare_slots     memory that is left
    recompute            train/step/recompute            memory that is left
    experts that move    train/placement/may_move        rules; then `balance/planner` with a layer's prices
    all by whole steps   train/run/tune                  wires, cuts and peer memory together

`Auto` is the decision, the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Chosen = tuple[dict[str, Any], list[str]]
"""Keys of a configuration with their values, and what is to be said of them."""


@dataclass(frozen=True, kw_only=True)
class Auto(Generic[T]):
    costs: Mapping[T, Any]
    """Of each candidate; of equal ones the first is taken."""
    plain: T
    """What stays where none wins, whether it is among them or not."""
    wins: Callable[[T], bool]

    @property
    def choice(self) -> T:
        ranked = sorted(self.costs, key=lambda one: self.costs[one])
        return next(filter(self.wins, ranked), self.plain)
