"""Counters in shared memory that one rank writes and others wait for.

A counter is a 64-bit word on a cache line of its own. Only its owner writes it, it only grows, and what the
owner wrote before it is visible to whoever saw it. So there are no locks and no read-modify-writes: nothing
that a killed rank could leave locked.

A waiter polls for a while, then sleeps in the kernel on that word (a futex) until its owner posts. It says so
in a word of its own, and who posts wakes only sleepers, because a system call takes longer than all the rest.
With more ranks than cores it polls only briefly: a rank that polls holds the core the other one needs. Every
few milliseconds of waiting it looks whether the peer still lives, whether some rank reported a failure, and
whether the deadline passed; each of them raises an error that names the rank.

Hazard: order of memory. A post is a `release`, then one aligned 8-byte store; a wait is loads of the same
kind, then an `acquire` (`fence`; memoryview copies an item of 8 bytes as a whole, so no reader sees half of
one). Whoever reads words without waiting for them must do likewise. A third fence is a full one, because it
keeps a load behind a store: a post must be visible before its owner looks for sleepers, and a sleeper must
have said so before the kernel compares the word. One of the two then sees the other. Were a sleeper missed
all the same, it would wake when its nap ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import threading
import time
from collections.abc import Sequence

from moeclipse.comm.failure import Watch
from moeclipse.comm.shared.fence import find_fence, this_machine
from moeclipse.core.errors import CommError

LINE = 64  # bytes of a cache line, on most machines: neighbours would slow each other down
WORD = 8
WAIT, WAKE = 0, 1
EVERYONE = 0x7FFFFFFF
SPIN_ALONE = 300  # polls, some 10 us, when every rank has a core: as long as falling asleep and waking takes
SPIN_CROWDED = 50
NAP_S = (0.002, 0.05)  # first and longest sleep between two looks at the peers
LOOK_S = 0.25  # how often the store is asked whether some rank failed


class Peers:
    """The ranks that take part. Knows within milliseconds when one of them has ended."""

    def __init__(self, ranks: Sequence[int], index: int, pids: Sequence[int | None], watch: Watch) -> None:
        self.ranks, self.index, self.watch = tuple(ranks), index, watch
        self.pids = tuple(pids)
        self._handles: dict[int, int] = {}
        for peer, pid in enumerate(pids):
            if pid is None or peer == index:
                continue  # a peer in another pid namespace is only held to the deadline
            with contextlib.suppress(OSError):
                self._handles[peer] = os.pidfd_open(pid)

    def ended(self, peer: int) -> bool:
        """Whether the process is gone, a zombie counting as gone."""
        handle = self._handles.get(peer)
        if handle is None:
            return False
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(0))

    def lost(self, peer: int, label: str) -> CommError:
        """The error for a peer whose process is gone, in its own words if it left any."""
        self.raise_reported()
        mine, theirs = self.ranks[self.index], self.ranks[peer]
        return CommError(f"rank {mine} lost rank {theirs} in {label}: its process {self.pids[peer]} ended")

    def raise_reported(self) -> None:
        """Raise what another rank reported about its own failure, if any did."""
        told = self.watch.told()
        if told is not None:
            raise told

    def missing(self, late: Sequence[int], label: str) -> CommError:
        names = ", ".join(str(self.ranks[peer]) for peer in late)
        noun = "ranks" if len(late) > 1 else "rank"
        mine, patience = self.ranks[self.index], self.watch.deadline_s
        return self.watch.verdict(
            f"rank {mine} waited {patience:g} s in {label}: {noun} {names} did not arrive"
        )

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles = {}


class Signals:
    """Words of shared memory, each written by one rank. `words` is a memoryview of 64-bit numbers."""

    def __init__(
        self, words: memoryview, address: int, peers: Peers, spin: int | None = None, first_sleeper: int = 0
    ) -> None:
        """Word i is words[i * WORD]. From word `first_sleeper` on there is one for each rank: how many of its
        threads sleep."""
        self.words, self._address, self.peers = words, address, peers
        self._sleeps = (first_sleeper + peers.index) * WORD
        self._sleepers = [
            (first_sleeper + peer) * WORD for peer in range(len(peers.ranks)) if peer != peers.index
        ]
        self._num_asleep, self._lock = 0, threading.Lock()
        self.fence = find_fence()
        self.spin = SPIN_ALONE if spin is None else spin
        self._next_question = 0.0
        self._futex = this_machine().futex
        self._call = ctypes.CDLL(None).syscall  # lets other threads of this process run while it sleeps
        pointer, number = ctypes.c_void_p, ctypes.c_uint32
        self._call.argtypes = [ctypes.c_long, pointer, ctypes.c_int, number, pointer, pointer, number]

    def close(self) -> None:
        self.words = memoryview(b"")  # the mapping goes with its last view
        self.peers.close()

    def read(self, word: int) -> int:
        """Load without a fence: for words that a wait stands before, or that no data follows."""
        return self.words[word * WORD]

    def write(self, word: int, value: int) -> None:
        """Store without waking anyone: for words that are read after a post."""
        self.words[word * WORD] = value

    def post(self, word: int, value: int) -> None:
        """Publish everything this rank wrote so far, and wake whoever sleeps on the word."""
        words, fence = self.words, self.fence
        fence.release()
        words[word * WORD] = value
        fence.full()
        for place in self._sleepers:
            if words[place]:
                self._call(self._futex, self._address + word * LINE, WAKE, EVERYONE, None, None, 0)
                return

    def wait(self, word: int, value: int, peer: int, label: str) -> None:
        """Return once `peer` has posted at least `value`; raise when it cannot come or comes too late."""
        words, place = self.words, word * WORD
        if words[place] < value:
            for _ in range(self.spin):
                if words[place] >= value:
                    break
            else:
                self._sleep(word, value, peer, label)
        self.fence.acquire()

    def soon(self, word: int, value: int, seconds: float) -> bool:
        """Wait at most about that long; whether at least `value` is posted."""
        words, place = self.words, word * WORD
        for _ in range(self.spin):
            if words[place] >= value:
                break
        else:
            if (seen := words[place]) < value:
                self._nap(word, seen, seconds)
        came = words[place] >= value
        self.fence.acquire()
        return came

    def look(self, word: int, value: int, peer: int, waited_s: float, label: str) -> None:
        """Raise if `peer`, still awaited after so many seconds, has ended, failed or used up its time."""
        if self.peers.ended(peer):
            self.fence.acquire()
            if self.read(word) < value:  # it may have posted and left
                raise self.peers.lost(peer, label)
        if waited_s > self.peers.watch.deadline_s and self.read(word) < value:
            raise self.peers.missing([peer], label)
        now = time.monotonic()
        if waited_s > LOOK_S and now > self._next_question:
            self._next_question = now + LOOK_S
            self.peers.raise_reported()

    def _sleep(self, word: int, value: int, peer: int, label: str) -> None:
        begun, nap = time.monotonic(), NAP_S[0]
        while (seen := self.read(word)) < value:
            self._nap(word, seen, nap)
            nap = min(2 * nap, NAP_S[1])
            if self.read(word) < value:
                self.look(word, value, peer, time.monotonic() - begun, label)

    def _nap(self, word: int, seen: int, seconds: float) -> None:
        """Sleep while the word still holds `seen`; the kernel compares, so no post is missed."""
        limit = (ctypes.c_long * 2)(int(seconds), int(seconds % 1 * 1e9))
        self._count_sleepers(1)
        self.fence.full()
        try:
            self._call(self._futex, self._address + word * LINE, WAIT, seen & 0xFFFFFFFF, limit, None, 0)
        finally:
            self._count_sleepers(-1)

    def _count_sleepers(self, more: int) -> None:
        with self._lock:  # two threads of a rank may wait at once
            self._num_asleep += more
            if self.words:  # closed meanwhile
                self.words[self._sleeps] = self._num_asleep
