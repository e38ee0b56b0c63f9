"""Lines that are alike are read as numbers; what comes of it is what their records say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from made_runs import record_of

from moeclipse.report import step_table
from moeclipse.report.metric_lines import LARGEST_STEP, LineForm, plain, records_of
from moeclipse.report.step_table import MetricsFile, StepTable

LIKE = b'{"step": 1, "loss": 2.5, "word": "x: 1", "known": true, "none": null}\n'


def test_numbers_of_lines_that_are_alike() -> None:
    form = LineForm.of(LIKE)
    assert form is not None
    assert form.names == ("step", "loss", "known")
    alike = [LIKE, LIKE.replace(b"2.5", b"-1e-3"), LIKE.replace(b" 1,", b" 22,")]
    numbers_NK, others = form.read(alike)
    assert numbers_NK.tolist() == [[1, 2.5, 1], [1, -0.001, 1], [22, 2.5, 1]]
    assert not others


@pytest.mark.parametrize(
    "line",
    [
        LIKE.replace(b"true", b"false"),
        LIKE.replace(b"x: 1", b"x: 2"),
        LIKE.replace(b'"loss": ', b'"loss":'),
        LIKE.replace(b"2.5", b"NaN"),
        LIKE.replace(b"2.5", b"null"),
        LIKE.replace(b'"loss": 2.5, ', b""),
        LIKE[:-2] + b', "more": 1}\n',
        b'{"step": 1, "lo' + LIKE,
        b"\n",
        b"\xff\x00\r\n",
    ],
)
def test_a_line_that_is_another_is_handed_back(line: bytes) -> None:
    form = LineForm.of(LIKE)
    assert form is not None
    numbers_NK, others = form.read([LIKE, line, LIKE])
    assert len(numbers_NK) == 2
    assert others == [line]


@pytest.mark.parametrize("value", [b"2.5.1", b"1 2", b"0x10", b"1_0", b"1]", b'1"'])
def test_what_only_begins_as_a_number_is_for_the_reader_of_json(value: bytes) -> None:
    form = LineForm.of(LIKE)
    assert form is not None
    lines = [LIKE, LIKE.replace(b"2.5", value)]
    numbers_NK, others = form.read(lines)
    assert not len(numbers_NK)
    assert others == lines


@pytest.mark.parametrize(
    "record",
    [
        {"step": 1, "notes": ["a spike"]},
        {"step": 1, "skipped": True},
        {"step": 1, "skipped": 0},
        {"step": 1, "ranks": {"step_ms": [1.0]}},
        {"step": -1},
        {"step": 1, **{str(key): key for key in range(1000)}},
        {"loss": 1},
    ],
)
def test_lines_with_something_to_say_are_no_form(record: dict[str, object]) -> None:
    assert LineForm.of(json.dumps(record).encode() + b"\n") is None


def test_tables_are_cut_out_of_lines() -> None:
    line = json.dumps(record_of(3) | {"notes": ['"load": [[1]], "ranks": {"a": 1}']}).encode()
    (record,) = records_of([plain(line, ranks=False)])
    assert record is not None
    assert record["ranks"] is None
    assert record["notes"] == ['"load": [[1]], "ranks": {"a": 1}']
    (record,) = records_of([plain(line, ranks=True)])
    assert record is not None
    assert record["ranks"]["rows"] == [1030.0, 1370.0]


def table_of_file(path: Path) -> tuple[StepTable, int, list[tuple[int, str]]]:
    file = MetricsFile(path)
    file.read()
    return file.table(), file.damaged, file.notes


def test_both_ways_of_reading_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_table, "MOST_ROWS", 40)
    monkeypatch.setattr(step_table, "CHUNK", 32)
    lines = []
    for step in range(1200):
        record = record_of(step, 3, loss=float(step % 17))
        record |= {"eval_loss": 3.0} if step % 50 == 0 else {}
        record |= {"notes": ["look"]} if step % 211 == 0 else {}
        record |= {"skipped": True, "loss": float("nan")} if step % 97 == 0 else {}
        record |= {"odd": 10**400} if step % 301 == 0 else {}
        lines.append(json.dumps(record))
        lines += (
            ["{", '{"step": 3, "lo' + lines[-1], f'{{"step": {LARGEST_STEP}}}'] if step % 113 == 0 else []
        )
    lines[700] = lines[700].replace("2048", "-2e400")
    lines[701] = lines[701].replace('"step": ', '"step": -')
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(lines))  # the last line has no end
    read: list[int] = []
    whole = LineForm.read

    def counted(form: LineForm, given: list[bytes]) -> tuple[np.ndarray, list[bytes]]:
        numbers_NK, others = whole(form, given)
        read.append(len(numbers_NK))
        return numbers_NK, others

    monkeypatch.setattr(LineForm, "read", counted)
    fast, *told = table_of_file(path)
    assert sum(read) > 700, "most lines are alike"
    monkeypatch.setattr(LineForm, "of", lambda line: None)
    slow, *told_slowly = table_of_file(path)
    assert told == told_slowly
    assert fast.columns.keys() == slow.columns.keys()
    assert fast.step.tolist() == slow.step.tolist()
    assert fast.num_steps == slow.num_steps
    for name in slow.columns:
        np.testing.assert_allclose(fast.columns[name], slow.columns[name], rtol=1e-12)
        for part in ("count", "lowest", "highest"):
            assert getattr(fast, part)[name].tolist() == getattr(slow, part)[name].tolist(), (part, name)
    for name in slow.ranks:
        np.testing.assert_allclose(fast.ranks[name], slow.ranks[name], rtol=1e-6)
