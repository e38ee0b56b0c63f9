"""Fences that Python can issue: what one rank wrote is in order for the rank that sees it.

    fence = find_fence()                                      # NoFenceError where there is none
    ...                  fence.release()    words[i] = n      # who sees n sees what was done before
    words[i] >= n        fence.acquire()    ...               # and reads, or overwrites, nothing too early
    words[i] = n         fence.full()       words[j]          # who misses n has j in place already

Processors keep stores and loads in order for themselves, and not for others. Arm promises nothing: each end
of a hand-over needs a fence. x86-64 keeps stores in order, loads in order, and no store passes an earlier
load; only a load passes an earlier store. So there `release` and `acquire` have nothing to do, and `full`
alone is a fence.

Python has no fence, so eight bytes of machine code are mapped, `dmb ish; ret` or `mfence; ret`, and called
through ctypes. The page is written first and made executable then, never both. Where a hardened system
refuses executable memory, `atomic_thread_fence` of libatomic does the same in four times the time.

Hazard: the page is never unmapped, because threads may call it as long as the process lives. Forked ranks
inherit it. The call keeps the GIL: giving it up takes longer than the fence itself.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from moeclipse.core.errors import CommError

SEQUENTIAL = 5  # memory_order_seq_cst
FAILED = ctypes.c_void_p(-1).value
LIBATOMIC = "libatomic.so.1"


class NoFenceError(CommError):
    """The order of memory cannot be kept on this machine; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    code: bytes
    """A full fence, and the return from it."""
    keeps_order: bool
    """All but a load behind a store."""
    caches_code: bool
    """New code must be announced to the cache of instructions."""
    futex: int
    """Number of the system call."""


MACHINES = {
    "x86_64": Machine(
        code=bytes.fromhex("0faef0 c3"),  # mfence; ret
        keeps_order=True,
        caches_code=False,
        futex=202,
    ),
    "aarch64": Machine(
        code=bytes.fromhex("bf3b03d5 c0035fd6"),  # dmb ish; ret
        keeps_order=False,
        caches_code=True,
        futex=98,
    ),
}


@dataclass(frozen=True)
class Fence:
    release: Callable[[], None]
    """What this rank loaded and stored before comes before what it stores behind."""
    acquire: Callable[[], None]
    """What this rank loaded before comes before what it loads and stores behind."""
    full: Callable[[], None]
    """Both, and what it stored before comes before what it loads behind."""

    @classmethod
    def of(cls, machine: Machine, full: Callable[[], None]) -> Fence:
        one_way = nothing if machine.keeps_order else full
        return cls(one_way, one_way, full)


def this_machine() -> Machine:
    name = platform.machine()
    if name not in MACHINES:
        known = " and ".join(MACHINES)
        raise NoFenceError(f"fences are known for {known}, and this machine is {name}")
    if ctypes.sizeof(ctypes.c_void_p) != 8:
        raise NoFenceError("fences are known for 64-bit programs, and this Python is none")
    return MACHINES[name]


@cache
def find_fence() -> Fence:
    """The fence of this machine, made once for each process."""
    machine, problems = this_machine(), []
    for make in (mapped_fence, library_fence):
        try:
            return Fence.of(machine, make(machine))
        except (OSError, AttributeError) as error:
            problems.append(str(error))
    raise NoFenceError(f"this process can issue no fence: {'; '.join(problems)}; install {LIBATOMIC}")


def unordered_reason() -> str | None:
    """Why memory cannot be handed over in order on this machine; None where it can."""
    try:
        find_fence()
    except NoFenceError as error:
        return str(error)
    return None


def mapped_fence(machine: Machine) -> Callable[[], None]:
    return ctypes.PYFUNCTYPE(None)(map_code(machine.code, machine.caches_code))


def library_fence(_machine: Machine) -> Callable[[], None]:
    fence = ctypes.PyDLL(LIBATOMIC).atomic_thread_fence
    fence.restype, fence.argtypes = None, [ctypes.c_int]
    return partial(fence, SEQUENTIAL)


def map_code(code: bytes, caches_code: bool) -> int:
    """Address of machine code that can be called; OSError where the system refuses that."""
    libc, size = ctypes.CDLL(None, use_errno=True), -(-len(code) // mmap.PAGESIZE) * mmap.PAGESIZE
    pointer, number = ctypes.c_void_p, ctypes.c_int
    libc.mmap.restype, libc.mprotect.restype = pointer, number
    libc.mmap.argtypes = [pointer, ctypes.c_size_t, number, number, number, ctypes.c_long]
    libc.mprotect.argtypes = [pointer, ctypes.c_size_t, number]
    clear = ctypes.CDLL("libgcc_s.so.1")["__clear_cache"] if caches_code else None
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, 0)
    if address == FAILED:
        raise _refused(ctypes.get_errno())
    ctypes.memmove(address, code, len(code))
    if libc.mprotect(address, size, mmap.PROT_READ | mmap.PROT_EXEC):
        raise _refused(ctypes.get_errno())
    if clear is not None:
        clear(pointer(address), pointer(address + len(code)))
    return int(address)


def _refused(number: int) -> OSError:
    return OSError(f"executable memory was refused ({os.strerror(number)})")


def nothing() -> None:
    pass
