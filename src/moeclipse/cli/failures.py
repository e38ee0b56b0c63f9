"""Why ranks ended: what each of them leaves behind, and which of them failed first.

A rank that fails writes its error to the file that the agent named for it. The others usually fail an instant
later because their collectives break; they are *victims*, and wait for the culprit's words before they leave.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moeclipse.cli.guard import first_to_tell
from moeclipse.core.errors import CommError, ConfigError, DeadlineError, MoEclipseError
from moeclipse.core.outside import read_table
from moeclipse.core.shown import say

CULPRIT_S = 2.0  # how long a victim stays for the culprit's own words
LOST_PEER = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "connection refused",
    "lost a peer",
)

HINTS: dict[int, str] = {
    signal.SIGKILL: "; the system may have run out of memory (see dmesg)",
    signal.SIGBUS: "; a file that it had mapped was cut, or the disk below it is full or gone",
}
"""What usually stands behind a signal."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a rank ended."""

    rank: int
    text: str
    code: int = 1
    time: float = 0.0
    victim: bool = False
    """Another rank left first, as far as this one can tell."""
    late: bool = False
    """It waited longer than the deadline; its text says for whom."""
    stack: str = ""
    """Only for errors that nobody expected."""


def describe(error: Exception, rank: int) -> Failure:
    ours = isinstance(error, MoEclipseError)
    text = str(error) if ours else f"{type(error).__name__}: {error}"
    return Failure(
        rank=rank,
        text=text,
        code=error.code if isinstance(error, MoEclipseError) else 1,
        time=time.time(),
        late=isinstance(error, DeadlineError),
        victim=isinstance(error, CommError) or (not ours and any(word in text.lower() for word in LOST_PEER)),
        stack="" if ours else "".join(traceback.format_exception(error)),
    )


def write_failure(failure: Failure) -> None:
    """Leave the failure where the agent looks, in the form that torchrun prints too."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": failure.stack or failure.text, "timestamp": str(int(failure.time))}
    record = {"message": {"message": failure.text, "extraInfo": extra}, "moeclipse": asdict(failure)}
    try:
        Path(path).write_text(json.dumps(record))
    except OSError:  # a full disk: nobody else will say it
        show_failure(failure, named=True)


def await_culprit() -> None:
    """Stay until the rank that failed first has written why: the agent ends everyone when one rank leaves."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    until = time.monotonic() + CULPRIT_S
    while path and time.monotonic() < until:
        if any(not failure.victim for failure in read_failures(Path(path).parent.parent)):
            return
        time.sleep(0.05)


def show_failure(failure: Failure, named: bool) -> None:
    everywhere = failure.code == ConfigError.code  # bad input fails on every rank alike
    if everywhere and not first_to_tell(failure.text):
        return
    if sys.stderr.isatty():  # whatever stood there was not ended
        sys.stderr.write("\r\033[2K")
    if failure.stack:
        say(failure.stack.rstrip(), error=True)
    where = f" (rank {failure.rank})" if named and not everywhere else ""
    say(f"error{where}: {failure.text}", error=True)


def read_failures(folder: Path | None) -> list[Failure]:
    """What the ranks of one attempt wrote before they ended."""
    found = []
    for file in sorted(folder.glob("*/error.json")) if folder else []:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record: dict[str, Any] = read_table(file)["moeclipse"]
            found.append(Failure(**record))
    return found


def root_cause(written: list[Failure], codes: Mapping[int, int]) -> Failure:
    """The failure that made the others fail; `codes` holds the exit status of every rank that ended badly."""
    culprits = [failure for failure in written if not failure.victim]
    if culprits:
        return min(culprits, key=lambda failure: failure.time)
    # What waited in vain knows for whom; a rank that stood still is killed only after that.
    late = [failure for failure in written if failure.late]
    if late:
        return min(late, key=lambda failure: failure.time)
    # The agent ends the survivors with SIGTERM, so that signal says nothing about a cause.
    killed = [rank for rank, code in sorted(codes.items()) if code < 0 and -code != signal.SIGTERM]
    if killed:
        return _killed(killed[0], -codes[killed[0]])
    if written:
        return min(written, key=lambda failure: failure.time)
    ended = [rank for rank, code in sorted(codes.items()) if code > 0]
    ended.sort(key=lambda rank: codes[rank] == 128 + signal.SIGTERM)  # a rank that heard the agent's SIGTERM
    if ended:
        rank = ended[0]
        return Failure(rank=rank, text=f"rank {rank} ended with status {codes[rank]}", code=codes[rank])
    rank = min(codes, default=0)
    return _killed(rank, -codes.get(rank, -signal.SIGTERM))


def _killed(rank: int, number: int) -> Failure:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hint = HINTS.get(number, "")
    return Failure(rank=rank, text=f"rank {rank} was killed by {name}{hint}", code=128 + number)
