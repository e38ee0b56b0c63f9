"""Inputs that stay where they are, shared with peers once.

A kernel that reads its inputs where they lie is given the address of a row of P addresses.

    share = inputs.share(x)               # collective: rows are filled at once
    row = inputs.row(share, offset)       # of what begins `offset` bytes into x

    row = inputs.add(x)                   # while a graph is captured; nothing is sent, the row is zero
    inputs.register()                     # collective, when the capture ends: now graphs may be replayed

An input is a part of an allocation, and an allocation is opened once by each peer, however many inputs lie in
it. What was shared is kept alive, so no other tensor can come to lie there, until `unshare`, after which no
peer has it open. A captured input must outlive the graph's last replay, which memory that a graph captured
does anyway.

Hazard: every rank must share, capture and let go of the same in the same order; who differs is told so here,
before a kernel runs.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from moeclipse.comm.failure import Watch
from moeclipse.comm.gather_json import tell_all
from moeclipse.comm.group import Group
from moeclipse.core.errors import CommError, ConfigError
from moeclipse.ops.cuda_driver import CudaDriver, DriverError, cuda_driver

Listed = TypeVar("Listed")
MAX_ROWS = 8192
INVALID_VALUE = 1  # what the driver says of memory that it cannot name
Name = tuple[str, int]
"""Of an address, for other processes: the handle of its allocation, and the offset in it."""


@dataclass(frozen=True, eq=False)
class Share:
    """A tensor that all peers have open."""

    x: torch.Tensor
    start: int
    num_bytes: int
    number: int
    """The same on all ranks."""
    addresses: list[int]
    """Of every rank's, as seen from here."""
    opened: list[tuple[int, str]]
    rows: dict[int, int] = field(default_factory=dict)
    """Row of what begins at an offset in bytes."""


class SharedInputs:
    def __init__(self, group: Group, watch: Watch, device: torch.device) -> None:
        self._group, self._watch, self._device = group, watch, device
        self._table = torch.zeros(MAX_ROWS, group.size, dtype=torch.int64, device=device)
        self._used, self._free = 0, list[int]()
        self._waiting: list[tuple[int, int]] = []  # (row, address of the input here)
        self._opened: dict[tuple[int, str], int] = {}  # (peer, handle) -> address here
        self._users: dict[tuple[int, str], int] = {}
        self._driver: CudaDriver | None = None
        self.num_captured, self._num_shared = 0, 0
        self.starts: list[int] = []  # of what is shared, in order
        self._shares: dict[int, Share] = {}

    def find(self, address: int, num_bytes: int) -> tuple[Share, int] | None:
        """What is shared and holds all of these bytes, and where they begin in it."""
        place = bisect_right(self.starts, address) - 1
        if place < 0:
            return None
        share = self._shares[self.starts[place]]
        offset = address - share.start
        return (share, offset) if offset + num_bytes <= share.num_bytes else None

    def share(self, x: torch.Tensor) -> None:
        """Collective. For a contiguous tensor that begins on 16 bytes."""
        label = f"sharing of a tensor, group {self._group.name}"
        kind = f"{x.numel()} x {str(x.dtype).removeprefix('torch.')}"
        everyone = tell_all(self._group, self._watch, [kind, self._obstacle(x)], label)
        for rank, (theirs, obstacle) in zip(self._group.ranks, everyone, strict=True):
            if obstacle:
                raise ConfigError(f"rank {rank} cannot share {theirs}: {obstacle}")
            if theirs != everyone[0][0]:
                raise ConfigError(
                    f"rank {rank} shares {theirs}, rank {self._group.ranks[0]} {everyone[0][0]}; "
                    "all ranks must share the same"
                )
        start = x.data_ptr()
        names = self._exchange([start], label)
        (addresses,) = self._open(names, [start], label)
        keys = [(peer, given[0][0]) for peer, given in enumerate(names) if peer != self._group.index]
        self._num_shared += 1
        share = Share(x.detach(), start, x.nbytes, self._num_shared, addresses, keys)
        self._shares[start] = share
        insort(self.starts, start)
        self.row(share, 0)

    def row(self, share: Share, offset: int) -> torch.Tensor:
        """Of what begins `offset` bytes into a shared tensor, on every rank."""
        row = share.rows.get(offset)
        if row is None:
            row = share.rows[offset] = self._take_row()
            self._fill([row], [[address + offset for address in share.addresses]])
        return self._table[row]

    def unshare(self, x: torch.Tensor) -> None:
        """Collective: when it returns, no peer has the tensor open."""
        label = f"end of sharing a tensor, group {self._group.name}"
        share = self._shares.get(x.data_ptr())
        everyone = tell_all(self._group, self._watch, share.number if share else 0, label)
        if share is None or any(number != share.number for number in everyone):
            pairs = zip(self._group.ranks, everyone, strict=True)
            named = ", ".join(f"rank {rank} {f'tensor {n}' if n else 'one that is not'}" for rank, n in pairs)
            raise ConfigError(f"ranks let go of different tensors, counted as they were shared: {named}")
        torch.cuda.synchronize(self._device)  # kernels may still read what peers share
        del self._shares[share.start]
        self.starts.remove(share.start)
        rows = list(share.rows.values())
        self._fill(rows, [[0] * self._group.size] * len(rows))
        self._free += rows
        for key in share.opened:
            self._users[key] -= 1
            if not self._users[key]:
                self._opener().close_ipc(self._opened.pop(key))
        tell_all(self._group, self._watch, None, label)

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """The row for one captured reduction of `x`."""
        row = self._take_row()
        self._waiting.append((row, x.data_ptr()))
        self.num_captured += 1
        return self._table[row]

    def register(self) -> None:
        """Collective. Fill the rows of everything that was added since."""
        label = f"sharing of captured inputs, group {self._group.name}"
        addresses = [address for _, address in self._waiting]
        found = self._open(self._exchange(addresses, label), addresses, label)
        self._fill([row for row, _ in self._waiting], found)
        self._waiting = []

    def forget(self) -> None:
        """Give up what was added and cannot be shared."""
        self._waiting = []

    def close(self) -> None:
        for address in self._opened.values():
            self._opener().close_ipc(address)
        self._opened, self._shares, self.starts = {}, {}, []

    def _obstacle(self, x: torch.Tensor) -> str:
        start, stop = x.data_ptr(), x.data_ptr() + x.nbytes
        if self._waiting:
            return "a graph is being captured; share before that"
        if not x.is_contiguous() or not x.numel():
            return "it is empty, or not contiguous"
        if start % 16:
            return "it does not begin on a multiple of 16 bytes"
        ends = [(share.start, share.start + share.num_bytes) for share in self._shares.values()]
        if any(start < last and first < stop for first, last in ends):
            return "it overlaps one that is shared"
        return ""

    def _take_row(self) -> int:
        if self._free:
            return self._free.pop()
        if self._used == MAX_ROWS:
            raise CommError(
                f"{MAX_ROWS} reductions read their inputs where they lie, which is the most; "
                "let go of shared tensors with unshare(), or open another all-reduce"
            )
        self._used += 1
        return self._used - 1

    def _fill(self, rows: list[int], addresses: list[list[int]]) -> None:
        if rows:
            places = torch.tensor(rows, device=self._device)
            self._table[places] = torch.tensor(addresses, dtype=torch.int64).to(self._device)
            torch.cuda.synchronize(self._device)

    def _exchange(self, addresses: list[int], label: str) -> list[list[Name]]:
        """Every rank's names of its addresses."""
        driver = self._opener()
        mine: list[Name] | str
        try:
            starts = [driver.allocation_of(address) for address in addresses]
            mine = [
                (driver.ipc_handle(start).hex(), address - start)
                for start, address in zip(starts, addresses, strict=True)
            ]
        except DriverError as error:
            mine = _said(error)
        everyone = tell_all(self._group, self._watch, mine, label)
        return self._compare(everyone)

    def _open(self, names: list[list[Name]], own: list[int], label: str) -> list[list[int]]:
        """For each input every rank's address of it, as seen from here."""
        problem, found = None, list[list[int]]()
        try:
            for k, address in enumerate(own):
                found.append([self._address(peer, given[k], address) for peer, given in enumerate(names)])
        except DriverError as error:
            problem = _said(error)
        self._compare(tell_all(self._group, self._watch, problem or names[self._group.index], label))
        return found

    def _compare(self, everyone: list[list[Listed] | str]) -> list[list[Listed]]:
        lists: list[list[Listed]] = []
        for rank, found in zip(self._group.ranks, everyone, strict=True):
            if isinstance(found, str):
                raise CommError(f"rank {rank} cannot share its inputs: {found}")
            lists.append(found)
            if len(found) != len(lists[0]):
                raise CommError(
                    f"rank {rank} captured {len(found)} reductions, rank {self._group.ranks[0]} "
                    f"{len(lists[0])}; all ranks must capture the same"
                )
        return lists

    def _address(self, peer: int, given: Name, own: int) -> int:
        if peer == self._group.index:
            return own
        handle, offset = given
        key = (peer, handle)
        if key not in self._opened:
            self._opened[key] = self._opener().open_ipc(bytes.fromhex(handle))
        self._users[key] = self._users.get(key, 0) + 1
        return self._opened[key] + offset

    def _opener(self) -> CudaDriver:
        if self._driver is None:
            self._driver = cuda_driver()
        return self._driver


def _said(error: DriverError) -> str:
    hint = "; leave expandable_segments out of PYTORCH_ALLOC_CONF" if error.status == INVALID_VALUE else ""
    return f"{error}{hint}"
