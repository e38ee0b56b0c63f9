"""What shared memory leaves behind: nothing."""

from __future__ import annotations

import time
from pathlib import Path

SHM = Path("/dev/shm")


def left_over() -> list[str]:
    """Names that stay. Other runs on this machine have theirs for a moment, while they open memory."""
    names = {path.name for path in SHM.glob("moeclipse-*")}
    until = time.monotonic() + 30
    while names and time.monotonic() < until:
        time.sleep(0.02)
        names &= {path.name for path in SHM.glob("moeclipse-*")}
    return sorted(names)
