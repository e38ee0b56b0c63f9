"""The commands that README and docs show are understood, in a folder that has the files they name."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from code_blocks import pages
from forked import exit_status
from release import FOLDER

from moeclipse.cli.main import main

SHOWN = re.compile(r"^    moeclipse ((?:train|simulate|place) ?.*)$", re.MULTILINE)
PAGES = [page for page in pages() if not page.name.startswith("tutorial")]  # whole in test_tutorial.py
COMMANDS = sorted(
    {tuple(shlex.split(line, comments=True)) for page in PAGES for line in SHOWN.findall(page.read_text())}
)
MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
}
"""The folder `model` of the pages."""
LLAMA = {**MIXTRAL, "model_type": "llama", "intermediate_size": 4096}
"""And `dense`."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(FOLDER / "old", tmp_path / "runs" / "NAME")
    for name in ("my.toml", "corpus.txt"):
        shutil.copy(FOLDER / name, tmp_path)
    for name in ("corpus", "first", "second", "chat"):
        (tmp_path / name).mkdir()
        shutil.copy(FOLDER / "corpus.txt", tmp_path / name)
        (tmp_path / name / "records.jsonl").write_text('{"text": "a", "messages": []}\n')
    (tmp_path / "corpus.bin").write_bytes(bytes(4096))
    (tmp_path / "plans.py").write_text("def hottest_everywhere(problem):\n    return None\n")
    for name, config in (("model", MIXTRAL), ("dense", LLAMA)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        (tmp_path / name / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.usefixtures("folder")
def test_shown_commands_are_understood(words: tuple[str, ...]) -> None:
    if (export := Path("runs/first/export")).as_posix() in words:  # what a command before it leaves
        shutil.copytree("model", export)
    given = [word for word in words if word != "--print-config"]
    given = given[: given.index(">")] if ">" in given else given
    if "--compare" in given:  # the shown one takes ten seconds; an old run does not say how many ranks it had
        given += ["--ranks", "2"] if given[1].startswith("runs/") else ["--layers", "1"]
    given += ["--print-config"] if given[0] == "train" else []
    assert exit_status(lambda: main(given)) == 0


def test_commands_are_found() -> None:
    assert {words[0] for words in COMMANDS} == {"train", "simulate", "place"}
    assert len(COMMANDS) > 20
