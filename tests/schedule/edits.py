"""Programs with one thing changed."""

from __future__ import annotations

from dataclasses import replace

from moeclipse.schedule.op import Op, Program


def with_rank(program: Program, rank: int, ops: list[Op]) -> Program:
    ranks = list(program.ranks)
    ranks[rank] = tuple(ops)
    return replace(program, ranks=tuple(ranks))


def swapped(ops: list[Op], i: int, j: int) -> list[Op]:
    """Two ops change places; deps follow what they meant."""
    moved = {i: j, j: i}
    out = list(ops)
    out[i], out[j] = out[j], out[i]
    return [op._replace(deps=tuple(sorted(moved.get(d, d) for d in op.deps))) for op in out]


def without(ops: list[Op], i: int) -> list[Op]:
    kept = [op for position, op in enumerate(ops) if position != i]
    return [op._replace(deps=tuple(d - (d > i) for d in op.deps if d != i)) for op in kept]
