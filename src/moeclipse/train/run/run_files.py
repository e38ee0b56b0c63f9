"""Files of a run directory that are replaced as a whole: a reader sees the old text or the new one.

Hazard. `metrics.jsonl` grows line by line and is no such file; what is in it when a run goes on is cut by
`keep_lines`, which never holds more than a line of it in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

JOB = "job.json"
"""Says which job fills the directory (`train/run/run_lock`)."""


def write_atomic(path: Path, text: str) -> None:
    """Written beside, made durable, then renamed: a kill or a full disk leaves what was there before."""
    beside = path.with_name(f".{path.name}.tmp")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def keep_lines(path: Path, wanted: Callable[[str], bool]) -> int:
    """Keeps the lines that are wanted, in place of all; returns how many there are."""
    beside, kept = path.with_name(f".{path.name}.tmp"), 0
    try:
        with path.open(encoding="utf-8", errors="replace") as old, beside.open("w", encoding="utf-8") as new:
            for line in old:
                if wanted(line):
                    new.write(line if line.endswith("\n") else f"{line}\n")
                    kept += 1
            new.flush()
            os.fsync(new.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return kept


def set_aside(path: Path) -> Path | None:
    """Gives a file another name, `metrics.1.jsonl`, `metrics.2.jsonl`, ...; None where there is none."""
    if not path.exists():
        return None
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    os.rename(path, aside)
    return aside


def holds_run(directory: Path) -> bool:
    """Whether a run has written there; what says only that a job came, and left, does not count."""
    if not directory.is_dir():
        return directory.exists()
    return any(path.name != JOB and not path.name.startswith(f".{JOB}") for path in directory.iterdir())
