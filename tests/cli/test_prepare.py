"""Tokens before ranks: made once, told in a bar or in lines; nothing is done where nothing is to be made."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from moeclipse.cli import prepare as module
from moeclipse.cli.prepare import TokenBar, prepare, prepare_all
from moeclipse.core.config import with_values
from moeclipse.core.errors import DataError
from moeclipse.train.config import TrainConfig
from moeclipse.train.data.corpus import open_corpus
from moeclipse.train.data.data_config import DataConfig
from moeclipse.train.documents import cache, recipe


def records(folder: Path, count: int = 2000) -> DataConfig:
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": f"text {n}"}) for n in range(count)))
    return DataConfig(files=(str(folder / "a.jsonl"),), cache=str(folder / "cache"))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (module, cache, recipe):
        monkeypatch.setattr(place, "IN_MEMORY", 1000)
    monkeypatch.setattr(cache, "num_workers", lambda: 1)


@pytest.mark.usefixtures("small")
def test_ranks_find_what_was_prepared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = records(tmp_path)
    prepare(config, 256)
    assert capsys.readouterr().out.splitlines()[-1].startswith("tokenising: 100 % of 0 MB")
    prepare(config, 256)
    keys = {"data.files": config.files, "data.cache": config.cache}
    prepare_all(with_values(TrainConfig(), keys))
    assert not capsys.readouterr().out, "made once"
    monkeypatch.setattr(cache, "make", None)
    assert len(open_corpus(config, 256)) == sum(len(f"text {n}") + 1 for n in range(2000))
    with pytest.raises(
        DataError, match=r"tokens up to 255, but model.vocab_size is 200; set it to at least 256"
    ):
        prepare(config, 200)


def test_little_and_plain_data_is_left_to_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "open_corpus", None)
    prepare(DataConfig(), 256)
    prepare(records(tmp_path), 256)
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("small")
def test_a_bar_on_a_terminal() -> None:
    out = io.StringIO()
    bar = TokenBar(Console(file=out, force_terminal=True, width=80))
    bar.close()
    for done in (0, 500, 2000):
        bar.tell(done, 2000)
    bar.close()
    assert "tokenising" in out.getvalue()
    assert "100%" in out.getvalue()
