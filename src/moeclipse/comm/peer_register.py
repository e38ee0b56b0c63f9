"""Inputs of captured kernels, shared with peers where they lie.

While a graph is captured a kernel is given the address of a row of P addresses, which is zero at that time.
When the capture ends, all ranks tell each other where their inputs are, in one exchange, and fill the rows:

    row = inputs.add(x)       # during capture; nothing is sent
    inputs.register()         # collective: from here on graphs may be replayed

An input is a part of an allocation, and an allocation is opened once by each peer, however many inputs lie in
it. It must outlive the graph's last replay, which memory that a graph captured does anyway.

Hazard: every rank must capture the same reductions in the same order; a rank that captured another number of
them is told so here, before any replay.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from moeclipse.comm.failure import Watch
from moeclipse.comm.mesh import Group
from moeclipse.comm.peer_memory import tell_all
from moeclipse.core.errors import CommError

MAX_ROWS = 8192
LAZY_PEER_ACCESS = 1


class Handle(ctypes.Structure):
    """Names an allocation to other processes. Bytes, not characters: those would end at the first zero."""

    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


class SharedInputs:
    def __init__(self, group: Group, watch: Watch, device: torch.device) -> None:
        self._group, self._watch, self._device = group, watch, device
        self._table = torch.zeros(MAX_ROWS, group.size, dtype=torch.int64, device=device)
        self._used = 0
        self._waiting: list[tuple[int, int]] = []  # (row, address of the input here)
        self._opened: dict[tuple[int, str], int] = {}  # (peer, handle) -> address here
        self._driver: Any = None

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """The row for one captured reduction of `x`."""
        if self._used == MAX_ROWS:
            raise CommError(f"graphs have captured {MAX_ROWS} reductions, which is the most; open another")
        self._waiting.append((self._used, x.data_ptr()))
        self._used += 1
        return self._table[self._used - 1]

    def register(self) -> None:
        """Collective. Fill the rows of everything that was added since."""
        if self._driver is None:
            self._driver = ctypes.CDLL("libcuda.so.1")
        mine: list[tuple[str, int]] | str
        try:
            mine = [self._handle(address) for _, address in self._waiting]
        except CommError as error:
            mine = str(error)
        label = f"sharing of captured inputs, group {self._group.name}"
        everyone = tell_all(self._group, self._watch, mine, label)
        self._compare(everyone)
        problem: str | None = None
        rows: list[list[int]] = []
        try:
            rows = [
                [self._address(peer, given[k], address) for peer, given in enumerate(everyone)]
                for k, (_, address) in enumerate(self._waiting)
            ]
        except CommError as error:
            problem = str(error)
        self._compare(tell_all(self._group, self._watch, problem or mine, label))
        if rows:
            first = self._waiting[0][0]
            table = torch.tensor(rows, dtype=torch.int64)
            self._table[first : first + len(rows)] = table.to(self._device)
            torch.cuda.synchronize(self._device)
        self._waiting = []

    def forget(self) -> None:
        """Give up what was added and cannot be shared."""
        self._waiting = []

    def close(self) -> None:
        for address in self._opened.values():
            self._driver.cuIpcCloseMemHandle(ctypes.c_uint64(address))
        self._opened = {}

    def _compare(self, everyone: list[Any]) -> None:
        for rank, found in zip(self._group.ranks, everyone, strict=True):
            if isinstance(found, str):
                raise CommError(f"rank {rank} cannot share captured inputs: {found}")
            if len(found) != len(everyone[0]):
                raise CommError(
                    f"rank {rank} captured {len(found)} reductions, rank {self._group.ranks[0]} "
                    f"{len(everyone[0])}; all ranks must capture the same"
                )

    def _handle(self, address: int) -> tuple[str, int]:
        """(name of the allocation that holds an address, offset in it)."""
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), Handle()
        place = ctypes.c_uint64(address)
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), place)
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle.bytes).hex(), address - base.value

    def _address(self, peer: int, given: tuple[str, int], own: int) -> int:
        if peer == self._group.index:
            return own
        handle, offset = given
        key = (peer, handle)
        if key not in self._opened:
            opened, name = ctypes.c_uint64(), Handle((ctypes.c_ubyte * 64)(*bytes.fromhex(handle)))
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(opened), name, LAZY_PEER_ACCESS)
            self._opened[key] = opened.value
        return self._opened[key] + offset

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            hint = "; leave expandable_segments out of PYTORCH_ALLOC_CONF" if code == 1 else ""
            raise CommError(f"{name} failed with code {code}{hint}")
