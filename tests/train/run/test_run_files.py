"""Files that are replaced as a whole, lines that are kept, and names that are given away."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

from apart import apart
from moeclipse.train.run.run_files import append_line, holds_run, keep_lines, set_aside, write_atomic


def test_a_text_takes_the_place_of_another(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    for text in ("old\n", "new\n"):
        write_atomic(path, text)
        assert path.read_text() == text
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.toml"]


def limit_files(size: int) -> None:
    """From here on no file of this process can grow beyond `size`: a full disk that needs no privileges."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@apart
def full_disk_leaves_the_old_text(path: Path) -> None:
    limit_files(1000)
    with pytest.raises(OSError, match="too large"):
        write_atomic(path, "new" * 1000)
    with pytest.raises(OSError, match="too large"):
        keep_lines(path, lambda line: True)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    old = "a line\n" * 1000
    path.write_text(old)
    full_disk_leaves_the_old_text(path)
    assert path.read_text() == old
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_lines_are_kept_and_the_last_one_ends(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"1\n2\n\xff\n3")
    assert keep_lines(path, lambda line: not line.startswith("2")) == 3
    assert path.read_bytes() == "1\n\ufffd\n3\n".encode()


def test_a_name_is_given_away_for_the_next_that_is_free(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert set_aside(path) is None
    for number in (1, 2):
        path.write_text(str(number))
        assert set_aside(path) == tmp_path / f"metrics.{number}.jsonl"
    assert [(tmp_path / f"metrics.{n}.jsonl").read_text() for n in (1, 2)] == ["1", "2"]


def test_who_came_and_left_is_no_run(tmp_path: Path) -> None:
    assert not holds_run(tmp_path / "nowhere")
    assert not holds_run(tmp_path)
    (tmp_path / "job.json").write_text("{}")
    (tmp_path / ".job.json.1f").write_text("{}")
    assert not holds_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    assert holds_run(tmp_path)
    assert holds_run(tmp_path / "metrics.jsonl"), "a file stands in the way"


def test_a_text_is_durable_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name in ("fsync", "replace"):
        really = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, n=name, f=really: (done.append(n), f(*given)))
    write_atomic(tmp_path / "best.json", "{}\n")
    keep_lines(tmp_path / "best.json", lambda line: True)
    assert done == ["fsync", "replace"] * 2


def test_a_reader_keeps_the_text_that_it_opened(tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    path.write_text("old")
    with path.open() as reading:
        write_atomic(path, "new")
        assert reading.read() == "old"


def test_a_line_is_not_glued_to_one_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_line(path, "first")
    with path.open("a") as file:
        file.write('{"step": 1, "lo')  # a kill in the middle of a write
    append_line(path, "third")
    append_line(path, "fourth")
    assert path.read_text().splitlines() == ["first", '{"step": 1, "lo', "third", "fourth"]


@apart
def a_full_disk_takes_no_half_line(path: Path) -> None:
    limit_files(100)
    append_line(path, "x" * 50)
    with pytest.raises(OSError, match="too large"):
        append_line(path, "y" * 80)
    append_line(path, "z" * 10)


def test_what_could_not_be_finished_is_taken_back(tmp_path: Path) -> None:
    a_full_disk_takes_no_half_line(tmp_path / "metrics.jsonl")
    assert (tmp_path / "metrics.jsonl").read_text() == f"{'x' * 50}\n{'z' * 10}\n"


def test_nothing_is_appended_to_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        append_line(tmp_path / "pipe", "x")


def test_a_line_that_nobody_wrote_is_no_burden(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("1\n" + "x" * (17 << 20) + "\n2\n")
    assert keep_lines(path, lambda _: True) == 2
    assert path.read_text() == "1\n2\n"
