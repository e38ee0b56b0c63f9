"""Works that our own threads complete: waited for like those of torch.distributed."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest

from moeclipse.comm.async_ops.work import CompletedWork, OwnWork
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CommError


def test_whoever_completes_it_ends_the_wait() -> None:
    work = OwnWork()
    threading.Timer(0.05, lambda: work.future.set_result(None)).start()
    begun = time.monotonic()
    work.wait(timedelta(seconds=300))
    work.wait()
    assert 0.03 < time.monotonic() - begun < 150
    assert work.get_future() is work.future


def test_what_it_failed_with_is_what_the_wait_raises() -> None:
    work = OwnWork()
    work.future.set_exception(ValueError("rows are missing"))
    for _ in range(2):
        with pytest.raises(ValueError, match="rows are missing"):
            work.wait(timedelta(seconds=1))


def test_a_deadline_reads_as_that_of_a_library() -> None:
    """So that whoever explains failures sees that it was one."""
    work, mesh = OwnWork(), Mesh.single()
    with pytest.raises(RuntimeError, match=r"^timed out$"):
        work.wait(timedelta(seconds=0.01))
    transfer = mesh.a2a.launch(mesh.world, "rows", lambda: work, None)
    with pytest.raises(CommError, match="rank 0 waited 60 s in rows"):
        transfer.settle(0.01)


def test_what_is_complete_is_not_waited_for() -> None:
    work = CompletedWork()
    work.wait(timedelta(seconds=0))
    work.wait()
    assert work.get_future().done()
    mesh = Mesh.single()
    mesh.recorder.begin_step()
    assert mesh.a2a.launch(mesh.world, "rows", lambda: work, 7).get() == 7
    ((_, _, begun, done),) = mesh.recorder.end_step().transfers
    assert begun <= done
