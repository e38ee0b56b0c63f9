"""What comes from outside is opened and parsed within bounds."""

from __future__ import annotations

import json
import os
import socket
from io import BytesIO
from pathlib import Path

import pytest

from moeclipse.core.outside import (
    DEPTH,
    lines_of,
    open_file,
    parse_json,
    read_bytes,
    read_json,
    read_table,
    read_text,
    regular,
)


def test_only_regular_files_are_opened_and_nothing_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    kinds = {"pipe": "a pipe", "folder": "a folder", "link": "a pipe", "socket": "a socket"}
    for name, kind in kinds.items():
        for opener in (open_file, regular):
            with pytest.raises(OSError, match=f"it is {kind}, not a regular file"):
                opener(tmp_path / name)
    with pytest.raises(OSError, match="a device"):
        open_file("/dev/zero")
    listener.close()
    for opener in (open_file, regular):
        with pytest.raises(FileNotFoundError):
            opener(tmp_path / "missing")
        with pytest.raises(OSError, match="null byte"):
            opener("a\0b")


def test_no_link_leads_out_of_a_folder(tmp_path: Path) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    other.write_text("secret")
    (folder / "real").write_text("mine")
    (folder / "near").symlink_to("real")
    (folder / "far").symlink_to("../other")
    (folder / "round").symlink_to("round")
    (tmp_path / "same").symlink_to(folder)
    assert read_text(folder / "near", inside=folder) == "mine"
    assert read_text(tmp_path / "same" / "near", inside=folder) == "mine"
    assert read_text(folder / "far") == "secret", "a file that its user names may be a link"
    for path in (folder / "far", folder / "../other", other):
        with pytest.raises(OSError, match="outside of"):
            open_file(path, inside=folder)
    with pytest.raises(OSError, match="levels of symbolic links"):
        open_file(folder / "round", inside=folder)
    with pytest.raises(OSError, match="a link"):
        open_file(folder / "near", links=False)


def test_a_snapshot_of_the_hub_is_inside_its_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    (blobs / "abc").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    assert read_json(snapshot / "config.json", inside=snapshot) == {}


def test_sizes_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (1 << 20))
    assert len(read_bytes(path, most=1 << 20)) == 1 << 20
    path.write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(ValueError, match=r"^it has more than 1 MiB$"):
        read_bytes(path, most=1 << 20)
    path.write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"not UTF-8 text \(byte 2\)"):
        read_text(path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 100_000, "nested deeper than 64 levels"),
        ('{"a": ' + "[" * 70 + "]" * 70 + "}", "nested deeper than 64 levels"),
        ('{"a": {"b": [0, NaN]}}', r"'a\.b\[1\]' is nan, not a finite number"),
        ('{"a": 1e999}', "'a' is inf"),
        ('{"a": 123456789012345678901234567890}', "'a' is a number that does not fit 64 bits"),
        ("-Infinity", "^it is -inf"),
        ("1" * 5000, "not JSON"),
        ("{", "not JSON"),
        ("\ud800", "not JSON"),
        (b"\xff\xfe\xfd", "not"),
        (b"[\xff]", "not UTF-8"),
        ('{"' + "k" * 100_000 + '": [' + "1," * 100_000 + "NaN]}", "is nan"),
    ],
)
def test_json_is_bounded_and_the_key_is_named(text: str | bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        parse_json(text)
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


def test_what_may_be_there_is_taken(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None, True, "x"], "n": -(1 << 63), "m": (1 << 64) - 1}
    assert parse_json(json.dumps(value)) == value
    deep = "[" * DEPTH + "]" * DEPTH
    assert parse_json(deep)
    assert parse_json('{"a": Infinity}', numbers=False)["a"] == float("inf")
    with pytest.raises(ValueError, match="nested"):
        parse_json("[" * 99 + "]" * 99, numbers=False)
    (tmp_path / "list").write_text("[]")
    with pytest.raises(ValueError, match="it holds no table"):
        read_table(tmp_path / "list")


def test_lines_that_are_too_long_are_passed_over() -> None:
    lines = lines_of(BytesIO(b"ab\n" + b"x" * 1000 + b"\nabc\n\n" + b"y" * 9), most=4)
    assert list(lines) == [b"ab\n", None, b"abc\n", b"\n", None]
