"""What the agent needs: a store that only this machine reaches, and files that say whether to try again."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from moeclipse.cli.failures import Failure, write_failure
from moeclipse.cli.rendezvous import (
    BACKEND,
    LoopbackRendezvous,
    NotRestarted,
    RankFiles,
    free_loopback_socket,
)
from moeclipse.comm.watch.op_log import OpLog


def test_the_store_cannot_be_reached_from_outside() -> None:
    handler = LoopbackRendezvous("id")
    meeting = handler.next_rendezvous()
    meeting.store.set("key", "value")
    port = meeting.bootstrap_store_info.master_port
    listening = [
        line.split()[1]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
        if line.split()[3] == "0A" and int(line.split()[1].rpartition(":")[2], 16) == port
    ]
    assert [address.partition(":")[0] for address in listening] == ["0100007F"]
    second = handler.next_rendezvous()
    assert second.bootstrap_store_info.master_port != port, "every attempt meets anew"
    handler.shutdown()
    assert handler.is_closed()


def test_loopback_socket() -> None:
    with free_loopback_socket() as listener, socket.create_connection(listener.getsockname(), timeout=5):
        assert listener.getsockname()[0] == "127.0.0.1"


def test_what_the_agent_asks_it() -> None:
    handler = LoopbackRendezvous("job")
    assert (handler.get_backend(), handler.get_run_id()) == (BACKEND, "job")
    assert handler.use_agent_store
    assert handler.num_nodes_waiting() == 0
    handler.set_closed()
    assert handler.is_closed()


def attempt(files: RankFiles, number: int) -> dict[int, dict[str, str]]:
    """The environments of two ranks, with the files that the agent names for them."""
    environments = {
        rank: {"TORCHELASTIC_RESTART_COUNT": str(number), "TORCHELASTIC_RUN_ID": "job"} for rank in range(2)
    }
    files.reify(environments)
    return environments


def fail(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, **what: object) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", environment["TORCHELASTIC_ERROR_FILE"])
    write_failure(Failure(rank=1, **what))  # type: ignore[arg-type]


def test_a_restart_is_announced_with_its_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    files = RankFiles(str(tmp_path), restarts=3)
    first = attempt(files, 0)
    assert capsys.readouterr().err == ""
    fail(first[1], monkeypatch, text="boom")
    attempt(files, 1)
    assert capsys.readouterr().err == "restart 1 of 3: boom\n"
    files.codes = {1: -9}
    attempt(files, 2)
    told = "restart 2 of 3: rank 1 was killed by SIGKILL; the system may have run out of memory (see dmesg)\n"
    assert capsys.readouterr().err == told, "nobody wrote anything"


def kill_in(files: RankFiles, rank: int, step: int | None) -> None:
    assert files.newest is not None
    log = OpLog(files.newest / str(rank) / "ops.txt", rank=rank)
    if step is not None:
        log.begin_step(step)
    files.codes = {rank: -9}


def test_a_fault_that_comes_back_in_its_step_is_not_tried_for_ever(tmp_path: Path) -> None:
    files = RankFiles(str(tmp_path), restarts=9)
    attempt(files, 0)
    number = 0
    # another step, another rank and no step at all begin the count anew
    for rank, step in (
        (1, 7),
        (1, 7),
        (1, 8),
        (0, 8),
        (1, 8),
        (1, None),
        (1, None),
        (1, None),
        (1, 8),
        (1, 8),
    ):
        kill_in(files, rank, step)
        number += 1
        attempt(files, number)
    kill_in(files, 1, 8)
    with pytest.raises(NotRestarted, match=r"rank 1 was killed by SIGKILL.*; in step 9 for the 3rd time"):
        attempt(files, number + 1)


def test_bad_input_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = RankFiles(str(tmp_path), restarts=3)
    fail(attempt(files, 0)[1], monkeypatch, text="data.files: nothing there", code=2)
    with pytest.raises(NotRestarted, match="nothing there") as caught:
        attempt(files, 1)
    assert caught.value.failure.code == 2
