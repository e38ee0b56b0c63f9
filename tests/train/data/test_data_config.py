"""Keys of the data: what is refused before a file is looked for."""

from __future__ import annotations

import pytest

from moeclipse.core.config import problems_of
from moeclipse.train.config import DataConfig as FromConfig
from moeclipse.train.data.data_config import (
    DataConfig,
    EvalConfig,
    SourceConfig,
    all_parts,
    eval_part,
    parts_of,
    source_name,
)

A = SourceConfig(name="a", files=("a.txt",))


def test_the_import_path_of_0_1_leads_here() -> None:
    assert FromConfig is DataConfig
    assert not list(problems_of(DataConfig(), "data."))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"seq_len": 0}, "data.seq_len (0) must be at least 1"),
        ({"batch_size": -1}, "data.batch_size (-1) must be at least 1"),
        ({"files": ("a\0",)}, "data.files ('a\\x00') must be the path of a file"),
        ({"tokenizer": "\0"}, "data.tokenizer ('\\x00') must be the path of a file"),
        ({"files": ("",)}, "data.files holds an empty name"),
        ({"kind": "chat"}, "data.kind = 'chat' needs data.tokenizer"),
        ({"cache": ""}, "data.cache ('') must be the path of a folder"),
        ({"source": (A, SourceConfig(files=()))}, "data.source[1].files ([]) must name files"),
        (
            {"source": (SourceConfig(files=("a",), weight=0.0),)},
            "data.source[0].weight (0.0) must be positive",
        ),
        ({"source": (A, A)}, "data.source: two of them are called 'a'; give each a name of its own"),
        ({"source": (A,), "files": ("a",)}, "data.files and data.source both name what is read"),
        ({"source": (A,), "order": "stream"}, "data.source cannot go with data.order = 'stream'"),
        ({"documents": "packed", "order": "stream"}, "data.documents cannot go with data.order = 'stream'"),
    ],
)
def test_problems(given: dict[str, object], says: str) -> None:
    (problem,) = problems_of(DataConfig(**given), "data.")  # type: ignore[arg-type]
    assert says in problem


def test_a_configuration_for_each_source() -> None:
    alone = DataConfig(files=("a.txt",))
    assert parts_of(alone) == [alone]
    other = SourceConfig(files=("b.jsonl",), field="body")
    both = DataConfig(source=(A, other), field="x", tokenizer="t.json")
    assert [(part.files, part.field, part.tokenizer, part.source) for part in parts_of(both)] == [
        (("a.txt",), "x", "t.json", ()),
        (("b.jsonl",), "body", "t.json", ()),
    ]
    assert [source_name(source, n) for n, source in enumerate(both.source)] == ["a", "source-1"]


def test_everything_that_is_read() -> None:
    data, held_out = DataConfig(source=(A,), field="x"), EvalConfig(files=("held.txt",))
    assert eval_part(data, held_out) == DataConfig(files=("held.txt",), field="x", shuffle=False)
    assert [part.files for part in all_parts(data, held_out)] == [("a.txt",), ("held.txt",)]
    assert all_parts(data, EvalConfig(share=0.1)) == parts_of(data)
