"""Files of a run directory: those that are replaced as a whole, and those that grow line by line.

write_atomic    a reader sees the old text or the new one
append_line     a line is whole or is not there, and never glued to one that a kill or a full disk cut
keep_lines      what is in such a file when a run goes on, with never more than a line of it in memory
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from moeclipse.core.outside import lines_of, open_file

JOB = "job.json"
"""Says which job fills the directory (`train/run/run_lock`)."""


def write_atomic(path: Path, text: str) -> None:
    """Written beside, made durable, then renamed: a kill or a full disk leaves what was there before."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def append_line(path: Path, text: str) -> None:
    """OSError where the line cannot be written whole: what of it got there is taken back."""
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        state = os.fstat(handle)
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        before = state.st_size
        cut = before > 0 and os.pread(handle, 1, before - 1) != b"\n"
        data = memoryview((b"\n" if cut else b"") + text.encode() + b"\n")
        try:
            while data:
                data = data[os.write(handle, data) :]
        except OSError:
            with suppress(OSError):  # the disk's own words are those that are wanted
                os.ftruncate(handle, before)
            raise
    finally:
        os.close(handle)


def keep_lines(path: Path, wanted: Callable[[str], bool]) -> int:
    """Keeps the lines that are wanted, in place of all; returns how many there are."""
    temporary, kept = path.with_name(f".{path.name}.tmp"), 0
    try:
        with open_file(path) as old, temporary.open("w", encoding="utf-8") as new:
            for raw in lines_of(old):
                if raw is None:  # no line that we write is as long
                    continue
                line = raw.decode("utf-8", "replace")
                if wanted(line):
                    new.write(line if line.endswith("\n") else f"{line}\n")
                    kept += 1
            new.flush()
            os.fsync(new.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
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
