"""What a rank tells another beside the wires under test: order is tested by order, not by seconds."""

from __future__ import annotations

import time
from pathlib import Path


def await_file(file: Path) -> None:
    """Until another rank has made it; the deadline of `run_ranks` ends a wait in vain."""
    while not file.exists():
        time.sleep(0.01)
