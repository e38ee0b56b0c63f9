"""A transfer keeps what travels, as long as it travels; stamps say when it was done; deadlines are kept."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from moeclipse.comm.flight.lane import Lane, Transfer
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CommError


class Carrier:
    """A transfer that holds no tensor itself and is done when the test says so."""

    def __init__(self) -> None:
        self.future: Future[None] = Future()
        self.patience: timedelta | None = None

    def get_future(self) -> Future[None]:
        return self.future

    def wait(self, patience: timedelta) -> None:
        self.patience = patience
        if not self.future.done():
            raise RuntimeError("timed out")


def launched(keep: Any = None, deadline_s: float = 7.0) -> tuple[Lane, Carrier, Transfer[str]]:
    mesh, carrier = Mesh.single(), Carrier()
    watch = replace(mesh.watch, deadline_s=deadline_s)
    lane = Lane("test", torch.device("cpu"), mesh.recorder, watch)
    lane.recorder.begin_step()
    return lane, carrier, lane.launch(mesh.experts, "rows", lambda: carrier, "what it brings", keep)


def test_what_travels_is_kept_until_it_is_waited_for_and_no_longer() -> None:
    rows = torch.ones(5)
    memory = StorageWeakRef(rows.untyped_storage())
    _, carrier, transfer = launched((rows,))
    del rows
    assert not memory.expired(), "the library reads this memory until the transfer is done"
    carrier.future.set_result(None)
    transfer.get()
    assert memory.expired(), "a transfer that somebody keeps must not keep the rows"


def test_a_transfer_is_done_when_it_is_done_not_when_somebody_looks() -> None:
    """Else all that is waited for late would look as if it had been on the wire until then."""
    lane, carrier, transfer = launched()
    carrier.future.set_result(None)
    seen = time.perf_counter()
    transfer.get()
    ((_, label, begun, done),) = lane.recorder.end_step().transfers
    assert label == "rows"
    assert begun <= done <= seen


@pytest.mark.parametrize(("patience_s", "expected"), [(None, 7.0), (90.0, 90.0)])
def test_patience_replaces_the_deadline(patience_s: float | None, expected: float) -> None:
    _, carrier, transfer = launched()
    carrier.future.set_result(None)
    assert transfer.settle(patience_s) == "what it brings"
    assert carrier.patience == timedelta(seconds=expected)


def test_a_transfer_that_does_not_end_is_an_error_with_its_name() -> None:
    _, _, transfer = launched()
    with pytest.raises(CommError, match="rank 0 waited 7 s in rows"):
        transfer.get()
