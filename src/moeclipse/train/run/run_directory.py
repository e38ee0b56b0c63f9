"""The directory of a run: opened by one job at a time, and left as it was where a resume is refused.

    held       rank 0 takes the directory for this job (`train/run/run_lock`); all learn whether it could
    accept     config.toml is written: the run, or the resume, has been found possible
    scribe     does the writing that a run can do without (`train/run/background_writer`)

Contract. What a run writes is its user's alone (0600, 0700), unless `run.shared` says otherwise: the umask is
that of the process, so checkpoints, metrics and exports of all ranks have it. Whatever rank 0 cannot do ends
all ranks with the same ConfigError, before any of them trains.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.train.run.background_writer import Scribe
from moeclipse.train.run.run_files import holds_run, write_atomic
from moeclipse.train.run.run_lock import RunLock

PATIENCE_S = 60.0  # for rank 0's disk


class RunDirectory:
    def __init__(self, path: Path, mesh: Mesh, wait_s: float, *, shared: bool = False) -> None:
        """`shared`: others may read what is written, as far as the umask lets them."""
        self.path, self.mesh, self.wait_s, self.shared = path, mesh, wait_s, shared
        self.scribe = Scribe()
        self._lock: RunLock | None = None

    @contextmanager
    def held(self, resume: str, tell: Callable[[str], None]) -> Iterator[None]:
        """This job's, from here to the end. Collective."""
        before = os.umask(0o077)
        if self.shared:
            os.umask(before)
        try:
            self._together(lambda: self._open(resume, tell), self.wait_s + PATIENCE_S)
            if self.mesh.rank == 0:
                self.scribe.begin()
            yield
        finally:
            self.scribe.end()
            if self._lock is not None:
                self._lock.release()
            os.umask(before)

    def accept(self, config: str) -> None:
        """Write the configuration that this run goes on with. Collective."""
        self._together(lambda: write_atomic(self.path / "config.toml", config), PATIENCE_S)

    def check_job(self) -> None:
        """Before anything here is removed: ConfigError where another job has taken over. Collective."""
        self._together(lambda: self._lock.check() if self._lock else None, PATIENCE_S)

    def _open(self, resume: str, tell: Callable[[str], None]) -> None:
        if resume != "auto" and holds_run(self.path):
            raise ConfigError(
                f"run directory {self.path} exists; continue it with --resume auto, "
                "or choose another --run.name"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        lock = RunLock(self.path)
        lock.take(self.wait_s if resume == "auto" else 0.0, tell)
        self._lock = lock

    def _together(self, work: Callable[[], None], patience_s: float) -> None:
        """Rank 0 does it; all ranks learn what came of it before anyone goes on."""
        problems: list[str] = []
        if self.mesh.rank == 0:
            try:
                work()
            except ConfigError as error:
                problems = error.problems
            except OSError as error:
                problems = [f"run directory {self.path} cannot be written: {error}; choose another --run.dir"]
        problems = self.mesh.gather_objects(problems, patience_s)[0]
        if problems:
            raise ConfigError(problems)
