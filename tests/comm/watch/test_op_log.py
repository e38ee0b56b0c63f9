"""The log keeps the last ops of a rank, in memory and in a file that outlives it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moeclipse.comm.watch.op_log import KEPT, WIDTH, LoggedOp, OpLog


class Marks:
    """Streams that get to their marks when told to."""

    def __init__(self) -> None:
        self.words = [-1] * (2 * KEPT)
        self.pending: list[tuple[int, int]] = []

    def write(self, stream: int, word: int, number: int) -> None:
        self.pending.append((word, number))

    def read(self) -> list[int]:
        return self.words

    @staticmethod
    def value(number: int) -> int:
        return number

    def advance(self) -> None:
        word, number = self.pending.pop(0)
        self.words[word] = number


SMALL_DISK = """
import os, sys
from pathlib import Path
from moeclipse.comm.watch.op_log import OpLog
disk = Path(sys.argv[1])
(disk / "filler").write_bytes(bytes(40 << 10))
try:
    OpLog(disk / "ops.txt")
except OSError as error:
    print(os.strerror(error.errno))
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_a_disk_without_room_for_it_is_told_and_ends_no_process(tmp_path: Path) -> None:
    unshare = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "-Urm"]
    mount = f"mount -t tmpfs -o size=64k tmpfs {tmp_path}"
    tried = subprocess.run([*unshare, "sh", "-c", mount], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {tried.stderr.strip()}")
    command = [
        *unshare,
        "sh",
        "-c",
        f'{mount} && exec "$@"',
        "sh",
        sys.executable,
        "-c",
        SMALL_DISK,
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stdout) == (0, "No space left on device\n"), done.stderr


def test_times_of_a_host() -> None:
    log = OpLog()
    op = log.launch("a2a", "rows", (0, 1))
    assert (op.started, op.done) == (None, None)
    log.start(op)
    log.end(op)
    assert op.launched <= op.started <= op.done
    assert log.ops == [op]


def test_times_of_a_stream_are_known_when_it_gets_there() -> None:
    marks = Marks()
    log = OpLog(marks=marks)  # type: ignore[arg-type]
    op = log.launch("a2a", "rows", (0, 1))
    log.start(op, 7)
    log.end(op, 7)
    log.look(10.0)
    assert (op.started, op.done) == (None, None)
    marks.advance()
    log.look(11.0)
    assert (op.started, op.done) == (11.0, None)
    marks.advance()
    log.look(12.0)
    assert (op.started, op.done) == (11.0, 12.0)


def test_an_old_mark_in_the_same_place_says_nothing_of_a_new_op() -> None:
    marks = Marks()
    log = OpLog(marks=marks)  # type: ignore[arg-type]
    for _ in range(KEPT):
        op = log.launch("a2a", "old")
        log.start(op, 7)
        log.end(op, 7)
    while marks.pending:
        marks.advance()
    new = log.launch("a2a", "new")
    log.look(1.0)
    assert (new.started, new.done) == (None, None)


def test_the_deadline_counts_from_the_start_on_a_device_and_from_the_wait_on_a_host() -> None:
    op = LoggedOp(number=0, lane="a2a", label="rows", ranks=(0, 1), launched=0.0)
    assert op.overdue_s(100.0, 5.0) == 0, "it stands behind another"
    op.started = 90.0
    assert op.overdue_s(100.0, 5.0) == 5.0
    op.patience_s = 20.0
    assert op.overdue_s(100.0, 5.0) == 0
    op.patience_s, op.on_host = None, True
    assert op.overdue_s(100.0, 5.0) == 0, "nobody waits for it yet"
    op.waited = 94.0
    assert op.overdue_s(100.0, 5.0) == 1.0
    op.waited, op.done = 1.0, 99.0
    assert op.overdue_s(100.0, 5.0) == 0


def test_transfers_are_late_and_compute_is_not() -> None:
    log = OpLog()
    log.launch("compute", "ATTN_F").started = 1.0
    assert log.overdue(100.0, 5.0) is None
    transfer = log.launch("a2a", "rows", (0, 1))
    transfer.started = 2.0
    later = log.launch("a2a", "other rows", (0, 1))
    later.started = 3.0
    assert log.overdue(100.0, 5.0) is transfer
    assert log.overdue(6.5, 5.0) is None


def test_what_is_launched_in_a_first_step_has_more_time() -> None:
    log = OpLog()
    log.patience_s = 60.0
    early = log.launch("a2a", "rows", (0, 1))
    log.patience_s = None
    late = log.launch("a2a", "rows", (0, 1))
    early.started = late.started = 0.0
    assert log.overdue(50.0, 5.0) is late
    assert early.overdue_s(50.0, 5.0) == 0


def test_where_a_rank_stands() -> None:
    log = OpLog()
    assert not log.stand(0.0).waits
    done = log.launch("a2a", "rows of layer 1", (0, 1))
    done.started, done.done = 1.0, 2.0
    stand = log.stand(5.0)
    assert (stand.waits, stand.op, stand.since_s) == (False, "rows of layer 1", 3.0)
    for label, begun in (("rows of layer 3", 4.0), ("rows of layer 2", 3.0)):
        log.launch("a2a", label, (0, 1)).started = begun
    log.launch("compute", "ATTN_F").started = 1.0
    log.launch("a2a", "behind others", (0, 1))
    stand = log.stand(5.0)
    assert (stand.waits, stand.op, stand.since_s, stand.ranks) == (True, "rows of layer 2", 2.0, (0, 1))


def lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.strip()]


def test_the_file_has_the_last_ops_and_their_times(tmp_path: Path) -> None:
    path = tmp_path / "ops.txt"
    log = OpLog(path, rank=3)
    for number in range(KEPT + 5):
        op = log.launch("a2a", f"rows of layer {number}")
        if number % 2:
            log.start(op)
            log.end(op)
    assert path.stat().st_size == (KEPT + 2) * WIDTH
    head, columns, *ops = lines(path)
    assert head.startswith("rank 3 on ")
    assert f"process {os.getpid()}" in head
    assert columns.split() == ["op", "launched", "started", "done", "lane:", "what"]
    assert len(ops) == KEPT
    assert sorted(int(line.split()[0]) for line in ops) == list(range(5, KEPT + 5))
    last = next(line for line in ops if line.split()[0] == str(KEPT + 4))
    assert last.split()[2:] == ["a2a:", "rows", "of", "layer", str(KEPT + 4)], "not started"
    before = next(line for line in ops if line.split()[0] == str(KEPT + 3))
    assert all(abs(float(stamp) - time.time()) < 60 for stamp in before.split()[1:4])
    assert [line.split() for line in log.text().splitlines()[2:]] == sorted(
        (line.split() for line in ops), key=lambda words: int(words[0])
    )


def test_a_label_of_any_length_and_letters_keeps_the_lines_apart(tmp_path: Path) -> None:
    log = OpLog(tmp_path / "ops.txt")
    log.launch("a2a", "é" * 1000)
    log.launch("a2a", "next")
    assert [len(line) for line in (tmp_path / "ops.txt").read_text().splitlines()] == [WIDTH - 1] * (KEPT + 2)
    assert lines(tmp_path / "ops.txt")[-1].strip().endswith("next")


def test_what_a_killed_process_did_last_can_be_read(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from moeclipse.comm.watch.op_log import OpLog\n"
        "log = OpLog(Path(sys.argv[1])); log.start(log.launch('a2a', 'rows of layer 7'))\n"
        "print('there', flush=True); time.sleep(60)"
    )
    path = tmp_path / "ops.txt"
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        os.kill(process.pid, signal.SIGKILL)
    words = lines(path)[2].split()
    assert len(words) == 8
    assert words[-4:] == ["rows", "of", "layer", "7"]


def test_a_folder_that_is_not_there_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        OpLog(tmp_path / "missing" / "ops.txt")
