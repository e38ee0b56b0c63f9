"""The tutorial, as a reader would follow it: every command of its pages runs, in order, in one folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from code_blocks import ROOT, blocks_in
from tiny_models import write_tiny

from moeclipse.hf.config_file import byte_tokenizer
from moeclipse.testing.run_ranks import run_alone

SHOWN = re.compile(r"^    moeclipse (.+)$", re.MULTILINE)
PAGES = ("tutorial-1-first-run.md", "tutorial-3-hugging-face.md")


def follow(page: str, folder: Path) -> list[str]:
    """What each command printed."""
    told = []
    for line in SHOWN.findall((ROOT / "docs" / page).read_text()):
        words = [sys.executable, "-m", "moeclipse", *shlex.split(line)]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, f"{line}: {done.stderr[-2000:]}"
        told.append(done.stdout)
    return told


@pytest.mark.full
def test_the_first_run(tmp_path: Path) -> None:
    told = follow(PAGES[0], tmp_path)
    assert len(told) == 7
    assert (tmp_path / "runs/first/report.html").is_file()
    assert (tmp_path / "model/tokenizer.json").is_file()
    assert told[-1].startswith("Mixtral: ")


@pytest.mark.full
def test_a_hugging_face_model(tmp_path: Path) -> None:
    run_alone(lambda _: write_tiny("olmoe", tmp_path / "model", vocab_size=256))
    for name, data in byte_tokenizer().items():
        (tmp_path / "model" / name).write_bytes(data)
    follow(PAGES[1], tmp_path)
    (block,) = blocks_in(ROOT / "docs" / PAGES[1])
    done = subprocess.run([sys.executable, "-c", block.source], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/called/export/config.json").is_file()


def test_pages_of_the_site() -> None:
    """All pages are in the navigation; the site is built by `make docs`, in strict mode, in the long part."""
    listed = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    made = {"index.md", *(f"reference-{name}.md" for name in ("keys", "python", "commands", "files"))}
    assert listed - made == {path.name for path in (ROOT / "docs").glob("*.md")}


@pytest.mark.full
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    words = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # which is no warning of these pages
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=quiet)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    keys = (tmp_path / "site/reference-keys.html").read_text()
    assert "gate.top_k" in keys
    assert (tmp_path / "site/search/search_index.json").stat().st_size > 1e5
