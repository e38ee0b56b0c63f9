"""The commands that README and docs show: those of training are understood, all others run, in a folder that
has the files they name. Those of recipes and tutorial run in tests of their own.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from code_blocks import pages
from forked import exit_status
from release import FOLDER
from tiny_models import write_tiny

from moeclipse.cli.main import COMMANDS as ALL
from moeclipse.cli.main import main
from moeclipse.hf.config_file import byte_tokenizer
from moeclipse.testing.run_ranks import run_alone

SHOWN = re.compile(r"^    moeclipse ((?:train|simulate|place) ?.*)$", re.MULTILINE)
PAGES = [page for page in pages() if not page.name.startswith("tutorial")]  # whole in test_tutorial.py
COMMANDS = sorted(
    {tuple(shlex.split(line, comments=True)) for page in PAGES for line in SHOWN.findall(page.read_text())}
)
OTHERS = ("generate", "plan", "measure", "skew", "report", "convert", "doctor")
OTHER = re.compile(rf"^    moeclipse ((?:{'|'.join(OTHERS)})\b.*)$", re.MULTILINE)
OWN_TESTS = ("recipes.md", "tutorial")  # test_recipes, test_tutorial
SIZES = (
    *(
        "--ranks",
        "2",
        "--run.steps",
        "6",
        "--run.device",
        "cpu",
        "--data.seq-len",
        "128",
        "--data.batch-size",
        "4",
    ),
    *(
        "--model.num-layers",
        "2",
        "--model.d-model",
        "32",
        "--model.num-heads",
        "2",
        "--model.num-kv-heads",
        "1",
    ),
    *("--model.head-dim", "16", "--moe.num-experts", "4", "--moe.d-ff", "32"),
)
BLOCKS = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
"""Every matrix is whole blocks of 64 numbers, as a base of four bits wants it."""
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


def others() -> list[list[str]]:
    """In the order of pages: what a command leaves is there for those that follow."""
    found = []
    for page in PAGES:
        for line in OTHER.findall("" if page.name.startswith(OWN_TESTS) else page.read_text()):
            words = [word for word in shlex.split(line.partition("  ")[0], comments=True) if word != "..."]
            if "--live" not in words and words not in found:  # which ends with Ctrl-C: report/test_serve.py
                found.append(words)
    return found


def run(folder: Path, *words: str) -> str:
    """Exit status 1 is an answer of `report --fail-if`, and of `plan` where nothing fits."""
    call = [sys.executable, "-m", "moeclipse", *words]
    done = subprocess.run(call, cwd=folder, capture_output=True, text=True, timeout=600)
    answers = (0, 1) if "--fail-if" in words or "nothing fits" in done.stdout else (0,)
    assert done.returncode in answers, (words, done.stdout, done.stderr)
    return done.stdout


def prepared(folder: Path) -> None:
    """Two runs, two adapters, a model and a file, under the names that pages use."""
    run_alone(lambda _: write_tiny("mixtral", folder / "model", **BLOCKS))
    for name, data in byte_tokenizer().items():
        (folder / "model" / name).write_bytes(data)
    for name in ("hf-model", "hf-folder"):
        shutil.copytree(folder / "model", folder / "path" / "to" / name)
    (folder / "my.toml").write_text('preset = "tiny"\n[data]\nbatch_size = 64\n')
    run(folder, "train", "--run.name", "NAME", *SIZES)
    for name in ("BEFORE", "mine"):
        shutil.copytree(folder / "runs" / "NAME", folder / "runs" / name)
    adapted = (
        "--model.from-hf",
        "model",
        "--lora.rank",
        "2",
        "--model.base",
        "nf4",
        "--model.dense-base",
        "nf4",
    )
    for name in ("one", "two"):
        run(folder, "train", "--run.name", name, *SIZES[:10], *adapted)
        run(folder, "convert", f"runs/{name}", name, "--adapter")


@pytest.mark.full
def test_all_other_commands_run(tmp_path: Path) -> None:
    assert {*OTHERS, "train", "simulate", "place", "completion"} == set(ALL)
    prepared(tmp_path)
    shown = others()
    assert {words[0] for words in shown} == set(OTHERS)
    for words in shown:
        if words[0] == "convert":  # into a folder that no command before it has written
            shutil.rmtree(tmp_path / words[2], ignore_errors=True)
        run(tmp_path, *words)
        if words[2:3] == ["model"]:
            shutil.rmtree(tmp_path / "model")
            shutil.copytree(tmp_path / "path/to/hf-model", tmp_path / "model")
