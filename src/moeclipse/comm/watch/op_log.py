"""The last ops of a rank: launched, started, done.

    op = log.launch("a2a", "dispatch of rows, layer 3, microbatch 1", group.ranks)
    log.start(op, stream)         # on a device: when the stream gets there
    log.end(op, stream)           # likewise; without a stream: now

The log is a ring in memory, and in a file where it has a path: lines of one width in a mapping, so that what
a rank did last can be read after it was killed. On a device nobody asks the driver how far it is, because
such a call can wait for what hangs: streams write marks to host memory (`DeviceMarks`), and `look` reads
them.

Contract: one thread launches; any thread may look. Times are seconds of the monotonic clock here, and of the
day's clock in the file.
"""

from __future__ import annotations

import itertools
import mmap
import os
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moeclipse.comm.watch.culprits import Stand
from moeclipse.ops.cuda_driver import LOW, cuda_driver

KEPT = 200
MARKS = 2 * KEPT
WIDTH = 256
HEADER = 2  # lines before the first op
COLUMN = 15  # of a time in a line
STARTED_AT = 8 + COLUMN
DONE_AT = STARTED_AT + COLUMN
COLUMNS = f"{'op':>8} {'launched':>14} {'started':>14} {'done':>14}  lane: what"


@dataclass(slots=True, kw_only=True)
class LoggedOp:
    number: int
    lane: str
    label: str
    ranks: tuple[int, ...]
    """Who takes part."""
    launched: float
    started: float | None = None
    done: float | None = None
    on_host: bool = False
    """No stream runs it: the host waits for it."""
    waited: float | None = None
    """Since when."""
    patience_s: float | None = None
    """Replaces the deadline."""

    def overdue_s(self, now: float, deadline_s: float) -> float:
        """By how much it is late: the deadline counts from its start on a device, from the wait on a host."""
        begun = self.waited if self.on_host else self.started
        if self.done is not None or begun is None:
            return 0.0
        return max(now - begun - (self.patience_s or deadline_s), 0.0)


class OpLog:
    def __init__(self, path: Path | None = None, *, rank: int = 0, marks: DeviceMarks | None = None) -> None:
        self._marks = marks
        self.patience_s: float | None = None
        """Replaces the deadline of what is launched from now on: a first step compiles and loads kernels."""
        self.recent: deque[LoggedOp] = deque(maxlen=KEPT)
        self.numbers = itertools.count()
        self._day = time.time() - time.monotonic()
        self._who = f"rank {rank} on {socket.gethostname()}, process {os.getpid()}"
        self.step: int | None = None
        """The one under way; None before the first."""
        self._lines: mmap.mmap | None = None
        self.in_file = path is not None
        if path is not None:
            self._lines = self._open(path)

    def _open(self, path: Path) -> mmap.mmap:
        size = (HEADER + KEPT) * WIDTH
        with path.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a page that finds no room later ends the process
            lines = mmap.mmap(file.fileno(), size)
        for number, text in enumerate((self._head, COLUMNS, *[""] * KEPT)):
            lines[number * WIDTH : (number + 1) * WIDTH] = _line(text)
        return lines

    @property
    def _head(self) -> str:
        return f"{self._who}{'' if self.step is None else f', step {self.step}'}; seconds since 1970"

    # who launches

    def begin_step(self, step: int) -> None:
        self.step = step
        if self._lines is not None:
            self._lines[:WIDTH] = _line(self._head)

    def launch(self, lane: str, label: str, ranks: Sequence[int] = ()) -> LoggedOp:
        op = LoggedOp(
            number=next(self.numbers),
            lane=lane,
            label=label,
            ranks=tuple(ranks),
            launched=time.monotonic(),
            patience_s=self.patience_s,
        )
        self.recent.append(op)
        if self.in_file:
            self.write(op)
        return op

    def write(self, op: LoggedOp) -> None:
        """To the file, an op that has just been launched."""
        assert self._lines is not None
        text = f"{op.number:>8} {op.launched + self._day:>14.3f}{'':{2 * COLUMN}}  {op.lane}: {op.label}"
        at = self._line_of(op)
        self._lines[at : at + WIDTH] = _line(text)
        if op.started is not None:
            self._write_time(op, STARTED_AT, op.started)

    def start(self, op: LoggedOp, stream: int | None = None) -> None:
        """Now; or when the stream of that handle gets there."""
        if stream is None or self._marks is None:
            self._started(op, time.monotonic())
        else:
            self._marks.write(stream, 2 * (op.number % KEPT), op.number)

    def end(self, op: LoggedOp, stream: int | None = None) -> None:
        if stream is None or self._marks is None:
            self._ended(op, time.monotonic())
        else:
            self._marks.write(stream, 2 * (op.number % KEPT) + 1, op.number)

    def write_end(self, op: LoggedOp) -> None:
        """To the file, of an op whose end its owner has noted."""
        assert op.done is not None
        self._write_time(op, DONE_AT, op.done)

    # who looks

    @property
    def ops(self) -> list[LoggedOp]:
        """Oldest first."""
        return list(self.recent)  # in one go: another thread may be launching

    def look(self, now: float) -> None:
        """Take over the marks that streams have written since."""
        if self._marks is None:
            return
        words = self._marks.read()
        for op in self.ops:
            at, mark = 2 * (op.number % KEPT), self._marks.value(op.number)
            if op.started is None and words[at] == mark:
                self._started(op, now)
            if op.done is None and words[at + 1] == mark:
                self._ended(op, now)

    def patient(self, deadline_s: float) -> LoggedOp | None:
        """What the host waits for, longer than the deadline if need be."""
        waiting = [op for op in self.ops if op.on_host and op.waited is not None and op.done is None]
        return next((op for op in waiting if op.ranks and (op.patience_s or 0.0) > deadline_s), None)

    def overdue(self, now: float, deadline_s: float) -> LoggedOp | None:
        """The transfer that is late by most. Compute is never late: whoever waits for it says so."""
        late = [op for op in self.ops if op.ranks and op.overdue_s(now, deadline_s) > 0]
        return max(late, key=lambda op: op.overdue_s(now, deadline_s), default=None)

    def stand(self, now: float) -> Stand:
        """Where this rank is: in the transfer that it waits for longest, or behind its last op."""
        ops = self.ops
        waiting = [
            (op.waited if op.on_host else op.started, op) for op in ops if op.ranks and op.done is None
        ]
        begun = [(since, op) for since, op in waiting if since is not None]
        if begun:
            since, op = min(begun, key=lambda one: one[0])
            return Stand(waits=True, op=op.label, lane=op.lane, since_s=now - since, ranks=op.ranks)
        if not ops:
            return Stand(waits=False)
        last = ops[-1]
        since = last.done or last.started or last.launched
        return Stand(waits=False, op=last.label, lane=last.lane, since_s=now - since)

    def text(self) -> str:
        """The lines of the file, oldest op first."""
        lines = [self._head, COLUMNS]
        for op in self.ops:
            times = (op.launched, op.started, op.done)
            columns = "".join(f" {'' if t is None else f'{t + self._day:.3f}':>14}" for t in times)
            lines.append(f"{op.number:>8}{columns}  {op.lane}: {op.label}")
        return "\n".join(lines) + "\n"

    # lines

    def _started(self, op: LoggedOp, now: float) -> None:
        op.started = now
        self._write_time(op, STARTED_AT, now)

    def _ended(self, op: LoggedOp, now: float) -> None:
        op.done = now
        self._write_time(op, DONE_AT, now)

    def _write_time(self, op: LoggedOp, column: int, now: float) -> None:
        if self._lines is not None and op.number > self.recent[-1].number - KEPT:
            at = self._line_of(op) + column
            self._lines[at : at + COLUMN] = f" {now + self._day:>14.3f}".encode()

    def _line_of(self, op: LoggedOp) -> int:
        return (HEADER + op.number % KEPT) * WIDTH


def _line(text: str) -> bytes:
    return text.encode("ascii", "replace")[: WIDTH - 1].ljust(WIDTH - 1) + b"\n"


WORD = 4


class DeviceMarks:
    def __init__(self, num_words: int) -> None:
        """Needs a CUDA device: the memory is registered with it."""
        self._words = torch.full((num_words,), -1, dtype=torch.int32, pin_memory=True)
        self._values = self._words.numpy()
        self._driver = cuda_driver()
        self._address = self._driver.device_address(self._words.data_ptr())

    def write(self, stream: int, word: int, number: int) -> None:
        """When the stream of that handle gets here. A captured graph has no marks: it runs many times."""
        if not torch.cuda.is_current_stream_capturing():
            self._driver.write(stream, self._address + WORD * word, number)

    def read(self) -> list[int]:
        found: list[int] = self._values.tolist()
        return found

    @staticmethod
    def value(number: int) -> int:
        """What a word reads like after `number` was written: 32 bits with a sign."""
        low = number & LOW
        return low - (1 << 32) if low >> 31 else low
