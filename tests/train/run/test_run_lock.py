"""One job fills a run directory: others wait for it or leave with its name, and the dead have nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from apart import apart
from moeclipse.core.errors import ConfigError
from moeclipse.train.run.run_lock import RunLock, RunningJob, start_of

FAST = {"beat_s": 0.05, "dead_s": 0.5}
SLOW = {"beat_s": 0.05, "dead_s": 3600.0}
"""Believes in a file for longer than a machine may stand still."""
HOLDER = """
import sys, time
from pathlib import Path
from moeclipse.train.run.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.take(0.0)
print("mine", flush=True)
time.sleep(float(sys.argv[2]))
lock.release()
"""


def hold(folder: Path, seconds: float) -> subprocess.Popen[str]:
    """Another job that has `folder` for so long."""
    job = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), str(seconds)], stdout=subprocess.PIPE, text=True
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "mine\n"
    return job


@apart
def take_and_leave(folder: Path) -> None:
    lock = RunLock(folder, **FAST)
    lock.take(0.0)
    lock.check()
    first, until = os.stat(lock.path).st_mtime_ns, time.monotonic() + 600
    while os.stat(lock.path).st_mtime_ns == first:
        assert time.monotonic() < until, "its heart beats"
        time.sleep(0.01)
    lock.release()


def test_a_directory_is_taken_and_left(tmp_path: Path) -> None:
    for _ in range(2):
        take_and_leave(tmp_path)
        assert list(tmp_path.iterdir()) == []


@apart
def refused(folder: Path, pid: int) -> None:
    begun, told = time.monotonic(), []
    with pytest.raises(ConfigError, match=rf"is in use by process {pid} on .*; wait until it has ended"):
        RunLock(folder).take(0.5, told.append)
    assert time.monotonic() - begun > 0.4
    assert len(told) == 1
    assert f"waiting for process {pid} on " in told[0]


def test_a_living_job_is_named(tmp_path: Path) -> None:
    job = hold(tmp_path, 3600.0)
    try:
        refused(tmp_path, job.pid)
        os.kill(job.pid, signal.SIGSTOP)
        refused(tmp_path, job.pid)
    finally:
        job.kill()
        job.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"], "nothing of those who waited is left"


def test_who_waits_comes_in_when_the_other_leaves(tmp_path: Path) -> None:
    job = hold(tmp_path, 0.7)
    taken_after(tmp_path, 600.0)
    assert job.wait() == 0


@apart
def taken_after(folder: Path, patience_s: float) -> None:
    lock = RunLock(folder)
    lock.take(patience_s)
    lock.check()
    lock.release()


def test_a_killed_job_is_followed_at_once(tmp_path: Path) -> None:
    job = hold(tmp_path, 3600.0)
    job.kill()  # nobody has waited for it yet: it is a zombie, and has nothing
    while start_of(job.pid):
        time.sleep(0.01)
    taken_after(tmp_path, 0.0)
    job.wait()


def foreign(**changes: object) -> str:
    """A job on another host, about whose processes nothing is known here."""
    return json.dumps(asdict(replace(RunningJob.here(), host="far", space="elsewhere", **changes)))


@apart
def followed_when_silent(folder: Path) -> None:
    (folder / "job.json").write_text(foreign(token="1"))
    with pytest.raises(ConfigError, match="on far"):
        RunLock(folder, **SLOW).take(0.1)
    lock = RunLock(folder, **FAST)
    lock.take(600.0)
    lock.release()


def test_a_job_elsewhere_is_dead_when_its_heart_stops(tmp_path: Path) -> None:
    followed_when_silent(tmp_path)
    assert list(tmp_path.iterdir()) == []


@apart
def told_when_taken_over(folder: Path) -> None:
    lock = RunLock(folder, **FAST)
    lock.take(0.0)
    (folder / "job.json").write_text(foreign(token="other"))
    with pytest.raises(ConfigError, match=r"now belongs to process .* on far .*leaves it alone"):
        lock.check()
    time.sleep(0.2)
    lock.release()
    assert json.loads((folder / "job.json").read_text())["host"] == "far", "another's file stays"
    (folder / "job.json").unlink()
    with pytest.raises(ConfigError, match=r"its job\.json was removed"):
        lock.check()


def test_a_job_that_lost_its_directory_is_told(tmp_path: Path) -> None:
    told_when_taken_over(tmp_path)


@apart
def half_a_file(folder: Path) -> None:
    for text in ("", "{", "[" * 100_000, '{"host": 3}', "null"):
        (folder / "job.json").write_text(text)
        with pytest.raises(ConfigError, match="on an unknown host"):
            RunLock(folder, **SLOW).take(0.0)
        lock = RunLock(folder, **FAST)
        lock.take(600.0)
        lock.release()


def test_half_a_file_is_believed_until_it_is_old(tmp_path: Path) -> None:
    half_a_file(tmp_path)


RACER = """
import sys, time
from pathlib import Path
from moeclipse.core.errors import ConfigError
from moeclipse.train.run.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
try:
    lock.take(0.0)
except ConfigError:
    sys.exit(1)
time.sleep(1.0)
lock.check()
"""


def winners(folder: Path) -> int:
    """How many of several jobs that come at once get the directory; they end without leaving it."""
    command = [sys.executable, "-c", RACER, str(folder)]
    jobs = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(5)
    ]
    for job in jobs:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
    for job in jobs:
        assert job.stdin is not None
        job.stdin.write("go\n")
        job.stdin.flush()
    codes = [job.wait() for job in jobs]
    assert set(codes) <= {0, 1}
    return codes.count(0)


def test_of_many_that_come_together_one_gets_it(tmp_path: Path) -> None:
    assert winners(tmp_path) == 1
    assert (tmp_path / "job.json").exists()
    assert winners(tmp_path) == 1, "the same where all of them find the file of a dead job"
