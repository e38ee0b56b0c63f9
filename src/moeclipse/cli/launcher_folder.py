"""The folder in which a launcher and its ranks leave words for each other, below the system's temporary one.

Others write there, too, so nothing of theirs is opened: a folder counts as one that a killed launcher of this
user left behind if it is his, is no link, and holds a lock that is a file and that nobody has. The lock ends
with the process that took it; it has its name only once it is taken.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from moeclipse.core.errors import ConfigError

PREFIX, LOCK = "moeclipse-", "launcher.lock"


@contextlib.contextmanager
def launcher_folder() -> Iterator[Path]:
    try:
        above = Path(tempfile.gettempdir())
        remove_left_behind(above)
        made = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigError(
            f"no folder for temporary files can be made ({error.strerror or error}); "
            "free some space, or set TMPDIR to a folder that can be written"
        ) from None
    with made as name, (Path(name) / f".{LOCK}").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(lock.name, Path(name) / LOCK)
        yield Path(name)


def remove_left_behind(above: Path) -> None:
    with os.scandir(above) as entries:
        mine = [entry for entry in entries if entry.name.startswith(PREFIX)]
    for entry in mine:
        with contextlib.suppress(OSError):
            state = entry.stat(follow_symlinks=False)
            if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid():
                continue
            handle = os.open(Path(entry) / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(entry, ignore_errors=True)
            finally:
                os.close(handle)
