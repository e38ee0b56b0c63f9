"""Runs one rank's part of a verified program, op by op, in host launch order.

    transfer   launched at once on its lane; what it needs stands before it on the lanes it depends on
    compute    first waits for the transfers among its deps, then runs

The caller says what an op does: `run(op)` returns what is in flight, or None for compute. On CUDA
nothing here blocks the host: a wait orders streams. Nothing runs that the verifier has not seen, so the
order that was proved free of deadlock, and simulated, is the order that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moeclipse.comm.async_ops.lane import InFlight
from moeclipse.schedule.check import Verified
from moeclipse.schedule.op import Op


class Execution:
    """One rank's part of a program, run in pieces where something else runs in between."""

    def __init__(
        self,
        verified: Verified,
        rank: int,
        run: Callable[[Op], InFlight[object] | None],
        order: Sequence[int] | None = None,
    ) -> None:
        """`order`: of positions; left out, that of the program."""
        self.program, self.rank = verified.program, rank
        self.ops = self.program.ranks[rank]
        self._order = range(len(self.ops)) if order is None else order
        self._run, self._num_launched = run, 0
        self._under_way: dict[int, InFlight[object] | None] = {}

    def advance(self, stop: int | None = None, *, finish: bool = False) -> None:
        """Launch ops until there are `stop`, or all; `finish`: then wait for every transfer."""
        under_way = self._under_way
        for position in self._order[self._num_launched : stop]:
            op = self.ops[position]
            for dep in op.deps:
                if (transfer := under_way.pop(dep, None)) is not None:
                    transfer.get()
            transfer = None  # once waited for it is forgotten, and with it the tensors that it holds
            try:
                under_way[position] = self._run(op)
            except Exception as error:
                error.add_note(f"in op {op} of {self.program.name} on rank {self.rank}")
                raise
            self._num_launched += 1
        for position in list(under_way) if finish else ():
            if (transfer := under_way.pop(position)) is not None:
                transfer.get()

    def get(self) -> None:
        """Wait for every transfer launched so far."""
        self.advance(self._num_launched, finish=True)


def execute_settled(
    verified: Verified, rank: int, run: Callable[[Op], InFlight[object] | None], settle: Callable[[str], None]
) -> None:
    """Run `rank`'s ops in the proved order, each to its end before the next; `settle` waits on the host.

    For the first time on a device: kernels that are loaded or compiled then wait for what runs on it, and a
    transfer that spins there for a peer whose host waits in the same way would never end.
    """
    ops = verified.program.ranks[rank]
    for position in verified.proved_order(rank):
        under_way = run(ops[position])
        if under_way is not None:
            under_way.get()
        settle(str(ops[position]))


def execute(
    verified: Verified,
    rank: int,
    run: Callable[[Op], InFlight[object] | None],
    order: Sequence[int] | None = None,
) -> None:
    """Run `rank`'s ops; when this returns, every transfer has been waited for.

    `order`: the proved one, where a call of the host may wait for all that runs on its device, as an
    allocation or a kernel's loading does. A receive that was launched before its sender could send would
    then hold up a host that the sender, or the sender's sender, waits for.
    """
    Execution(verified, rank, run, order).advance(finish=True)
