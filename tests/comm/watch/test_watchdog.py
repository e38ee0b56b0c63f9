"""A rank whose main thread is stuck still answers, judges and ends."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from moeclipse.comm.failure import Watch
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.watch import watchdog
from moeclipse.comm.watch.watchdog import LEAVE_S, Watchdog
from moeclipse.core.errors import CommError, DeadlineError
from moeclipse.testing.run_ranks import run_ranks, run_ranks_raw

LIMIT_S = 60.0
"""Soon, on a busy machine."""


def stuck(mesh: Mesh, how: str) -> tuple[str, float]:
    """Rank 0 has a transfer on a stream that never ends; what is told on each rank, and when."""
    log, ended = mesh.watch.log, threading.Event()
    causes: list[CommError] = []

    def end(error: CommError) -> None:
        causes.append(error)
        ended.set()

    mesh.barrier()
    begun = time.monotonic()
    if mesh.rank == 2 and how == "frozen":  # now: later it might hold the lock of the tests' store
        os.kill(os.getpid(), signal.SIGSTOP)
    with Watchdog(mesh.watch, end=end):
        if mesh.rank == 0:
            log.start(log.launch("a2a", "dispatch of rows, layer 3, microbatch 1", (0, 1)))
        elif mesh.rank == 1 and how == "busy":
            log.end(log.launch("a2a", "combine of rows, layer 2, microbatch 1", (0, 1)))
        elif mesh.rank == 1:
            log.start(log.launch("tp", "sum of scores, layer 3", (1, 2)))
        assert ended.wait(120)
    return str(causes[0]), time.monotonic() - begun


def test_all_ranks_end_with_the_same_cause_soon_after_the_deadline() -> None:
    found = run_ranks(2, stuck, "busy", collective_deadline_s=1.0)
    for text, seconds in found:
        assert text.startswith(
            "rank 0 waited 1 s in dispatch of rows, layer 3, microbatch 1: rank 1 did not arrive (it is "
        )
        assert text.endswith(" s behind combine of rows, layer 2, microbatch 1)")
        assert 1.0 <= seconds < 1.0 + LIMIT_S
    assert found[0][0] == found[1][0]


def test_a_rank_that_others_wait_for_in_turn_is_named() -> None:
    found = run_ranks(3, stuck, "idle", collective_deadline_s=1.0)
    assert len({text for text, _ in found}) == 1
    # Either of the waiting ranks may judge first; both name rank 2.
    assert found[0][0].split(": ")[1].startswith("rank 2 did not arrive")


def test_a_frozen_rank_gives_no_sign(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="did not finish") as raised:
        run_ranks(3, frozen, str(tmp_path), collective_deadline_s=1.0, deadline_s=6.0)
    assert "rank 2" in str(raised.value)
    texts = {(tmp_path / f"{rank}").read_text() for rank in (0, 1)}
    assert len(texts) == 1
    assert texts.pop().endswith(": rank 2 did not arrive")


def frozen(mesh: Mesh, folder: str) -> None:
    text, _ = stuck(mesh, "frozen")
    (Path(folder) / str(mesh.rank)).write_text(text)


def leaves(mesh: Mesh) -> list[str]:
    ended: list[str] = []
    with Watchdog(mesh.watch, end=lambda error: ended.append(str(error))):
        if mesh.rank == 1:
            mesh.watch.publish("the disk is full")
        time.sleep(LEAVE_S / 2)  # hears of it, and leaves in time
    return ended


def test_a_main_thread_that_leaves_by_itself_is_not_ended() -> None:
    assert run_ranks(2, leaves) == [[], []]


def stays(mesh: Mesh) -> tuple[list[str], float]:
    ended: list[str] = []
    done = threading.Event()
    begun = time.monotonic()

    def end(error: CommError) -> None:
        ended.append(str(error))
        done.set()

    with Watchdog(mesh.watch, end=end):
        if mesh.rank == 1:
            mesh.watch.publish("the disk is full")
        done.wait(120)
    return ended, time.monotonic() - begun


def test_a_main_thread_that_stays_is_ended_with_the_words_of_the_rank_that_failed() -> None:
    for ended, seconds in run_ranks(2, stays):
        assert ended == ["rank 1 failed: the disk is full"]
        assert seconds < LEAVE_S + LIMIT_S


def answers(mesh: Mesh) -> str:
    with Watchdog(mesh.watch):
        if mesh.rank == 1:
            mesh.watch.log.launch("compute", "EXPERT_F 3.1")
            time.sleep(3)
            return ""
        return str(mesh.watch.judge("dispatch of rows", (0, 1)))


def test_without_leave_to_end_it_only_answers() -> None:
    text = run_ranks(2, answers, collective_deadline_s=1.0)[0]
    assert text.startswith("rank 0 waited 1 s in dispatch of rows: rank 1 did not arrive (it is ")
    assert text.endswith(" s behind EXPERT_F 3.1)")


def test_a_store_that_does_not_answer_does_not_hold_it_up(tmp_path: Path) -> None:
    program = (
        "import time, torch.distributed as dist\n"
        "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(store.port, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            outcomes = run_ranks_raw(1, deserted, port, server.pid, deadline_s=30)
        finally:
            server.kill()
    ok, (text, seconds) = outcomes[0]
    assert ok
    assert text == "rank 0 waited 0.5 s in dispatch of rows, and the store of the run does not answer"
    assert seconds < 0.5 + LIMIT_S


def deserted(mesh: Mesh, port: int, server: int) -> tuple[str, float]:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    watch = Watch(store=store, rank=0, num_ranks=2, deadline_s=0.5)
    causes: list[CommError] = []
    done = threading.Event()

    def end(error: CommError) -> None:
        causes.append(error)
        done.set()

    dog = Watchdog(watch, end=end)
    dog.__enter__()
    os.kill(server, signal.SIGSTOP)
    begun = time.monotonic()
    watch.log.start(watch.log.launch("a2a", "dispatch of rows", (0, 1)))
    assert done.wait(20)
    assert isinstance(causes[0], DeadlineError)
    return str(causes[0]), time.monotonic() - begun  # its talking thread is stuck, and ends with the process


def test_the_fault_handler_is_armed_again_and_again_and_let_go(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    armed: list[float] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda s, **_: armed.append(s))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: armed.append(-1.0))
    monkeypatch.setattr(watchdog, "BEAT_S", 0.01)
    watch = Watch(store=dist.HashStore(), rank=0, num_ranks=2, deadline_s=100.0)
    with (tmp_path / "stacks").open("w") as stacks, Watchdog(watch, stacks=stacks):
        time.sleep(0.2)
    assert len(armed) > 2
    assert set(armed[:-1]) == {200.0}
    assert armed[-1] == -1.0


def test_one_rank_has_no_threads() -> None:
    with Watchdog(Watch(store=None, rank=0, num_ranks=1, deadline_s=1.0)) as dog:
        assert not any(thread.is_alive() for thread in dog._threads)
