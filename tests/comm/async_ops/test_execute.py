"""The executor launches in the order of the program, waits for what an op needs, and lets go of the rest."""

from __future__ import annotations

import weakref

import pytest

from moeclipse.comm.async_ops.execute import Execution, execute, execute_settled
from moeclipse.comm.async_ops.lane import InFlight
from moeclipse.schedule import kinds
from moeclipse.schedule.check import Verified, verify
from moeclipse.schedule.kinds import A2A
from moeclipse.schedule.op import Op
from moeclipse.schedule.smart import exchange_shape, smart


class NotedTransfer:
    """A transfer that writes down when it is waited for."""

    def __init__(self, name: str, journal: list[str]) -> None:
        self.name, self.journal = name, journal

    def get(self) -> None:
        self.journal.append(f"got {self.name}")


def program() -> Verified:
    """S_F@0 S_F@1 S_F@2 C_F@0 R_F@0 C_F@1 R_F@1 C_F@2 R_F@2"""
    return verify(smart(exchange_shape(3)))


def recorded(verified: Verified, journal: list[str]) -> Execution:
    def run(op: Op) -> InFlight[None] | None:
        journal.append(str(op))
        return NotedTransfer(str(op), journal) if op.lane == A2A else None

    return Execution(verified, 0, run)


def test_an_op_waits_for_what_it_needs_and_for_nothing_else() -> None:
    journal: list[str] = []
    execution = recorded(program(), journal)
    execution.advance()
    assert journal == [
        *["S_F@0", "S_F@1", "S_F@2"],
        *["got S_F@0", "C_F@0", "R_F@0"],
        *["got S_F@1", "C_F@1", "R_F@1"],
        *["got S_F@2", "C_F@2", "R_F@2"],
    ]
    execution.get()
    assert journal[-3:] == ["got R_F@0", "got R_F@1", "got R_F@2"]


def test_a_piece_ends_before_the_op_it_stops_at() -> None:
    journal: list[str] = []
    execution = recorded(program(), journal)
    execution.advance(3)
    assert journal == ["S_F@0", "S_F@1", "S_F@2"], "what has left is not waited for"
    execution.advance(3)
    assert len(journal) == 3
    execution.advance(4)
    assert journal[3:] == ["got S_F@0", "C_F@0"]


def test_another_order_waits_all_the_same() -> None:
    verified, journal = program(), list[str]()

    def run(op: Op) -> InFlight[None] | None:
        journal.append(str(op))
        return NotedTransfer(str(op), journal) if op.lane == A2A else None

    names = [str(op) for op in verified.program.ranks[0]]
    wanted = ["S_F@0", "C_F@0", "S_F@1", "S_F@2", "R_F@0", "C_F@1", "R_F@1", "C_F@2", "R_F@2"]
    execute(verified, 0, run, [names.index(name) for name in wanted])
    assert [line for line in journal if not line.startswith("got ")] == wanted
    assert journal[1] == "got S_F@0"
    assert journal[-3:] == ["got R_F@0", "got R_F@1", "got R_F@2"]


def test_what_was_waited_for_is_forgotten() -> None:
    """A transfer holds its tensors: a program of many microbatches must not keep them to its end."""
    alive: dict[str, weakref.ref[NotedTransfer]] = {}

    def run(op: Op) -> InFlight[None] | None:
        if op.kind is kinds.C_F:
            assert alive[f"S_F@{op.step}"]() is None, "rows that have arrived are kept once more"
        if op.lane != A2A:
            return None
        transfer = NotedTransfer(str(op), [])
        alive[str(op)] = weakref.ref(transfer)
        return transfer

    execution = Execution(program(), 0, run)
    execution.advance()
    assert [name for name, ref in alive.items() if ref() is not None] == ["R_F@0", "R_F@1", "R_F@2"]
    execution.get()
    assert not any(ref() for ref in alive.values())


def test_an_op_that_fails_is_named() -> None:
    def run(op: Op) -> InFlight[None] | None:
        if op.kind is kinds.C_F:
            raise ValueError("no memory left")
        return None

    with pytest.raises(ValueError, match="no memory left") as caught:
        execute(program(), 0, run)
    (note,) = caught.value.__notes__
    assert note.startswith("in op C_F@0 of ")
    assert note.endswith(" on rank 0")


def test_a_settled_run_ends_each_op_before_the_next() -> None:
    journal: list[str] = []

    def run(op: Op) -> InFlight[None] | None:
        journal.append(str(op))
        return NotedTransfer(str(op), journal) if op.lane == A2A else None

    execute_settled(program(), 0, run, lambda op: journal.append(f"settled {op}"))
    ops = [line for line in journal if " " not in line]
    assert sorted(ops) == sorted(map(str, program().program.ranks[0]))
    expected: list[str] = []
    for op in ops:
        expected += [op, f"settled {op}"] if op.startswith("C") else [op, f"got {op}", f"settled {op}"]
    assert journal == expected
