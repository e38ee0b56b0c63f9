"""Runs one rank's part of a verified program, op by op, in host launch order.

    transfer   launched at once on its lane; what it needs stands before it on the lanes it depends on
    compute    first waits for the transfers among its deps, then runs

The caller says what an op does: `run(op)` returns a transfer under way, or None for compute. On CUDA
nothing here blocks the host: a wait orders streams. Nothing runs that the verifier has not seen, so the
order that was proved free of deadlock, and simulated, is the order that runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from moeclipse.schedule.check import Verified
from moeclipse.schedule.op import Op


class Transfer(Protocol):
    def get(self) -> Any:
        """Wait until what follows may use the result."""


def execute(verified: Verified, rank: int, run: Callable[[Op], Transfer | None]) -> None:
    """Run `rank`'s ops; when this returns, every transfer has been waited for."""
    under_way: list[Transfer | None] = []
    for op in verified.program.ranks[rank]:
        for position in op.deps:
            transfer = under_way[position]
            if transfer is not None:
                transfer.get()
        try:
            under_way.append(run(op))
        except Exception as error:
            error.add_note(f"in op {op} of {verified.program.name} on rank {rank}")
            raise
    for transfer in under_way:
        if transfer is not None:
            transfer.get()
