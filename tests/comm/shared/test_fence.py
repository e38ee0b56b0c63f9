"""Fences: what reorders without them and not with them, how they are made, and who is refused."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from litmus import Litmus, times_seen

from moeclipse.comm.shared import fence as fences
from moeclipse.comm.shared.fence import (
    Fence,
    Machine,
    NoFenceError,
    find_fence,
    library_fence,
    mapped_fence,
    unordered_reason,
)

HOLDS_S = 0.4
BREAKS_S = 1.5
SET_MDWE, REFUSE_EXEC_GAIN = 65, 1  # of prctl

WAYS: dict[str, Callable[[Machine], Callable[[], None]]] = {"mapped": mapped_fence, "library": library_fence}


@pytest.fixture(scope="module")
def litmus() -> Litmus:
    try:
        return Litmus()
    except (KeyError, OSError) as error:
        pytest.skip(f"machine code cannot be run here: {error}")


@pytest.fixture
def no_fence_yet() -> Iterator[None]:
    find_fence.cache_clear()
    yield
    find_fence.cache_clear()


def made(way: str) -> Fence:
    try:
        machine = fences.this_machine()
        return Fence.of(machine, WAYS[way](machine))
    except (OSError, NoFenceError) as error:
        pytest.skip(str(error))


def address_of(call: Callable[[], None], litmus: Litmus) -> int:
    """For loops of machine code. What does nothing in Python does nothing there."""
    if call is fences.nothing:
        return litmus.no_fence
    found = ctypes.cast(getattr(call, "func", call), ctypes.c_void_p).value
    assert found
    return found


@pytest.mark.parametrize("way", WAYS)
def test_who_sees_a_post_sees_what_was_written_before(way: str, litmus: Litmus) -> None:
    fence = made(way)
    release, acquire = address_of(fence.release, litmus), address_of(fence.acquire, litmus)
    assert times_seen(lambda: litmus.message_passing(release, acquire), HOLDS_S) == 0


@pytest.mark.parametrize("way", WAYS)
def test_of_two_that_post_and_look_one_sees_the_other(way: str, litmus: Litmus) -> None:
    full = address_of(made(way).full, litmus)
    assert times_seen(lambda: litmus.store_buffering(full), HOLDS_S) == 0


@pytest.mark.parametrize("missing", ["release", "acquire", "full"])
def test_without_a_fence_the_order_is_lost(missing: str, litmus: Litmus) -> None:
    """So the loops above can fail, and each end of a hand-over needs its own."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core reorders nothing for itself")
    fence, none = made("mapped"), litmus.no_fence
    if missing != "full" and fences.this_machine().keeps_order:
        pytest.skip(f"{platform.machine()} needs no {missing}")
    release, acquire = address_of(fence.release, litmus), address_of(fence.acquire, litmus)
    broken = {
        "release": lambda: litmus.message_passing(none, acquire),
        "acquire": lambda: litmus.message_passing(release, none),
        "full": lambda: litmus.store_buffering(none),
    }
    if not times_seen(broken[missing], BREAKS_S):
        pytest.skip(f"no reordering was seen within {BREAKS_S:g} s")


def in_child(check: Callable[[], bool]) -> int:
    """Exit code of a forked process: 0 where the check held."""
    child = os.fork()
    if not child:
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.peer_memory
def test_a_forked_rank_uses_the_fence_it_inherits() -> None:
    fence = find_fence()
    fence.full()

    def check() -> bool:
        fence.release()
        fence.acquire()
        fence.full()
        return find_fence() is fence

    assert in_child(check) == 0


def test_code_is_never_writable_and_executable_at_once() -> None:
    fence = made("mapped")
    address = ctypes.cast(fence.full, ctypes.c_void_p).value
    assert address
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights = line.split()[:2]
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= address < last:
            assert rights == "r-xp"
            return
    raise AssertionError("the code is not mapped")


def test_where_executable_memory_is_refused_a_library_has_the_fence(no_fence_yet: None) -> None:
    """As a hardened service does it (MemoryDenyWriteExecute), for the rest of the child's life."""
    made("library")

    def check() -> bool:
        if ctypes.CDLL(None).prctl(SET_MDWE, REFUSE_EXEC_GAIN, 0, 0, 0):
            os._exit(7)
        with pytest.raises(OSError, match=r"executable memory was refused \(Permission denied\)"):
            mapped_fence(fences.this_machine())
        fence = find_fence()
        fence.full()
        return getattr(fence.full, "args", None) == (fences.SEQUENTIAL,)

    code = in_child(check)
    if code == 7:
        pytest.skip("this kernel cannot refuse executable memory on request")
    assert code == 0


def test_where_neither_works_the_reason_names_both(
    no_fence_yet: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise OSError("executable memory was refused (Permission denied)")

    monkeypatch.setattr(fences.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(fences, "map_code", refused)
    monkeypatch.setattr(fences, "LIBATOMIC", "libnowhere.so.1")
    reason = unordered_reason()
    assert reason is not None
    assert reason.startswith(
        "this process can issue no fence: executable memory was refused (Permission denied); libnowhere.so.1:"
    )
    assert reason.endswith("; install libnowhere.so.1")


def test_other_machines_are_refused(no_fence_yet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fences.platform, "machine", lambda: "riscv64")
    assert unordered_reason() == "fences are known for x86_64 and aarch64, and this machine is riscv64"


def test_only_weak_machines_pay_for_order() -> None:
    assert set(fences.MACHINES) == {"x86_64", "aarch64"}
    for name, machine in fences.MACHINES.items():
        fence = Fence.of(machine, full := lambda: None)
        weak = name == "aarch64"
        assert fence.full is full
        assert (fence.release is full, fence.acquire is full) == (weak, weak)


def test_a_word_is_written_and_read_as_a_whole() -> None:
    """Through memoryview, between processes: for a reader, too, all bits change at once."""
    shared = mmap.mmap(-1, mmap.PAGESIZE)
    words = memoryview(shared).cast("Q")
    ones = (1 << 64) - 1

    def write() -> bool:
        until = time.monotonic() + 0.4
        while time.monotonic() < until:
            for _ in range(1000):
                words[8] = ones
                words[8] = 0
        words[0] = 1
        return True

    child = os.fork()
    if not child:
        write()
        os._exit(0)
    seen = {0: 0, ones: 0}
    while not words[0]:
        for _ in range(1000):
            value = words[8]
            assert value in seen
            seen[value] += 1
    os.waitpid(child, 0)
    if not all(seen.values()):
        pytest.skip("the two processes did not run at the same time")
