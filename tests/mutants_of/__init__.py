"""The mutants of all rooms, in the order of the rooms' layers."""

from __future__ import annotations

from mutants_of import (
    balance,
    cli,
    comm,
    core,
    cost,
    hf,
    host_weights,
    model,
    moe,
    ops,
    pipeline,
    plan,
    report,
    schedule,
    sim,
    tensor,
    testing,
    train,
)
from mutants_of.mutant import Mutant

ROOMS = (
    core,
    cost,
    schedule,
    balance,
    sim,
    plan,
    report,
    ops,
    comm,
    tensor,
    testing,
    moe,
    pipeline,
    model,
    hf,
    train,
    host_weights,
    cli,
)
MUTANTS: tuple[Mutant, ...] = tuple(mutant for room in ROOMS for mutant in room.MUTANTS)
