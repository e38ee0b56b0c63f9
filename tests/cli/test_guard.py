"""What a user has to mend is one line and an exit status; what we have to mend keeps its traceback."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from moeclipse.balance.load import Load
from moeclipse.cli.guard import file_problem, one_line, refuse_unwritable
from moeclipse.cli.main import main
from moeclipse.core.errors import CheckpointError, ConfigError


def write_load(path: Path, scale: int = 1) -> Path:
    rows = scale * np.arange(1, 9, dtype=np.int64).reshape(1, 2, 4)
    average = scale * np.arange(1.0, 17.0).reshape(2, 2, 4)
    Load(average_LPE=average, steps_N=np.array([0]), rows_NLE=rows).save(path)
    return path


def told(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line that a command ends with."""
    try:
        code = main([str(word) for word in words])
    except SystemExit as leave:  # the parser of flags leaves by itself
        code = int(leave.code or 0)
    err = capsys.readouterr().err
    assert code == 2, err
    assert "Traceback" not in err
    return err


def test_place_without_arguments_says_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "LOAD.npz" in told(capsys, "place")


def test_loads_without_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_load(tmp_path / "load.npz", scale=0)
    assert told(capsys, "place", path) == (
        f"error: layer 0 of {path} has no rows: there is nothing to plan for it\n"
    )


@pytest.mark.parametrize("flag", ["--out", "--plot"])
def test_a_plan_into_a_missing_folder_is_refused_before_planning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    path = write_load(tmp_path / "load.npz")
    err = told(capsys, "place", path, flag, tmp_path / "nowhere" / "file")
    assert err == (
        f"error: {flag}: there is no folder {tmp_path / 'nowhere'}; make it, or choose another path\n"
    )


@pytest.mark.parametrize("flag", ["--csv", "--trace"])
def test_a_simulation_into_a_missing_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    file = tmp_path / "nowhere" / "deep" / "file"
    err = told(
        capsys,
        "simulate",
        "--ranks",
        2,
        "--microbatches",
        4,
        "--schedule",
        "1f1b",
        "--costs",
        "unit",
        flag,
        file,
    )
    assert "nowhere" in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "text",
    [
        "[seconds]\nF = nan\nB = 2.0\n",
        "[seconds]\nF = inf\n",
        "[seconds]\nF = 1.0\n[fixed]\nF = nan\n",
        "launch = nan\n[seconds]\nF = 1.0\n",
        "rank_speed = [1.0, nan]\n[seconds]\nF = 1.0\n",
        'device = 3\nlink = "nvlink"\nnum_ranks = 8\n',
        'device = "h200"\nlink = "nvlink"\nnum_ranks = 0\n',
        "x = " + "[" * 5000,
        "[seconds]\nF = " + "9" * 5000,
    ],
)
def test_costs_that_nobody_can_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    path = tmp_path / "costs.toml"
    path.write_text(text)
    assert str(path) in told(capsys, "simulate", "--costs", path)


@pytest.mark.parametrize("part", [0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
def test_loads_that_were_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str], part: float) -> None:
    path = write_load(tmp_path / "load.npz")
    os.truncate(path, int(part * path.stat().st_size))
    assert f"error: {path} is no load file, or damaged" in told(capsys, "place", path)


def test_loads_with_bytes_changed_in_the_middle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_load(tmp_path / "load.npz")
    data = bytearray(path.read_bytes())
    data[60:90] = bytes(30)  # inside the first array: its checksum differs, or it cannot be unpacked
    path.write_bytes(data)
    assert f"error: {path} is no load file, or damaged" in told(capsys, "place", path)


@pytest.mark.parametrize(("name", "why"), [("x" * 300, "has 300 bytes"), ("a\nb", "plain folder name")])
def test_names_that_cannot_be_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, why: str
) -> None:
    for resume in ("off", "auto"):
        err = told(capsys, "train", "--run.dir", tmp_path, "--run.name", name, "--resume", resume)
        assert why in err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["[" * 100_000, "\udc80", '{"layers": 3}', "[[0, 1], [2, 3]"])
def test_placements_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    load = write_load(tmp_path / "load.npz")
    assert "error: --current: " in told(capsys, "place", load, "--current", path)
    assert "placement" in told(capsys, "train", "--placement.slots", path, "--run.dir", tmp_path)


@pytest.mark.parametrize("cells", [b"0F0,\xff\xfe", b"4000000000F0", b"0F4000000000", b"0F" + b"9" * 5000])
def test_orders_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], cells: bytes) -> None:
    path = tmp_path / "order.csv"
    path.write_bytes(cells)
    assert told(capsys, "simulate", "--from-csv", path).startswith("error: ")


def test_a_file_that_is_given_may_be_a_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_load(tmp_path / "load.npz")
    (tmp_path / "link.npz").symlink_to("load.npz")
    (tmp_path / "plan.json").symlink_to("real.json")
    words = ["place", tmp_path / "link.npz", "--out", tmp_path / "plan.json", "--time-limit", 0]
    assert main([str(word) for word in words]) == 0
    assert json.loads((tmp_path / "real.json").read_text())["layers"]


def test_errors_of_ours_keep_their_words_and_unknown_ones_their_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert one_line(CheckpointError("damaged")) == ("damaged", 2)
    for fault in (KeyError("x"), AssertionError(), ConnectionResetError(errno.ECONNRESET, "reset", "x")):
        assert one_line(fault) is None

    def fail(words: list[str]) -> int:
        raise KeyError("a fault of ours")

    monkeypatch.setattr("moeclipse.cli.place.main", fail)
    with pytest.raises(KeyError):
        main(["place"])


def test_what_the_system_says_is_put_into_words(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "a"))
    assert file_problem(tmp_path / "a", full).endswith(
        "the disk is full; free some space or choose another path"
    )
    assert one_line(OSError(errno.ENOSPC, "No space left on device")) == (
        "the disk is full; free some space",
        2,
    )
    denied = one_line(PermissionError(errno.EACCES, "Permission denied", "/a"))
    assert denied == ("/a: permission denied; choose another path", 2)
    absent = FileNotFoundError(errno.ENOENT, "No such file", str(tmp_path / "a"))
    assert file_problem(tmp_path / "a", absent) == f"{tmp_path / 'a'}: there is no such file"
    assert one_line(MemoryError()) is not None


def test_outputs_are_looked_at_before_work(tmp_path: Path) -> None:
    refuse_unwritable({"--out": None, "--plot": tmp_path / "new.png"})
    with pytest.raises(ConfigError) as found:
        refuse_unwritable(
            {
                "--a": tmp_path,
                "--b": tmp_path / "no" / "x",
                "--c": Path("x\0y"),
                "--d": tmp_path / ("n" * 300),
            }
        )
    assert [text.partition(":")[0] for text in found.value.problems][:3] == ["--a", "--b", "--c"]
    if os.getuid():
        tmp_path.chmod(0o500)
        with pytest.raises(ConfigError, match="may not be written"):
            refuse_unwritable({"--out": tmp_path / "x"})
