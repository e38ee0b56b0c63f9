"""Which job fills a run directory: one at a time, known by name, and gone when its heartbeat expires.

A job that was requeued may start while the one before it still dies. Both would write checkpoints into the
same folder, and each would remove the other's half-written one. So rank 0 keeps a file, `job.json`, in the
run directory: host, process, job and a token; a thread touches it every few seconds.

    free       no file, or its job is dead: the process is gone (same host), or the heart stopped (elsewhere)
    taken      the job lives: whoever comes waits for `patience_s`, then leaves with the job's name

Contract. The file is made in one step, and a dead job's file is renamed away before a new one is made, so of
several jobs that come together one gets it. `check` says whether this job still has the directory; it is
called before anything there is removed.

Hazard. Times are compared on the file system's own clock (that of a fresh file beside), because hosts
disagree.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from moeclipse.core.errors import ConfigError
from moeclipse.core.outside import read_json, read_table
from moeclipse.train.run.run_files import JOB

BEAT_S = 5.0
SETTLE_S = 0.05
UNKNOWN = ""
"""The token of a file that cannot be read."""
DEAD_S = 60.0  # without a beat; far more than a busy file system delays one


@dataclass(frozen=True, kw_only=True)
class RunningJob:
    """A process that fills a run directory: rank 0 of a job."""

    host: str
    pid: int
    started: str
    """Of the process, as the system counts it: numbers of processes are used again."""
    space: str
    """Of process numbers: boot and name space in which `pid` means something."""
    token: str
    since: float

    @property
    def words(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host} (since {when})"

    @classmethod
    def here(cls) -> RunningJob:
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            started=start_of(os.getpid()),
            space=_space(),
            token=secrets.token_hex(8),
            since=time.time(),
        )

    def is_dead(self) -> bool | None:
        """None where it cannot be known from here."""
        if not self.space or self.space != _space():
            return None
        return start_of(self.pid) != self.started


def start_of(pid: int) -> str:
    """When a process started, in the system's ticks; empty where there is none, or a zombie."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if after_name[0] in "ZX" else after_name[19]


def _space() -> str:
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return ""


class RunLock:
    """Held by rank 0 from `take` to `release`."""

    def __init__(self, directory: Path, *, beat_s: float = BEAT_S, dead_s: float = DEAD_S) -> None:
        self.path = directory / JOB
        self.beat_s, self.dead_s = beat_s, dead_s
        self.me = RunningJob.here()
        self._leaving = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, patience_s: float, tell: Callable[[str], None] = lambda _: None) -> None:
        """Take the directory; ConfigError names the job where another one lives on."""
        until, told = time.monotonic() + patience_s, False
        while not (self._try() and self._stays()):
            job = self.job()
            if job is None or job.token == self.me.token:
                continue  # it left this moment, or our file came back
            if self._is_over(job):
                self._bury(job)
                continue
            if time.monotonic() >= until:
                raise ConfigError(
                    f"run directory {self.path.parent} is in use by {job.words}; wait until it has ended, "
                    f"or choose another --run.name"
                )
            if not told:
                tell(f"waiting for {job.words}, which still uses {self.path.parent}")
                told = True
            time.sleep(min(0.2, self.beat_s))
        self._thread = threading.Thread(target=self._beat, name="moeclipse-job", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """ConfigError where another job has taken the directory over."""
        job = self.job()
        if job is not None and job.token in (self.me.token, UNKNOWN):  # a bad disk is no other job
            return
        who = job.words if job is not None else "nobody, its job.json was removed"
        raise ConfigError(
            f"run directory {self.path.parent} now belongs to {who}; this job leaves it alone and ends"
        )

    def release(self) -> None:
        self._leaving.set()
        if self._thread is not None:
            self._thread.join(1.0)
        with contextlib.suppress(OSError):
            job = self.job()
            if job is not None and job.token == self.me.token:
                self.path.unlink()

    def job(self) -> RunningJob | None:
        """Who the file names; None where there is no file, or one that nobody can read (it is removed)."""
        try:
            value = read_json(self.path)
            return RunningJob(
                host=str(value["host"]),
                pid=int(value["pid"]),
                started=str(value["started"]),
                space=str(value["space"]),
                token=str(value["token"]),
                since=float(value["since"]),
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            if self._silence_s() > self.dead_s:  # half a file of a dead job
                self.path.unlink(missing_ok=True)
                return None
            return RunningJob(
                host="an unknown host", pid=0, started="", space="", token=UNKNOWN, since=time.time()
            )

    def _try(self) -> bool:
        """Whether the file could be made: its text is in it at once, so that no reader sees an empty one."""
        job = self.job()
        if job is not None:
            return job.token == self.me.token
        temporary = self.path.with_name(f".{JOB}.{self.me.token}")
        temporary.write_text(json.dumps(asdict(self.me)))
        try:
            os.link(temporary, self.path)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            return self._try_exclusive()
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def _stays(self) -> bool:
        """Whether the file is still ours a moment later: whoever buries a dead job may have moved it."""
        time.sleep(SETTLE_S)
        job = self.job()
        return job is not None and job.token == self.me.token

    def _try_exclusive(self) -> bool:
        try:
            with self.path.open("x") as file:
                file.write(json.dumps(asdict(self.me)))
        except FileExistsError:
            return False
        return True

    def _is_over(self, job: RunningJob) -> bool:
        dead = job.is_dead()
        return self._silence_s() > self.dead_s if dead is None else dead

    def _silence_s(self) -> float:
        """Seconds since the job's last beat, on the clock of the file system."""
        probe = self.path.with_name(f".{JOB}.{self.me.token}.now")
        try:
            probe.write_text("")
            return probe.stat().st_mtime - self.path.stat().st_mtime
        except FileNotFoundError:
            return 0.0
        finally:
            probe.unlink(missing_ok=True)

    def _bury(self, job: RunningJob) -> None:
        """Move a dead job's file away; if another job was quicker, give it its file back."""
        grave = self.path.with_name(f".{JOB}.{self.me.token}.dead")
        with contextlib.suppress(FileNotFoundError, ValueError):
            os.rename(self.path, grave)
            if read_table(grave).get("token") != job.token:
                with contextlib.suppress(OSError):
                    os.link(grave, self.path)
            grave.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._leaving.wait(self.beat_s):
            job = self.job()
            if job is None or job.token != self.me.token:
                return  # taken over: the heart of this file is another's
            with contextlib.suppress(OSError):
                os.utime(self.path)
