"""Thousands of programs with one thing wrong, judged twice: by the verifier, and by running them (`oracle`).

What does not work on one of the three machines of the oracle must be refused, with words and not with a
crash; what works on all of them should pass.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from mutations import MUTATIONS, Change, Unfit
from oracle import why_broken
from whole_steps import whole

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.legal import SCHEDULES
from moeclipse.schedule.lower import lower
from moeclipse.schedule.op import Program, overlap_alone
from moeclipse.schedule.shape import Activation, LayerShape, Shadow
from moeclipse.schedule.smart import backward_of, end_units, exchange_shape, smart
from moeclipse.schedule.templates import Expansion, expand, replicate

LAYERS = [LayerShape(), LayerShape(moe=False)]


def action_programs() -> Iterator[Program]:
    for name in SCHEDULES:
        actions = build(name, 1 if name in ("pp1", "layers") else 2, 4)
        yield actions
        yield lower(actions, reduce=name in ("zb-v", "vpp+1"))
    yield overlap_alone(build("dualpipev", 2, 4))
    yield lower(build("zb-v", 3, 5))


def layer_programs() -> Iterator[Program]:
    for name in SCHEDULES:
        actions = build(name, 1 if name in ("pp1", "layers") else 2, 4)
        how = Expansion(chunks=2, split="layer") if name in ("vpp+1", "1f1b") else Expansion()
        yield expand(actions, LAYERS if name in ("1f1b", "zb-v") else [LayerShape()], how)
    yield expand(build("1f1b", 2, 2), [LayerShape(recompute="full")], Expansion(chunks=2), reduce=True)
    yield expand(build("dualpipev", 2, 4), [LayerShape(shared=False)], Expansion(overlap="off"))
    pending = Activation(attn_grad=-0.1, shared_grad=0.05, mlp_grad=0.2)
    yield expand(build("zb-h1", 2, 2), [LayerShape(activation=pending)])
    yield replicate(expand(build("vpp+1", 2, 2), [LayerShape()]), 2)
    yield replicate(expand(build("1f1b", 2, 2), [LayerShape(recompute="moe")], reduce=True), 2)
    yield expand(build("1f1b", 2, 2), [[LayerShape()], [LayerShape(), LayerShape(head=True)]])


def exchange_programs() -> Iterator[Program]:
    shadow = Shadow(expert=0, owner=0, ranks=(1,))
    for shape in (
        exchange_shape(4),
        exchange_shape(5, group_size=2, chunks=2),
        exchange_shape(3, units=end_units(3), shadows=[shadow]),
        exchange_shape(2, experts_per_rank=2, per_expert=True),
        exchange_shape(3, blocking=True),
    ):
        yield smart(shape)
        yield smart(backward_of(shape))


def whole_programs() -> Iterator[Program]:
    yield whole("pp1", "pair+self", "full")
    yield whole("1f1b", tied=True)
    yield whole("dualpipev", "pair")
    shared = whole("zb-h1", copies=(1, 2, 1))
    yield shared
    yield replicate(shared)


PROGRAMS = [*action_programs(), *layer_programs(), *exchange_programs(), *whole_programs()]


def broken(program: Program) -> str | None:
    """A program of whole actions is run as what lowering makes of it; of transfers it says nothing itself."""
    if not program.explicit and any(op.deps or op.comm or op.peers for ops in program.ranks for op in ops):
        return "whole actions have no transfers to speak of"
    try:
        return why_broken(program if program.explicit else lower(program))
    except (ScheduleError, ValueError, IndexError, TypeError) as error:
        return f"cannot be lowered: {error}"


def judge(seed: int, mutants: int) -> Counter[str]:
    """How many of each verdict; raises for a broken mutant that passes."""
    rng = random.Random(seed)
    verdicts: Counter[str] = Counter()
    while verdicts["mutants"] < mutants:
        mutation, program = rng.choice(MUTATIONS), rng.choice(PROGRAMS)
        try:
            mutant = mutation(Change(program, rng))
        except Unfit:
            continue
        if mutant == program:
            continue
        why = broken(mutant)
        try:
            verify(mutant)
        except ScheduleError as error:
            refused: str | None = str(error)
        else:
            refused = None
        verdicts["mutants"] += 1
        verdicts[f"kind {mutation.__name__}"] += 1
        if refused is None:
            assert why is None, f"{mutation.__name__} of {program.name} passes, but {why}"
        verdicts["broken" if why else "sound"] += 1
        if why is None and refused is not None:
            verdicts["sound and refused"] += 1
            verdicts[f"refused {mutation.__name__}: {refused[:150]}"] += 1
    return verdicts


@pytest.mark.parametrize("index", range(len(PROGRAMS)))
def test_both_judges_accept_what_generators_make(index: int) -> None:
    verify(PROGRAMS[index])
    assert broken(PROGRAMS[index]) is None


def test_no_broken_mutant_passes() -> None:
    verdicts = judge(seed=0, mutants=400)
    assert verdicts["broken"] > 280
    assert verdicts["sound"] > 20
    assert verdicts["sound and refused"] <= 0.01 * verdicts["sound"], verdicts


@pytest.mark.full
def test_none_of_many_broken_mutants_passes() -> None:
    verdicts = judge(seed=1, mutants=8000)
    assert sum(name.startswith("kind") for name in verdicts) >= 30
    assert verdicts["broken"] > 5000
    assert verdicts["sound and refused"] < 0.01 * verdicts["sound"], verdicts
