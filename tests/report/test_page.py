"""One file that needs nothing else, whatever a run calls itself."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from made_runs import make_run, make_trace, record_of, write_lines, write_loads

from moeclipse.report import page as page_module
from moeclipse.report.page import as_json, digest, page_of, part, write_page
from moeclipse.report.run import read_run

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)> {{data}} \"' \u2028"


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def elements(page: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Elements()
    parser.feed(page)
    return parser.found


def data_in(page: str) -> dict[str, object]:
    found = re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    told: dict[str, object] = json.loads(found[1])
    return told


def test_a_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    make_trace(folder)
    write_page([read_run(folder)], folder / "report.html")
    page = (folder / "report.html").read_text()
    for tag, attributes in elements(page):
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
    assert "{{" not in page.replace(part("page.js"), "")
    assert "default-src &#x27;none&#x27;" in page
    assert "connect-src" not in page
    assert not list(folder.glob(".*"))


def test_whom_a_run_is_closed_to_its_page_is_closed_to(tmp_path: Path) -> None:
    mine, shared = make_run(tmp_path / "mine"), make_run(tmp_path / "shared")
    mine.chmod(0o700)
    shared.chmod(0o755)
    before = os.umask(0o022)
    try:
        for runs, mode in (([mine], 0o600), ([shared], 0o644), ([shared, mine], 0o600)):
            page = tmp_path / "page.html"
            page.write_text("from before")
            page.chmod(0o666)
            write_page([read_run(folder) for folder in runs], page)
            assert page.stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)


def test_what_could_not_be_written_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run")
    write_page([read_run(folder)], folder / "report.html")
    before = (folder / "report.html").read_text()
    monkeypatch.setattr(page_module, "page_of", lambda _: "half of it\ud800")
    with pytest.raises(UnicodeEncodeError):
        write_page([read_run(folder)], folder / "report.html")
    assert (folder / "report.html").read_text() == before
    assert not list(folder.glob(".*"))


def test_names_and_texts_stay_data(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "config.toml").write_text(f"[run]\nname = {json.dumps(EVIL)}\n")
    (folder / "incidents.jsonl").write_text(json.dumps({"what": EVIL, "kind": EVIL, "step": None}))
    page = page_of([read_run(folder)])
    assert [tag for tag, _ in elements(page)].count("script") == 4
    assert "img" not in [tag for tag, _ in elements(page)]
    assert data_in(page)["runs"][0]["name"] == EVIL  # type: ignore[index]


def test_only_the_scripts_of_the_page_may_run(tmp_path: Path) -> None:
    page = page_of([read_run(make_run(tmp_path / "run"))])
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 3
    for script in scripts:
        assert digest(script) in page


def test_scripts_set_text_and_never_markup() -> None:
    for name in ("charts.js", "pictures.js", "page.js"):
        script = part(name)
        for way in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
        ):
            assert way not in script
        assert "</script" not in script


def test_json_cannot_end_its_element() -> None:
    told = as_json({"a": "</script><!--&"})
    assert not set("<>&") & set(told)
    assert json.loads(told) == {"a": "</script><!--&"}


def test_a_long_run_of_a_large_model_is_a_small_page(tmp_path: Path) -> None:
    """10,000 steps, 32 layers of 64 experts: under 3 MB, two of them, too."""
    folder = make_run(tmp_path / "run", steps=3)
    rng = np.random.default_rng(0)
    noise = rng.random(10_000).tolist()
    write_lines(folder / "metrics.jsonl", [record_of(step, loss=noise[step]) for step in range(10_000)])
    write_loads(folder, rng.integers(0, 5000, (256, 32, 64)), 2)
    run = read_run(folder)
    assert 5e5 < len(page_of([run, run])) < 3e6


def test_whoever_looks_meanwhile_sees_a_whole_page(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", steps=3))
    path = tmp_path / "report.html"
    path.write_text("the page before")
    with path.open() as looking:
        write_page([run], path)
        assert looking.read() == "the page before"
    assert path.read_text().startswith("<!doctype html>")
