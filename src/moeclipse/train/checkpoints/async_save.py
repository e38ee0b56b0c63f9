"""Asynchronous checkpoints: a copy in host memory, written by a thread, agreed on between two steps.

    begin      pieces are copied, and each rank's thread writes its file         training waits for the copy
    advance    when all have written, rank 0's thread commits; then all know     called between steps
    finish     the same, waiting for the disk                                    before the next, at the end

Idea. Threads touch the disk and nothing else; ranks speak to each other on their main threads alone, in the
order in which all of them do. Whether a rank's part has ended is told with the numbers of a step
(`ended`), so that all ranks see the same and call `advance` together.

Contract. One save at a time. A failure is raised by `advance` or `finish`, on all ranks, in the words of a
save that training waits for. A kill at any moment leaves what it would leave there.

Hazard. Holds a copy of this rank's state in host memory from the first save on: it is used again, because
fresh pages cost more than the copy (`host_memory`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moeclipse.train.checkpoints.host_memory import CudaPins, HostMemory
from moeclipse.train.checkpoints.save import SaveJob
from moeclipse.train.ranks import Attempt, agree, attempt

SPARE_BYTES = 1 << 26
"""What a state may have grown by its first save: loads of experts are kept step by step."""


class AsyncSave:
    def __init__(self) -> None:
        self._job: SaveJob | None = None
        self.memory: HostMemory | None = None
        self._thread: threading.Thread | None = None
        self._outcome: Attempt[Any] = {}
        self._committing = False

    @property
    def under_way(self) -> bool:
        return self._job is not None

    @property
    def ended(self) -> bool:
        """Whether this rank has nothing more to do before all ranks speak."""
        return self._thread is None or not self._thread.is_alive()

    def make_ready(self, num_bytes: int) -> None:
        """Memory for the copy of a state on a device, before the first save. Returns at once."""
        if self.memory is None:
            self.memory = HostMemory(num_bytes + SPARE_BYTES, CudaPins())

    def begin(self, job: SaveJob) -> None:
        """Take over a save that all ranks have prepared. The state may change when this returns."""
        assert job.shard is not None
        job.shard, self.memory = job.shard.copied(self.memory)
        self._job, self._committing = job, False
        self._run(job.write)

    def advance(self) -> Path | None:
        """After all ranks have `ended`: go on; the checkpoint's path once it is one. Collective."""
        job = self._job
        assert job is not None
        self._wait()
        try:
            with job.failing_together():
                results = agree(job.ranks, self._outcome)
        except BaseException:
            self._job = None
            raise
        if self._committing:
            self._job = None
            return job.final
        self._committing = True
        self._run(lambda: job.commit(results))
        return None

    def finish(self) -> Path | None:
        """Wait for the save that is under way; its path, or None where there is none. Collective."""
        path = None
        while self._job is not None:
            path = self.advance()
        return path

    def _run(self, work: Callable[[], object]) -> None:
        job = self._job
        assert job is not None

        def run() -> None:
            self._outcome = attempt(work, job.words)

        self._thread = threading.Thread(target=run, name="moeclipse-save", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
