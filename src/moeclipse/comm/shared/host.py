"""Buffers that the other ranks of this host can read.

    with PeerMemory.open(group, watch, num_bytes=1 << 20, num_words=group.size) as memory:
        memory.view(group.index, torch.float32, 0, 100).copy_(x)     # my own buffer
        memory.signals.post(group.index, 1)
        memory.signals.wait(peer, 1, peer, "example")
        y = memory.view(peer, torch.float32, 0, 100)                 # a peer's, read where it lies

One POSIX shared memory segment holds the words of all ranks (`signals`) and one buffer per rank. Opening
is collective: all ranks agree on a random name, the first creates it (exclusively, readable by this user
alone), each reserves the pages of its own buffer, near its own memory, and the name is removed as soon as all
have mapped it. From then on the kernel frees the segment with its last user, however that one ends.
In each step every rank tells the others how it went, so all of them raise the same error or none does.

Hazards. Space is reserved, never just promised: writing to promised pages of a full file system ends the
process without a word. A view keeps the mapping alive, so `close` does not pull memory from under it.
Only the owner writes its buffer, but for places that it offered to a peer (`ring`).
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch

from moeclipse.comm.failure import Watch
from moeclipse.comm.gather_json import tell_all
from moeclipse.comm.group import Group, host_id
from moeclipse.comm.shared.fence import unordered_reason
from moeclipse.comm.shared.signals import LINE, SPIN_CROWDED, Peers, Signals
from moeclipse.core.errors import CommError

FOLDER = Path("/dev/shm")
PAGE = mmap.PAGESIZE
STAMP_BYTES = 32  # a random mark at the front: two containers may both have a file of this name


class NoPeerMemoryError(CommError):
    """These ranks cannot share memory; every one of them got this error. Use torch.distributed."""


@dataclass(frozen=True)
class Use:
    """An answer with its reason; true where peer memory applies."""

    yes: bool
    why: str

    def __bool__(self) -> bool:
        return self.yes


class PeerMemory:
    """One buffer per rank of the group, readable by all of them, and words to signal with."""

    def __init__(self, segment: mmap.mmap, layout: AreaLayout, signals: Signals) -> None:
        self._bytes: torch.Tensor | None = torch.frombuffer(segment, dtype=torch.uint8)
        self._layout, self.signals = layout, signals
        self.index, self.num_ranks = signals.peers.index, layout.num_ranks
        self.num_bytes = layout.num_bytes

    @classmethod
    def open(
        cls,
        group: Group,
        watch: Watch,
        *,
        num_bytes: int,
        num_words: int,
        spin: int | None = None,
        folder: Path = FOLDER,
    ) -> PeerMemory:
        """Collective. `num_bytes` per rank; `num_words` for the whole group, zero at first."""
        layout = AreaLayout(group.size, num_bytes, num_words)
        label = f"opening of peer memory, group {group.name}"
        facts = tell_all(group, watch, _facts(layout, folder), label)
        _refuse(group, facts)
        path = folder / f"moeclipse-{facts[0]['token']}"
        try:
            segment = _create_and_map(path, layout, group, watch, label)
        finally:
            # Everyone knows the name, so it goes even if the rank that made it was killed.
            path.unlink(missing_ok=True)
        pids = [fact["pid"] if fact["pids"] == facts[group.index]["pids"] else None for fact in facts]
        peers = Peers(group.ranks, group.index, pids, watch)
        # Ranks that are pinned to a core each are not crowded.
        cores = {core for fact in facts for core in fact["cores"]}
        if spin is None and len(cores) < group.size:
            spin = SPIN_CROWDED
        words = memoryview(segment)[LINE : LINE + (num_words + group.size) * LINE].cast("Q")
        address = torch.frombuffer(segment, dtype=torch.uint8).data_ptr() + LINE
        return cls(segment, layout, Signals(words, address, peers, spin, num_words))

    def view(self, peer: int, dtype: torch.dtype, offset: int, count: int) -> torch.Tensor:
        """`count` elements from byte `offset` of a rank's buffer; the offset is a multiple of their size."""
        if self._bytes is None:
            raise CommError("this peer memory is closed; open a new one")
        stop = offset + count * dtype.itemsize
        if offset < 0 or stop > self.num_bytes:
            raise CommError(f"bytes {offset} to {stop} are outside of a buffer of {self.num_bytes} bytes")
        start = self._layout.start_of(peer)
        return self._bytes[start + offset : start + stop].view(dtype)

    @property
    def span(self) -> tuple[int, int]:
        """(address, bytes) of the whole segment, for whoever must tell a device about it."""
        if self._bytes is None:
            raise CommError("this peer memory is closed; open a new one")
        return self._bytes.data_ptr(), self._bytes.numel()

    @property
    def words_at(self) -> int:
        """Where in the segment the words begin, a line each."""
        return LINE

    def close(self) -> None:
        """Let go; may be called twice. The memory is free when the last view and the last rank let go."""
        self._bytes = None
        self.signals.close()

    def __enter__(self) -> PeerMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AreaLayout:
    """stamp (a line) | words, a line each, and one more for each rank | buffer of rank 0 | of rank 1 | ...

    Buffers are whole pages. The words of the ranks say who sleeps.
    """

    def __init__(self, num_ranks: int, num_bytes: int, num_words: int) -> None:
        self.num_ranks, self.num_bytes, self.num_words = num_ranks, num_bytes, num_words
        self.head = _pages(LINE + (num_words + num_ranks) * LINE)
        self.stride = _pages(num_bytes)
        self.total = self.head + num_ranks * self.stride

    def start_of(self, peer: int) -> int:
        return self.head + peer * self.stride


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


class HostFacts(TypedDict):
    """What a rank must know of every other before it touches a file."""

    host: str
    pid: int
    cores: list[int]
    pids: str
    token: str
    size: list[int]
    problem: str | None
    free: int
    total: int
    folder: str


def _facts(layout: AreaLayout, folder: Path) -> HostFacts:
    try:
        space = os.statvfs(folder)
        free, problem = space.f_bavail * space.f_frsize, None
    except OSError as error:
        free, problem = 0, f"{folder} cannot be used: {error.strerror}"
    try:
        pids = os.readlink("/proc/self/ns/pid")
    except OSError:
        pids = secrets.token_hex(8)
    return {
        "host": host_id(),
        "pid": os.getpid(),
        "cores": sorted(os.sched_getaffinity(0)),
        "pids": pids,
        "token": secrets.token_hex(16),
        "size": [layout.num_bytes, layout.num_words],
        "problem": unordered_reason() or problem,
        "free": free,
        "total": layout.total,
        "folder": str(folder),
    }


def _refuse(group: Group, facts: list[HostFacts]) -> None:
    """Raise what stands against sharing memory. Every rank sees the same facts, so all raise the same."""
    first = facts[0]
    for rank, fact in zip(group.ranks, facts, strict=True):
        if fact["host"] != first["host"]:
            raise NoPeerMemoryError(
                f"ranks {group.ranks[0]} and {rank} are on different hosts; "
                "peer memory works within one host, torch.distributed between hosts"
            )
        if fact["problem"]:
            raise NoPeerMemoryError(f"rank {rank}: {fact['problem']}; use torch.distributed")
        if fact["size"] != first["size"]:
            raise CommError(
                f"rank {rank} asks for {fact['size'][0]} bytes and {fact['size'][1]} words, "
                f"rank {group.ranks[0]} for {first['size'][0]} and {first['size'][1]}; "
                "ask for the same everywhere"
            )
    if first["free"] < first["total"]:
        raise NoPeerMemoryError(_too_little(first["total"], first["free"], first["folder"]))


def _too_little(wanted: int, free: int, folder: str) -> str:
    return (
        f"peer memory needs {wanted / 2**20:.1f} MiB in {folder}, and {free / 2**20:.1f} MiB are free; "
        "make it larger (in Docker: --shm-size=1g or --ipc=host), or use smaller buffers"
    )


def _create_and_map(path: Path, layout: AreaLayout, group: Group, watch: Watch, label: str) -> mmap.mmap:
    """Create on the first member, map on all; a step ends when all members report how it went."""
    descriptor = -1
    try:
        problem = None
        stamp = path.name.encode()[-STAMP_BYTES:]
        if group.index == 0:
            descriptor, problem = _attempt(lambda: _create(path, layout, stamp))
        _agree(group, watch, problem, label)
        if group.index > 0:
            descriptor, problem = _attempt(lambda: _attach(path, stamp))
        if problem is None:
            _, problem = _attempt(lambda: _reserve(descriptor, layout, group.index, path))
        _agree(group, watch, problem, label)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return mmap.mmap(descriptor, layout.total, flags=flags)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _attempt(action: Callable[[], int | None]) -> tuple[int, str | None]:
    try:
        return action() or 0, None
    except (OSError, NoPeerMemoryError) as error:
        return -1, str(error)


def _create(path: Path, layout: AreaLayout, stamp: bytes) -> int:
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(descriptor, layout.total)
        os.posix_fallocate(descriptor, 0, layout.head)
        os.pwrite(descriptor, stamp, 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _attach(path: Path, stamp: bytes) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise NoPeerMemoryError(
            f"{path.parent} is not shared with the other ranks; run the containers with --ipc=host"
        ) from None
    if os.pread(descriptor, STAMP_BYTES, 0) != stamp:
        os.close(descriptor)
        raise NoPeerMemoryError(f"{path} is not the segment of this group; share {path.parent} between ranks")
    return descriptor


def _reserve(descriptor: int, layout: AreaLayout, index: int, path: Path) -> None:
    try:
        if layout.stride:
            os.posix_fallocate(descriptor, layout.start_of(index), layout.stride)
    except OSError as error:
        space = os.statvfs(path.parent)
        free = space.f_bavail * space.f_frsize
        raise NoPeerMemoryError(
            f"{error.strerror}: {_too_little(layout.stride, free, str(path.parent))}"
        ) from None


def _agree(group: Group, watch: Watch, problem: str | None, label: str) -> None:
    for rank, found in zip(group.ranks, tell_all(group, watch, problem, label), strict=True):
        if found is not None:
            raise NoPeerMemoryError(f"rank {rank}: {found}")
