"""Why ranks ended: what each leaves behind, and which of them failed first."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from moeclipse.cli import failures
from moeclipse.cli.failures import (
    Failure,
    await_culprit,
    describe,
    read_failures,
    root_cause,
    show_failure,
    write_failure,
)
from moeclipse.core.errors import CommError, ConfigError


def test_root_cause_prefers_who_was_not_a_victim() -> None:
    victim = Failure(rank=0, text="rank 0 lost a peer", time=1.0, victim=True)
    culprit = Failure(rank=1, text="boom", time=2.0)
    assert root_cause([victim, culprit], {0: 1}) is culprit
    assert root_cause([victim], {0: 1, 1: -11}).text == "rank 1 was killed by SIGSEGV"
    assert root_cause([victim], {0: 1, 1: -15}) is victim
    assert root_cause([], {0: -15, 2: 3}) == Failure(rank=2, text="rank 2 ended with status 3", code=3)
    assert root_cause([], {1: -7}).text.startswith(
        "rank 1 was killed by SIGBUS; a file that it had mapped was cut"
    )
    assert root_cause([], {1: -15}).text == "rank 1 was killed by SIGTERM"


def test_describe() -> None:
    assert describe(ConfigError("bad"), 3).code == 2
    assert describe(ConfigError("bad"), 3).stack == ""
    assert describe(CommError("rank 1 failed: x"), 0).victim
    assert describe(RuntimeError("[gloo] Connection closed by peer [127.0.0.1]"), 0).victim
    unexpected = describe(ZeroDivisionError("x"), 0)
    assert not unexpected.victim
    assert unexpected.text == "ZeroDivisionError: x"


def leave(failure: Failure, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the rank itself does: the agent named a file for it."""
    path = folder / str(failure.rank) / "error.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    write_failure(failure)


def test_what_ranks_wrote_is_read_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = Failure(rank=0, text="boom", code=3, time=1.5, stack="Traceback ...")
    second = Failure(rank=1, text="lost a peer", victim=True)
    for failure in (first, second):
        leave(failure, tmp_path, monkeypatch)
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "error.json").write_text("cut sho")
    assert read_failures(tmp_path) == [first, second]
    assert read_failures(None) == []
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    write_failure(first)  # without an agent there is nobody to tell


def test_what_cannot_be_written_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk below the launcher's folder: a rank's words would be lost with it."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    write_failure(Failure(rank=3, text="boom"))
    assert capsys.readouterr().err == "error (rank 3): boom\n"


def test_a_victim_stays_until_the_culprit_has_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(failures, "CULPRIT_S", 300.0)
    leave(Failure(rank=1, text="boom"), tmp_path / "there", monkeypatch)
    written = (tmp_path / "there" / "1" / "error.json").read_text()
    leave(Failure(rank=0, text="lost a peer", victim=True), tmp_path / "here", monkeypatch)

    def culprit() -> None:
        time.sleep(0.3)
        late = tmp_path / "here" / "1" / "error.json"
        late.parent.mkdir()
        late.write_text(written)

    begun, thread = time.monotonic(), threading.Thread(target=culprit)
    thread.start()
    await_culprit()
    assert 0.2 < time.monotonic() - begun < 150
    thread.join()


def test_a_victim_does_not_stay_for_ever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(failures, "CULPRIT_S", 0.1)
    leave(Failure(rank=0, text="lost a peer", victim=True), tmp_path, monkeypatch)
    begun = time.monotonic()
    await_culprit()
    assert time.monotonic() - begun < 60


def test_what_is_shown(capsys: pytest.CaptureFixture) -> None:
    show_failure(Failure(rank=3, text="boom", stack="Traceback ...\n"), named=True)
    assert capsys.readouterr().err == "Traceback ...\nerror (rank 3): boom\n"
    show_failure(Failure(rank=3, text="bad", code=2), named=True)
    assert capsys.readouterr().err == "error: bad\n", "bad input fails on every rank alike"
    show_failure(Failure(rank=3, text="boom"), named=False)
    assert capsys.readouterr().err == "error: boom\n"


def test_of_several_causes_the_first_in_time_counts() -> None:
    late = [Failure(rank=0, text="a", time=9.0), Failure(rank=1, text="b", time=8.0)]
    assert root_cause(late, {}).rank == 1
    waited = [
        Failure(rank=0, text="lost a peer", time=1.0, victim=True),
        Failure(rank=2, text="waited for rank 1", time=3.0, victim=True, late=True),
        Failure(rank=3, text="waited for rank 2", time=4.0, victim=True, late=True),
    ]
    assert root_cause(waited, {1: -9}).rank == 2, "who waited in vain knows for whom; a kill came after it"
    assert root_cause([], {0: 143, 1: 7}).rank == 1, "who heard the agent's SIGTERM ended for another's sake"


def test_a_killed_rank_ends_the_run_as_shells_say_it() -> None:
    assert root_cause([], {2: -9}).code == 137


def test_bad_input_that_every_rank_finds_is_shown_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank) / "error.json"))
        show_failure(describe(ConfigError("there is no file corpus.txt"), rank), named=True)
        show_failure(describe(CommError("lost rank 3"), rank), named=True)
    err = capsys.readouterr().err
    assert err.count("corpus.txt") == 1
    assert err.count("lost rank 3") == 2, "what a rank met is its own"
