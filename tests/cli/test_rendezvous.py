"""What the agent needs: a store that only this machine reaches, and files that say whether to try again."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry

from moeclipse.cli.failures import Failure, write_failure
from moeclipse.cli.rendezvous import (
    BACKEND,
    LoopbackRendezvous,
    NotRestarted,
    RankFiles,
    free_loopback_socket,
    register,
)


def test_the_store_cannot_be_reached_from_outside() -> None:
    parameters = RendezvousParameters(BACKEND, "127.0.0.1:0", "id", 1, 1)
    handler = LoopbackRendezvous(parameters)
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


def test_the_agent_finds_it_by_name() -> None:
    register()
    register()  # a second run in one process
    handler = rendezvous_handler_registry.create_handler(
        RendezvousParameters(BACKEND, "127.0.0.1:0", "job", 1, 1)
    )
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
    attempt(files, 2)
    assert capsys.readouterr().err == "restart 2 of 3: a rank was killed\n", "nobody wrote anything"


def test_bad_input_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = RankFiles(str(tmp_path), restarts=3)
    fail(attempt(files, 0)[1], monkeypatch, text="data.files: nothing there", code=2)
    with pytest.raises(NotRestarted, match="nothing there") as caught:
        attempt(files, 1)
    assert caught.value.failure.code == 2
