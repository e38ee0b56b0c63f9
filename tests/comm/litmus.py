"""Loops of machine code for two processors, fast enough to show whether they keep the order of memory.

A loop counts i = 1, 2, ... and does, in each turn: an access of its first place, a call of the fence it is
given, an access of its second place. An access stores i, or loads and keeps what it found. Whoever wants no
fence gives a function that only returns, so that both halves of a test differ in the fence alone.

Places only grow. So no turn must wait for another: from what two loops found it can be told afterwards
whether some pair of turns is impossible while memory is in order.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from moeclipse.comm.shared.fence import map_code, this_machine

TURNS = 50_000
APART = 1024  # bytes between two places: neither on one line nor fetched together
Loop = tuple[str, str]


@dataclass(frozen=True)
class Assembly:
    """void loop(long turns, long *first, long *second, void (*fence)(int), long *found)"""

    enter: bytes
    store: tuple[bytes, bytes]
    """Into the first place, into the second. As long as loads, so that the jump back is the same."""
    load: tuple[bytes, bytes]
    call: bytes
    leave: bytes
    back: bytes
    """A function that only returns."""


def words(*instructions: int) -> bytes:
    return struct.pack(f"<{len(instructions)}I", *instructions)


ARM = Assembly(
    enter=words(
        0xA9BC7BFD,  # stp x29, x30, [sp, #-64]!
        0xA90153F3,  # stp x19, x20, [sp, #16]
        0xA9025BF5,  # stp x21, x22, [sp, #32]
        0xA90363F7,  # stp x23, x24, [sp, #48]
        0xAA0003F3,  # mov x19, x0            turns
        0xAA0103F4,  # mov x20, x1            first
        0xAA0203F5,  # mov x21, x2            second
        0xAA0303F6,  # mov x22, x3            fence
        0xAA0403F7,  # mov x23, x4            found
        0xD2800018,  # mov x24, #0            i
        0x91000718,  # again: add x24, x24, #1
    ),
    store=(
        words(0xF9000298, 0xD503201F),  # str x24, [x20]; nop
        words(0xF90002B8, 0xD503201F),  # str x24, [x21]; nop
    ),
    load=(
        words(0xF9400289, 0xF80086E9),  # ldr x9, [x20]; str x9, [x23], #8
        words(0xF94002A9, 0xF80086E9),  # ldr x9, [x21]; str x9, [x23], #8
    ),
    call=words(0x528000A0, 0xD63F02C0),  # mov w0, #5; blr x22
    leave=words(
        0xEB13031F,  # cmp x24, x19
        0x54FFFF01,  # b.ne again
        0xA94153F3,  # ldp x19, x20, [sp, #16]
        0xA9425BF5,  # ldp x21, x22, [sp, #32]
        0xA94363F7,  # ldp x23, x24, [sp, #48]
        0xA8C47BFD,  # ldp x29, x30, [sp], #64
        0xD65F03C0,  # ret
    ),
    back=words(0xD65F03C0),  # ret
)
X86 = Assembly(
    enter=bytes.fromhex(
        "53 55 41 54 41 55 41 56 41 57"  # push rbx, rbp, r12, r13, r14, r15
        "48 83 ec 08"  # sub rsp, 8              aligns the stack for the call
        "49 89 fc"  # mov r12, rdi               turns
        "49 89 f5"  # mov r13, rsi               first
        "49 89 d6"  # mov r14, rdx               second
        "49 89 cf"  # mov r15, rcx               fence
        "4c 89 c5"  # mov rbp, r8                found
        "31 db"  # xor ebx, ebx                  i
        "48 ff c3"  # again: inc rbx
    ),
    store=(
        bytes.fromhex("49 89 5d 00 0f 1f 84 00 00 00 00 00"),  # mov [r13], rbx; nop
        bytes.fromhex("49 89 1e 66 0f 1f 84 00 00 00 00 00"),  # mov [r14], rbx; nop
    ),
    load=(
        bytes.fromhex("49 8b 45 00 48 89 45 00 48 83 c5 08"),  # mov rax, [r13]; mov [rbp], rax; add rbp, 8
        bytes.fromhex("49 8b 06 48 89 45 00 48 83 c5 08 90"),  # mov rax, [r14]; the same; nop
    ),
    call=bytes.fromhex("bf 05 00 00 00 41 ff d7"),  # mov edi, 5; call r15
    leave=bytes.fromhex(
        "4c 39 e3"  # cmp rbx, r12
        "75 d8"  # jne again
        "48 83 c4 08"  # add rsp, 8
        "41 5f 41 5e 41 5d 41 5c 5d 5b"  # pop r15, r14, r13, r12, rbp, rbx
        "c3"  # ret
    ),
    back=bytes.fromhex("c3"),  # ret
)


class Litmus:
    """Two loops at a time, each on a processor of its own."""

    def __init__(self) -> None:
        self._code = {"x86_64": X86, "aarch64": ARM}[platform.machine()]
        self.no_fence = self._map(self._code.back)
        self._functions = {
            (first, second): self._function(first, second)
            for first, second in [("store", "store"), ("load", "load"), ("store", "load")]
        }
        memory = np.zeros(4 * APART, dtype=np.uint8)
        start = -memory.ctypes.data % APART
        self._memory = memory[start : start + 3 * APART].view(np.int64)
        self._x = self._memory.ctypes.data
        self._y = self._x + APART

    def _map(self, code: bytes) -> int:
        return map_code(code, this_machine().caches_code)

    def _function(self, first: str, second: str) -> Callable[..., None]:
        code = self._code
        body = getattr(code, first)[0] + code.call + getattr(code, second)[1]
        pointer = ctypes.c_void_p
        kind = ctypes.CFUNCTYPE(None, ctypes.c_long, pointer, pointer, pointer, pointer)  # lets go of the GIL
        return kind(self._map(code.enter + body + code.leave))

    def message_passing(self, release: int, acquire: int) -> int:
        """One stores data, then a flag; the other loads the flag, then data. How often those were older."""
        found = np.zeros((TURNS, 2), dtype=np.int64)
        self._both(
            (("store", "store"), self._x, self._y, release, None),
            (("load", "load"), self._y, self._x, acquire, found),
        )
        flag, data = found.T
        return int((data < flag).sum())

    def store_buffering(self, full: int) -> int:
        """Each stores its place, then loads the other's. How often both loads missed the other's store."""
        mine, theirs = np.zeros((2, TURNS), dtype=np.int64)
        self._both(
            (("store", "load"), self._x, self._y, full, mine),
            (("store", "load"), self._y, self._x, full, theirs),
        )
        # My turn i did not find their turn j, nor any later one. So theirs must have found my turn i.
        i, j = np.arange(1, TURNS + 1), mine + 1
        came = j <= TURNS
        return int((theirs[j[came] - 1] < i[came]).sum())

    def _both(self, *loops: tuple[Loop, int, int, int, Any]) -> None:
        self._memory[:] = 0
        cores, meet = sorted(os.sched_getaffinity(0)), threading.Barrier(2)

        def run(k: int) -> None:
            kind, first, second, fence, found = loops[k]
            os.sched_setaffinity(0, {cores[k % len(cores)]})  # of this thread alone
            meet.wait()
            self._functions[kind](TURNS, first, second, fence, None if found is None else found.ctypes.data)

        threads = [threading.Thread(target=run, args=(k,)) for k in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def times_seen(once: Callable[[], int], seconds: float) -> int:
    """What `once` returned at the first time that it was not zero, or 0 when the time is over."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if seen := once():
            return seen
    return 0
