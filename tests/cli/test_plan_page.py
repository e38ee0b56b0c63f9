"""The page of a plan: whole, without scripts, with every action drawn where the simulator has it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from moeclipse.cli.main import main
from moeclipse.cli.plan_page import LABEL, ROW, WIDTH, bars, table, timeline_svg
from moeclipse.cost.model import UNIT
from moeclipse.schedule.catalogue import build
from moeclipse.sim.engine import simulate


class Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_plan_becomes_a_page_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    words = ["plan", "tiny", "--gpus", "2", "--tokens-per-step", "64k", "--seq-len", "512", "--explain", "2"]
    assert main([*words, "--page", str(page)]) == 0
    assert f"written to {page}" in capsys.readouterr().out
    text = page.read_text()
    found = Balanced()
    found.feed(text)
    assert found.open == []
    assert "script" not in found.seen
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org", "")
    assert text.count("class=chosen") == 1
    assert "default-src &#x27;none&#x27;" in text
    assert "attention" in text


def test_actions_are_drawn_where_they_are() -> None:
    result = simulate(build("1f1b", 2, 3), UNIT)
    text = timeline_svg(result)
    boxes = re.findall(r"<rect x='([\d.]+)' width='([\d.]+)' y='(\d+)'", text)
    assert len(boxes) == 12
    scale = (WIDTH - LABEL) / result.makespan
    starts = sorted((float(x) - LABEL) / scale for x, _, y in boxes if int(y) > ROW)
    assert starts == pytest.approx(sorted(result.start[6:12].tolist()), abs=0.01)
    assert "<title>0F0: 1000.0 ms from 0.0</title>" in text


def test_texts_are_texts() -> None:
    assert "<b>" not in table(("a<b>",), [["<b>"]])
    assert "<b>" not in bars([("<b>", 1.0)], 2.0)
    assert "width='100.0'" in bars([("half", 1.0)], 2.0)
