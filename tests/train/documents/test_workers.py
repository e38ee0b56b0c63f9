"""Processes that tokenise: the same tokens in the same order, and an end whatever happens."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from moeclipse.core.errors import DataError
from moeclipse.train.documents.formats import RawBatch
from moeclipse.train.documents.tokenizer import Recipe
from moeclipse.train.documents.workers import (
    Here,
    Workers,
    framed,
    packed,
    read_frame,
    serve,
    taken_apart,
    unpacked,
    write_frame,
)


def batches(count: int) -> list[RawBatch]:
    line = [json.dumps({"text": f"text {n} " * (n % 7)}).encode() for n in range(count)]
    return [
        RawBatch(file=n % 2, form="jsonl", first=n, raw=[line[n], b"", line[n]], read=n) for n in range(count)
    ]


def test_batches_survive_the_pipe() -> None:
    for batch in batches(9):
        assert unpacked(memoryview(packed(batch))) == batch
    head, body = taken_apart(memoryview(framed({"a": 1}, np.arange(3), b"x")))
    assert head == {"a": 1}
    assert bytes(body) == np.arange(3).tobytes() + b"x"
    file = io.BytesIO()
    write_frame(file, b"abc")
    file.seek(0)
    assert bytes(read_frame(file) or b"") == b"abc"
    assert read_frame(file) is None
    assert read_frame(io.BytesIO(b"\5\0\0\0\0\0\0\0abc")) is None


def test_two_workers_do_what_one_process_does() -> None:
    paths, recipe, given = ["a", "b"], Recipe(end=0), batches(40)
    here = list(Here(recipe, paths).map(given))
    with Workers(recipe, paths, 2) as workers:
        there = list(workers.map(given))
        assert [batch for batch, _ in there] == given
        for (_, a), (_, b) in zip(here, there, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_array_equal(a.lengths, b.lengths)
        bad = RawBatch(file=1, form="jsonl", first=3, raw=[b"{"], read=0)
        with pytest.raises(DataError, match=r"^b, line 4 is not JSON"):
            list(workers.map([*given, bad, *given]))
        assert len(list(workers.map(given[:3]))) == 3, "workers outlive a bad record"
        for worker in workers._all:
            worker.kill()
            worker.wait()
        with pytest.raises(DataError, match=r"has died"):
            list(workers.map(given))
    assert all(worker.returncode is not None for worker in workers._all)


def test_a_worker_serves_until_its_pipe_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = io.BytesIO(), io.BytesIO()
    write_frame(source, json.dumps([Recipe(end=0).to_json(), ["a", "b"]]).encode())
    bad = RawBatch(file=0, form="jsonl", first=0, raw=[b"["], read=0)
    for batch in (batches(2)[1], bad):
        write_frame(source, packed(batch))
    source.seek(0)
    ends = (("stdin", source), ("stdout", target))
    for name, file in ends:
        monkeypatch.setattr(f"sys.{name}", io.TextIOWrapper(file))
    monkeypatch.setattr("os.putenv", lambda *_: None)
    serve()
    target.seek(0)
    first, second = read_frame(target), read_frame(target)
    assert first is not None
    assert second is not None
    assert taken_apart(first)[0] == {"documents": 2, "tokens": 16}
    assert "a, line 1 is not JSON" in taken_apart(second)[0]["error"]


def test_nothing_to_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr("os.putenv", lambda *_: None)
    serve()
