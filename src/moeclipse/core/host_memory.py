"""How much memory a host has, and how much of it is left."""

from __future__ import annotations

import contextlib
from pathlib import Path

INFO, GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that can still be used, by the kernel's estimate and the container's limit; 0: not known."""
    return _memory("MemAvailable", "memory.current")


def whole_memory() -> int:
    """Bytes of the host, or of the container; 0: not known."""
    return _memory("MemTotal")


def _memory(line: str, taken: str = "") -> int:
    memory = 0
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = INFO.read_text().splitlines()
        memory = 1024 * int(next(one for one in lines if one.startswith(line)).split()[1])
    with contextlib.suppress(OSError, ValueError):
        limit = int((GROUP / "memory.max").read_text())
        memory = min(memory, limit - int((GROUP / taken).read_text()) if taken else limit)
    return max(memory, 0)
