"""Rounds: how ranks of one host write to memory that the others read, with one barrier each.

Before round t a rank writes to its own area t % 2; it then posts t and waits until all peers posted t; then
it reads their areas t % 2. That is one barrier per round and no second one to protect the memory: before a
rank writes area t % 2 again, for round t + 2, it has seen all peers post t + 1, and they post t + 1 only when
they have read what they wanted of round t.

In the first round of a call each rank also shows what it was called with. Peers that were called with
something else are found out before any sum is wrong.
"""

from __future__ import annotations

import torch

from moeclipse.comm.shared.host import PeerMemory
from moeclipse.core.errors import CommError

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-reduce with norm")
WORDS_PER_RANK = 3  # the round, and what the calls of even and odd rounds were
MAX_VIEWS = 512


class PeerRounds:
    """Areas of a PeerMemory, alternating by round, and the barrier between writing and reading them."""

    def __init__(self, memory: PeerMemory) -> None:
        self.memory, self.index, self.num_ranks = memory, memory.index, memory.num_ranks
        self.area_bytes = memory.num_bytes // 2
        self._signals = memory.signals
        self._others = [peer for peer in range(self.num_ranks) if peer != self.index]
        self._round = 1  # the one being written
        first = [self.num_ranks * (1 + parity) for parity in (0, 1)]
        self._said = [place + self.index for place in first]  # words of announcements, by parity of the round
        self._heard = [[(peer, place + peer) for peer in self._others] for place in first]
        self._views: dict[tuple[int, int, torch.dtype, int, int], torch.Tensor] = {}

    def area(self, peer: int, dtype: torch.dtype, count: int, first: int = 0, back: int = 0) -> torch.Tensor:
        """Elements `first` to `first + count` of a rank's area: of the round being written, or `back` ago."""
        parity = (self._round - back) % 2
        key = (peer, parity, dtype, first, count)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            offset = parity * self.area_bytes + first * dtype.itemsize
            view = self._views[key] = self.memory.view(peer, dtype, offset, count)
        return view

    def shown(self, dtype: torch.dtype, count: int, first: int = 0) -> list[torch.Tensor]:
        """What every rank wrote before the barrier that was just passed."""
        return [self.area(peer, dtype, count, first, back=1) for peer in range(self.num_ranks)]

    def post(self) -> None:
        """End of writing."""
        self._signals.post(self.index, self._round)

    @property
    def arrived(self) -> bool:
        """Whether all peers have written this round already."""
        read, number = self._signals.read, self._round
        return all(read(peer) >= number for peer in self._others)

    def arrive(self, label: str) -> None:
        """On return all peers have written this round, and it may be read."""
        number, wait = self._round, self._signals.wait
        for peer in self._others:
            wait(peer, number, peer, label)
        self._round = number + 1

    def meet(self, label: str) -> None:
        self.post()
        self.arrive(label)

    def code_of(self, kind: int, dtype: torch.dtype, length: int) -> int:
        """What a call is, in one word."""
        return length << 8 | DTYPES.index(dtype) << 4 | kind

    def announce(self, kind: int, dtype: torch.dtype, length: int) -> None:
        """Say before the first round of a call what it is."""
        code = self.code_of(kind, dtype, length)
        self._signals.write(self._announcement(self.index, self._round), code)

    @property
    def number(self) -> int:
        """Of the round being written."""
        return self._round

    def exchange(self, code: int, label: str) -> None:
        """The first round of a call that was announced by nobody yet: announce, meet and compare."""
        number, signals = self._round, self._signals
        signals.write(self._said[number % 2], code)
        signals.post(self.index, number)
        same = True
        for peer, said in self._heard[number % 2]:
            signals.wait(peer, number, peer, label)
            same = same and signals.read(said) == code
        self._round = number + 1
        if not same:
            self.compare(label)

    def compare(self, label: str) -> None:
        """After the first round: were all ranks called with the same?"""
        number = self._round - 1
        mine = self._signals.read(self._announcement(self.index, number))
        for peer in self._others:
            theirs = self._signals.read(self._announcement(peer, number))
            if theirs != mine:
                ranks = self._signals.peers.ranks
                raise CommError(
                    f"rank {ranks[self.index]} is in {label} with {_spoken(mine)}, "
                    f"but rank {ranks[peer]} came with {_spoken(theirs)}; all ranks must make the same calls"
                )

    def _announcement(self, peer: int, number: int) -> int:
        return self.num_ranks * (1 + number % 2) + peer


def _spoken(code: int) -> str:
    return f"{KINDS[code & 15]} of {code >> 8} x {str(DTYPES[code >> 4 & 15]).removeprefix('torch.')}"
