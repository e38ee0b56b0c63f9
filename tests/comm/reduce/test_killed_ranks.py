"""Ranks that are killed in the middle of sums, and more ranks than cores."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time

import pytest
import torch
from peer_files import left_over
from sums import exact, opened

from moeclipse.comm.mesh import Mesh
from moeclipse.testing.run_ranks import run_ranks, run_ranks_raw


def crowd(mesh: Mesh) -> float:
    with opened(mesh) as reduce:
        x = torch.ones(256)
        reduce.all_reduce(x)
        begun = time.process_time()
        for _ in range(100):
            reduce.all_reduce(x)
        return time.process_time() - begun


def test_more_ranks_than_cores_do_not_collapse() -> None:
    """100 calls take each of six ranks some 10 ms of a core; polling without end would take seconds."""
    assert max(run_ranks(6, crowd)) < 5.0


def until_killed(mesh: Mesh, victim: int, after_s: float) -> None:
    if mesh.rank == victim:
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    until = time.monotonic() + 600
    while time.monotonic() < until:
        with opened(mesh, area_bytes=8192) as reduce:
            for i in range(40):
                reduce.all_reduce(torch.ones(5000), stages=1 + i % 2, label="gradients, step 7")


def kill(times: int, seed: int) -> None:
    lots = random.Random(seed)
    for _ in range(times):
        victim, after_s = lots.randrange(3), lots.random() * 0.25
        begun = time.monotonic()
        outcomes = run_ranks_raw(3, until_killed, victim, after_s, collective_deadline_s=300)
        assert time.monotonic() - begun < 150
        for rank, (ok, text) in enumerate(outcomes):
            assert not ok
            last = text.strip().splitlines()[-1]
            if rank != victim:
                assert "CommError" in text, text
                assert re.search(rf"\brank {victim}\b", last), (victim, last)
        assert left_over() == []
    assert run_ranks(3, exact, (403,), 4096) == [8, 8, 8]


def test_a_killed_rank_is_named_and_leaves_nothing() -> None:
    kill(5, seed=1)


@pytest.mark.full
def test_fifty_killed_ranks() -> None:
    kill(50, seed=2)
