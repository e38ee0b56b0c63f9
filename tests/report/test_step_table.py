"""Steps are read once and thinned while they are read; nothing in a line raises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import make_run, record_of, write_lines

from moeclipse.core.outside import parse_json
from moeclipse.report import metric_lines, step_table
from moeclipse.report.figures import figures
from moeclipse.report.measures import measures_of
from moeclipse.report.run import read_run
from moeclipse.report.step_table import MetricsFile


def read(path: Path) -> MetricsFile:
    file = MetricsFile(path)
    file.read()
    return file


def test_long_runs_have_as_many_rows_as_short_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_table, "MOST_ROWS", 50)
    monkeypatch.setattr(step_table, "CHUNK", 64)
    folder = make_run(tmp_path / "run", steps=10)
    records = [record_of(step, loss=float(step), dropped=1) for step in range(1000)]
    records[333]["loss"] = 1e6  # a spike
    records[700]["eval_loss"] = 2.5
    write_lines(folder / "metrics.jsonl", records)
    table = read(folder / "metrics.jsonl").table()
    assert 50 <= len(table.step) <= 100
    assert table.num_steps == 1000
    assert (table.step[-1], np.diff(table.step)[0]) == (999, 16)
    assert table.total("dropped").sum() == 1000
    assert table.total("loss").sum() == sum(record["loss"] for record in records)
    assert table.highest["loss"].max() == 1e6
    assert table.lowest["loss"][0] == 0.0
    assert np.nanmax(table.column("eval_loss")) == 2.5
    assert table.ranks["rows"].shape == (len(table.rank_step), 2)
    assert len(table.rank_step) >= len(table.step) - 1
    assert set(table.rank_step.tolist()) <= set(table.step.tolist())
    run = read_run(folder)
    measures = measures_of(run)
    assert (measures["steps"], measures["dropped"]) == (1000, 1000)
    shown = figures([run])["runs"][0]
    assert max(shown["curves"]["loss"]["high"]) == 1e6, "no spike is lost"
    assert not [gap for gap in run.gaps if "cannot be shown" in gap]


def test_what_was_added_is_read_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [record_of(step) for step in range(5)])
    parsed: list[bytes] = []

    def watched(raw: bytes, **how: Any) -> Any:
        parsed.extend(line for line in raw.split(b"\n") if b"step" in line)
        return parse_json(raw, **how)

    monkeypatch.setattr(metric_lines, "parse_json", watched)
    file = read(path)
    assert len(parsed) == 5
    with path.open("a") as more:
        more.write(json.dumps(record_of(5)) + "\n" + '{"step": 6, "lo')
    file.read()
    assert (len(parsed), file.unfinished, file.damaged) == (7, True, 0)
    with path.open("a") as more:
        more.write('ss": 7.5}\n')
    file.read()
    assert (len(parsed), file.unfinished, file.damaged) == (8, False, 0)
    assert file.table().step.tolist() == list(range(7))
    assert file.table().column("loss")[6] == 7.5
    file.read()
    assert len(parsed) == 8


def test_a_file_that_is_another_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [record_of(step) for step in range(5)])
    file = read(path)
    other = tmp_path / "other"
    write_lines(other, [record_of(step) for step in range(9)])
    os.replace(other, path)
    file.read()
    assert len(file.table().step) == 9
    write_lines(path, [record_of(step) for step in range(3)])
    file.read()
    assert len(file.table().step) == 3, "it was cut"
    text = path.read_text()
    path.write_text(text.replace("2048", "1024") + json.dumps(record_of(3)) + "\n")
    file.read()
    assert file.table().column("num_tokens").tolist() == [1024, 1024, 1024, 2048], "it has not only grown"


@pytest.mark.parametrize(
    "line",
    [
        b"[1]",
        b"7",
        b"null",
        b'"step"',
        b'{"step": "x"}',
        b'{"step": -1}',
        b'{"step": NaN}',
        b'{"step": 1e30}',
        b'{"step": ' + b"9" * 400 + b"}",
        b"[" * 100_000,
        b'{"step": [1]}',
        b"\xff\xfe",
        b'{"step": 1, "x": ' + b"[" * 99 + b"]" * 99 + b"}",
    ],
)
def test_lines_that_are_no_records_are_counted(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "loss": 1}\n' + line + b'\n{"step": 1, "loss": 2}\n')
    file = read(path)
    assert file.damaged == 1
    assert file.table().column("loss").tolist() == [1, 2]


@pytest.mark.parametrize("damage", [b'{"step": 3, "x": [1', b"2]}", b'{"step": 5}, {"step": 6}', b"{"])
def test_a_damaged_line_among_many_is_the_only_one_that_is_lost(tmp_path: Path, damage: bytes) -> None:
    """Lines are parsed together: what two halves would make, and two records in one line, is none."""
    path = tmp_path / "metrics.jsonl"
    sound = [b'{"step": %d, "loss": %d}' % (step, step) for step in range(10, 20)]
    path.write_bytes(b"\n".join([*sound[:4], damage, *sound[4:]]) + b"\n")
    file = read(path)
    assert file.damaged == 1
    assert file.table().step.tolist() == list(range(10, 20))


GROWTH = """
import json, re, sys
from pathlib import Path
from moeclipse.report import step_table
from moeclipse.report.page import page_of
from moeclipse.report.run import read_run
joined, join = [0], step_table.StepRows._join
def counted(rows):
    joined[0] += len(rows.last)
    join(rows)
step_table.StepRows._join = counted
page = page_of([read_run(Path(sys.argv[1]))])
most = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())  # not that of who started it
print(json.dumps([int(most[1]) / 1024, joined[0], len(page)]))
"""


@pytest.mark.full
def test_a_report_takes_no_more_memory_for_a_long_run_and_time_in_proportion(tmp_path: Path) -> None:
    """By what is held and what is joined, not by seconds: 40,000 steps and 160,000."""
    folder = make_run(tmp_path / "run", steps=3)
    found = []
    for count in (40_000, 160_000):
        with (folder / "metrics.jsonl").open("w") as file:
            for step in range(count):
                file.write(json.dumps(record_of(step, 16)) + "\n")
        words = [sys.executable, "-c", GROWTH, str(folder)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout))
    (memory, joined, page), (more_memory, more_joined, more_page) = found
    assert more_memory < 200
    assert more_memory - memory < 10, found
    assert more_joined < 4 * joined, found
    assert more_page < 1.1 * page, found


HOSTILE = [None, True, -1, 10**400, 1e308, "x", "9" * 1000, [], {}, [[]], [None], {"a": [1, "x"]}, [10**400]]


def test_hostile_numbers_and_types_leave_a_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=6)
    sound = record_of(3)
    lines = [{**sound, "step": step, key: value} for step, value in enumerate(HOSTILE) for key in sound]
    lines += [
        {**sound, "ranks": {**sound["ranks"], key: value}} for value in HOSTILE for key in sound["ranks"]
    ]
    lines += [{**sound, "notes": HOSTILE}, {**sound, f"{'k' * 99}": 1}]
    write_lines(folder / "metrics.jsonl", lines)
    keys = ("window", "placement", "memory", "sample", "unigram_entropy", "skew", "saves", "load", "step_ms")
    for value in (*HOSTILE, float("nan"), float("inf")):
        (folder / "summary.json").write_text(json.dumps(dict.fromkeys(keys, value)))
        event = {
            "ph": "X",
            "pid": value,
            "tid": value,
            "ts": value,
            "dur": value,
            "name": value,
            "args": value,
        }
        (folder / "trace.json").write_text(json.dumps({"traceEvents": [event, value], "otherData": value}))
        told = dict.fromkeys(("ranks", "layers", "placement", "hosts", "settled", "search"), value)
        (folder / "choices.json").write_text(json.dumps(told))
        (folder / "incidents.jsonl").write_text(
            json.dumps(dict.fromkeys(("kind", "time", "what", "step"), value))
        )
        run = read_run(folder)
        json.dumps(figures([run, run]), allow_nan=False)
        measures_of(run)
