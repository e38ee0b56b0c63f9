"""What each rank of a program launches, as text."""

from __future__ import annotations

from moeclipse.schedule.op import Program


def orders(program: Program) -> list[str]:
    return [" ".join(map(str, ops)) for ops in program.ranks]
