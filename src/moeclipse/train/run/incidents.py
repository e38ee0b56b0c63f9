"""What went wrong in a run, kept beside its metrics.

    RUN/incidents.jsonl     one record for each incident: what, where, since when, who waited in what
    RUN/ops/rank-3.txt      the last ops of a rank: launched, started, done

The rank whose words all others repeat writes the record. Ops are copied by each rank that fails, and by that
one for all ranks of its host, because one that was killed or stands still cannot. Where no rank is left to
write, the launcher does (`kept_by_launcher`): ranks tell it the run's folder. A rank that lost a peer may
write before the launcher has seen that the peer was killed: the launcher's record then takes the place of it.

Hazard: this runs while things fail, also on a thread beside a stuck one. Nothing here may raise or wait, and
nobody decides by what stands in the file: it may end in half a line, and hold whatever a bad disk left in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from moeclipse.comm.failure import Cause, Watch
from moeclipse.comm.start import RankPlace, rank_folder
from moeclipse.core.errors import CommError
from moeclipse.core.outside import lines_of, open_file, parse_json, read_bytes
from moeclipse.train.run.run_files import append_line, keep_lines

RECORDS = "incidents.jsonl"
OPS = "ops"
HEAD = 1000  # bytes of a log that hold its first line
RUN = "run"  # in a rank's folder: the run's directory
PLACES = {name: re.compile(rf"\b{name} (\d+)") for name in ("layer", "microbatch", "stage")}


class Incidents:
    """Of one rank: at most one is kept, because a rank that fails ends."""

    def __init__(self, watch: Watch, stuck: Callable[[CommError], None]) -> None:
        """`stuck` ends the process of a rank that cannot leave by itself."""
        self.watch, self._stuck = watch, stuck
        self.directory: Path | None = None
        self._kept = threading.Event()

    def begin(self, directory: Path) -> None:
        """From now on the directory is this run's; the launcher is told."""
        self.directory = directory
        folder = rank_folder()
        if folder is not None:
            with contextlib.suppress(OSError):
                (folder / RUN).write_bytes(os.fsencode(directory.resolve()))

    def end(self, error: CommError) -> None:
        """As the watchdog of a stuck rank."""
        self.keep(str(error))
        self._stuck(error)

    def keep(self, text: str) -> None:
        """This rank fails with `text`, which may be another's."""
        if self._kept.is_set() or self.directory is None or not self.directory.is_dir():
            return
        self._kept.set()  # the main thread may get as far as this, and be stuck in leaving
        watch, directory = self.watch, self.directory
        cause = watch.first_cause() or Cause(rank=watch.rank, text=text)
        with contextlib.suppress(OSError):
            (directory / OPS).mkdir(exist_ok=True)
            (directory / OPS / f"rank-{watch.rank}.txt").write_text(watch.log.text())
            if cause.rank != watch.rank:
                return
            folder = rank_folder()
            if folder is not None:
                copy_ops(folder.parent, directory, but=watch.rank)
            kind = "deadline" if cause.late else "error"
            record = {"kind": kind, "rank": cause.rank, "what": cause.text, "step": watch.log.step}
            record |= place_of(cause.waited)
            append(directory, record)


def kept_by_launcher(ranks: Path | None, rank: int | None, text: str) -> None:
    """As the launcher, of an attempt whose ranks left their files in `ranks`."""
    directory = run_of(ranks)
    if ranks is None or directory is None:
        return
    with contextlib.suppress(OSError, ValueError):
        with contextlib.suppress(OSError):
            copy_ops(ranks, directory)
        since, noticed = min(file.stat().st_mtime for file in ranks.glob(f"*/{RUN}")), {}
        with contextlib.suppress(OSError):
            noticed = withdraw(directory, since)
        record = {"kind": "signal", "rank": rank, "what": text, "step": step_of(ranks), **noticed}
        append(directory, attempt_of(ranks) | record)


def told_by_launcher(ranks: Path, record: Mapping[str, object]) -> None:
    """What the launcher decided after an attempt."""
    directory = run_of(ranks)
    if directory is not None:
        kept(directory, attempt_of(ranks) | dict(record))


def attempt_of(ranks: Path) -> dict[str, object]:
    """As torch's agent names the folder of an attempt; the launcher itself is in none."""
    found = re.fullmatch(r"attempt_(\d{1,9})", ranks.name)
    return {"attempt": int(found[1])} if found else {}


def run_of(ranks: Path | None) -> Path | None:
    """The run's directory, as the ranks of an attempt have told the launcher."""
    told = sorted(ranks.glob(f"*/{RUN}")) if ranks is not None else []
    with contextlib.suppress(OSError, ValueError):
        return Path(os.fsdecode(read_bytes(told[0]))) if told else None
    return None


def withdraw(directory: Path, since: float) -> dict[str, object]:
    """Take back what ranks of one attempt wrote of a peer's end: they saw that it was gone, and not why.

    Lines that are no records stay as they are; their numbers are told.
    """
    file = directory / RECORDS
    if not file.exists():
        return {}
    taken: set[str] = set()
    noticed: list[str] = []
    damaged: list[int] = []
    with open_file(file) as lines:
        for number, line in enumerate(lines_of(lines), start=1):
            record = record_of(line)
            if record is None:
                damaged += [number] if line is None or line.strip() else []
            elif record.get("kind") == "error" and is_late(record.get("time"), since):
                taken.add(line.decode("utf-8", "replace").rstrip("\n") if line else "")
                noticed.append(str(record.get("what")))
    if taken:
        keep_lines(file, lambda line: line.rstrip("\n") not in taken)
    found: dict[str, object] = {"noticed": noticed} if noticed else {}
    return {**found, **({"damaged_lines": damaged} if damaged else {})}


def record_of(line: bytes | None) -> dict[str, object] | None:
    try:
        record = None if line is None else parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def is_late(when: object, since: float) -> bool:
    """Whether of this attempt: records keep milliseconds, and the times of files are finer."""
    return isinstance(when, int | float) and when >= round(since, 3)


def step_of(ranks: Path) -> int | None:
    """The step in which an attempt ended, as its ranks' logs say; None before the first."""
    heads = [head for _, head in logs_in(ranks)]
    steps = [int(found[1]) for head in heads if (found := re.search(rb", step (\d{1,18});", head))]
    return max(steps, default=None)


def logs_in(ranks: Path) -> Iterator[tuple[Path, bytes]]:
    """The files of a host's ranks that can be read, each with its first line."""
    for path in sorted(ranks.glob("*/ops.txt")):
        with contextlib.suppress(OSError), open_file(path) as file:
            yield path, file.readline(HEAD)


def copy_ops(ranks: Path, directory: Path, but: int | None = None) -> None:
    (directory / OPS).mkdir(exist_ok=True)
    for file, head in logs_in(ranks):
        found = re.match(rb"rank (\d{1,9}) ", head)
        if found and int(found[1]) != but:
            shutil.copyfile(file, directory / OPS / f"rank-{int(found[1])}.txt")


def kept(directory: Path, record: Mapping[str, object]) -> None:
    """Of what ended nothing; a full disk is no reason to end, either."""
    with contextlib.suppress(OSError):
        append(directory, record)


def append(directory: Path, record: Mapping[str, object]) -> None:
    attempt = RankPlace.read().attempt
    head = {"time": round(time.time(), 3), "attempt": attempt, "host": socket.gethostname()}
    append_line(directory / RECORDS, json.dumps({**head, **record}))


def place_of(waited: Mapping[str, object]) -> dict[str, object]:
    """The op that was waited for, and what its label says of layer, microbatch and stage."""
    if not waited:
        return {}
    label = str(waited.get("op", ""))
    places = {name: int(found[1]) for name, pattern in PLACES.items() if (found := pattern.search(label))}
    return {
        "op": label,
        "lane": waited.get("lane", ""),
        **places,
        "waited_s": waited.get("since_s"),
        "stands": waited.get("stands", {}),
    }
