"""docs/promises.md: every test and bench that it names is there, and no page is without a promise."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from moeclipse.hf.families import FAMILIES
from moeclipse.model.count import count_parameters
from moeclipse.schedule.legal import SCHEDULES
from moeclipse.train.presets import load, preset_names

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "promises.md"
RECORDS = {"decisions", "measured"}
"""Pages that say what was, not what will be."""
HEADING = re.compile(r"^## \[(\w[\w-]*)\]\(\S+\)$", re.MULTILINE)
LINE = re.compile(r"^- (.+?): ((?:`[\w/.]+(?:::\w+)?`(?:, )?)+)$", re.MULTILINE)


def missing(named: str) -> bool:
    file, _, test = named.partition("::")
    path = ROOT / file if file.startswith("bench/") else ROOT / "tests" / file
    return not path.is_file() or not re.search(rf"^def {test or '.*'}\(", path.read_text(), re.MULTILINE)


def test_all_that_is_named_exists() -> None:
    text = PAGE.read_text()
    rows = LINE.findall(text)
    assert len(rows) == len(re.findall("^- ", text, re.MULTILINE)), "a promise without a test"
    named = [name for _, cell in rows for name in re.findall(r"`([^`]+)`", cell)]
    assert len(named) > len(rows) > 100
    assert not [name for name in named if missing(name)]


def test_a_name_that_is_gone_is_seen() -> None:
    assert missing("test_promises.py::test_nothing")
    assert missing("bench/nothing.py")
    assert missing("moe/test_nothing.py::test_a")
    assert not missing("test_promises.py::test_a_name_that_is_gone_is_seen")


def test_no_page_is_without_a_promise() -> None:
    parts = HEADING.split(PAGE.read_text())[1:]
    told = {page for page, lines in zip(parts[::2], parts[1::2], strict=True) if LINE.search(lines)}
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"README"}
    assert pages - told == RECORDS


def test_a_bench_stands_for_each_promise_of_speed() -> None:
    """Every bench but those that a page names for their own sake."""
    named = set(re.findall(r"`bench/(\w+)\.py`", PAGE.read_text()))
    benches = {path.stem for path in (ROOT / "bench").glob("[a-z]*.py")}
    assert benches - named == {"hf_experts", "host_time", "moe_train", "shaped_network"}


def page(name: str) -> str:
    return " ".join((ROOT / name).read_text().split())


@pytest.mark.parametrize("preset", preset_names())
def test_parameters_of_presets_are_those_of_the_page(preset: str) -> None:
    config = load(preset=preset)
    total, active = count_parameters(config.model, config.moe, config.gate)
    size, unit, digits = (1e9, "B", 2) if total >= 1e9 else (1e6, "M", 0 if total >= 1e8 else 1)
    told = f"{total / size:.{digits}f} {unit}, {active / size:.{digits}f} {unit} active"
    model = config.model
    depth = f"{model.num_layers}{' (first dense)' if model.num_dense_layers else ''}"
    row = rf"\| `{preset}` \| [^|]* \| {re.escape(depth)} \| {model.d_model} \| {config.moe.num_experts} \| "
    assert re.search(rf"{row}{config.gate.top_k} \| {re.escape(told)} \|", page("docs/configuration.md")), (
        told
    )


def test_figures_of_the_project_are_those_of_today() -> None:
    sys.path.insert(0, str(ROOT / "tests" / "combinations"))
    try:
        from cover import read_cases
        from factors import FACTORS
    finally:
        sys.path.pop(0)
    cases, text = read_cases(), page("docs/combinations.md")
    exact = sum(case.dtype == "float64" for case in cases)
    assert f"takes {len(FACTORS)} factors" in text
    assert f"with {sum(map(len, FACTORS.values()))} levels" in text
    assert f"{exact} in float64 that contain every pair, and {len(cases) - exact} in which" in text
    assert len(SCHEDULES) == 13
    assert "thirteen schedules" in page("README.md")
    assert f"{len(FAMILIES)} families" in page("README.md")
