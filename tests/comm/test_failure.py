"""A rank that dies, fails or hangs: the others end within the deadline and name it."""

from __future__ import annotations

import os
import signal
import time

import torch

from moeclipse.comm.flight.exchange import all_to_all
from moeclipse.comm.mesh import Mesh
from moeclipse.testing.run_ranks import run_ranks_raw


def exchange(mesh: Mesh, label: str) -> None:
    n = mesh.num_ranks
    all_to_all(mesh.a2a, mesh.experts, torch.zeros(n, 4), [1] * n, [1] * n, label).get()


def fail(mesh: Mesh, how: str) -> None:
    exchange(mesh, "dispatch of rows, layer 0, microbatch 0")
    if mesh.rank == 1:
        if how == "raise":
            raise ValueError("the disk of rank 1 is full")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    exchange(mesh, "combine of rows, layer 3, microbatch 1")


def others(how: str, deadline_s: float = 30.0) -> tuple[str, float]:
    begun = time.monotonic()
    outcomes = run_ranks_raw(3, fail, how, collective_deadline_s=deadline_s, deadline_s=40)
    texts = [text for rank, (ok, text) in enumerate(outcomes) if rank != 1 and not ok]
    assert len(texts) == 2, outcomes
    return texts[0].strip().splitlines()[-1], time.monotonic() - begun


def test_others_fail_with_the_message_of_the_rank_that_failed() -> None:
    text, seconds = others("raise")
    assert "rank 1 failed: ValueError: the disk of rank 1 is full" in text
    assert seconds < 10


def test_a_killed_rank_is_noticed_within_seconds() -> None:
    text, seconds = others("kill")
    assert "rank 0 lost rank 1 in combine of rows, layer 3, microbatch 1: " in text
    assert seconds < 10


def named(mesh: Mesh) -> str:
    try:
        if mesh.rank == 1:
            time.sleep(6)
            return "late"
        exchange(mesh, "combine of rows, layer 3, microbatch 1")
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_the_deadline_names_rank_collective_layer_and_microbatch() -> None:
    outcomes = run_ranks_raw(3, named, collective_deadline_s=2.0, deadline_s=30)
    for rank in (0, 2):
        ok, text = outcomes[rank]
        assert ok, text
        expected = f"rank {rank} waited 2 s in combine of rows, layer 3, microbatch 1: rank 1 did not arrive"
        assert text == expected
