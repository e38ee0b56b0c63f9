"""How much memory a host has left."""

from __future__ import annotations

import contextlib
from pathlib import Path

INFO, GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that can still be used, by the kernel's estimate and the container's limit; 0: not known."""
    memory = 0
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = INFO.read_text().splitlines()
        memory = 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    with contextlib.suppress(OSError, ValueError):
        limit = int((GROUP / "memory.max").read_text())
        memory = min(memory, limit - int((GROUP / "memory.current").read_text()))
    return max(memory, 0)
