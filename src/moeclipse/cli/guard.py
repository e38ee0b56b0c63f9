"""The edge of the command line: what a user has to mend is told in one line, our own faults are not hidden.

Idea. Wherever a command touches a file that a user named, the system may refuse: a folder that is missing, a
disk that is full, a name that is too long. Such errors say which file and why, so one place can put them into
words for all commands. Errors that we raise on purpose have their words already.

Contract. `one_line` answers None for everything else, and that keeps its traceback: it is a fault of ours.
`refuse_unwritable` looks before the work begins, so that no plan of minutes is lost to a typo in `--out`.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

from moeclipse.core.errors import ConfigError, MoEclipseError

BAD_INPUT = 2  # the exit status of ConfigError
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def one_line(error: BaseException) -> tuple[str, int] | None:
    """What to print after `error: `, and the exit status; None where nobody but us could mend it."""
    if isinstance(error, MoEclipseError):
        return str(error), error.code
    if isinstance(error, BrokenPipeError | ConnectionError | TimeoutError):
        return None
    if isinstance(error, OSError) and error.filename is not None:
        return file_problem(Path(os.fsdecode(error.filename)), error), BAD_INPUT
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full; free some space", BAD_INPUT
    if isinstance(error, UnicodeDecodeError):
        return f"a file that was given is not UTF-8 text (byte {error.start}): {error.reason}", BAD_INPUT
    if isinstance(error, MemoryError):
        return "this needs more memory than there is; ask for something smaller", BAD_INPUT
    return None


def first_to_tell(text: str) -> bool:
    """Whether no other rank of this host has said so: under torchrun each finds what is wrong by itself.

    The agent gives each rank a file for its error, below one folder for all; what is only on one host, or on
    one rank, is told there.
    """
    own = os.environ.get(ERROR_FILE)
    if not own:
        return True
    said = Path(own).parent.parent / f"said-{zlib.crc32(text.encode()):08x}"
    try:
        os.close(os.open(said, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except OSError as error:
        return error.errno != errno.EEXIST
    return True


def file_problem(path: Path, error: OSError) -> str:
    """Which file could not be read or written, why, and what to do."""
    name = str(path) if len(str(path)) <= 200 else f"{str(path)[:200]}..."
    if isinstance(error, FileNotFoundError):
        missing = path
        while not missing.parent.exists():
            missing = missing.parent
        if missing != path:
            return f"{name}: there is no folder {missing}; make it, or choose another path"
        return f"{name}: there is no such file"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{name}: the disk is full; free some space or choose another path"
    why = (error.strerror or str(error)).lower()
    return f"{name}: {why}; choose another path"


def refuse_unwritable(outputs: Mapping[str, Path | None]) -> None:
    """Flags and the files they name; ConfigError for all of them that could not be written."""
    problems = []
    for flag, path in outputs.items():
        if path is None:
            continue
        try:
            if "\0" in str(path):
                problems.append(f"{flag}: {str(path)!r} cannot be a file's path")
            elif path.is_dir():
                problems.append(f"{flag}: {path} is a folder; give the name of a file in it")
            elif not path.parent.is_dir():
                problems.append(f"{flag}: there is no folder {path.parent}; make it, or choose another path")
            elif not os.access(path if path.exists() else path.parent, os.W_OK):
                problems.append(f"{flag}: {path} may not be written; choose another path")
        except OSError as error:
            problems.append(f"{flag}: {str(path)[:200]!r} cannot be a file's path: {error.strerror}")
    if problems:
        raise ConfigError(problems)
