"""README and docs: links lead somewhere, files that are named exist, and pages stay short enough to read."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "moeclipse"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MAX_WORDS = 1600
LONG = {"decisions.md", "measured.md", "promises.md"}
"""Records, which are looked things up in and not read through."""

PACKAGES = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
SECTIONS = {"moe", "model", "pipeline"}
"""Packages that share their name with a section of the configuration: `moe.schedule` is a key there."""

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
ROOT_PATH = re.compile(r"(?<![\w/.-])(?:src|tests|bench|docs)/[\w./*-]*[\w*/]")
PACKAGE_PATH = re.compile(rf"(?:{'|'.join(sorted(PACKAGES))})/[\w/]*(?:\.py)?")
DOTTED = re.compile(rf"(?:moeclipse\.)?(?:{'|'.join(sorted(PACKAGES - SECTIONS))})(?:\.\w+)+")


def anchors(text: str) -> set[str]:
    """Of headings, as GitHub makes them, and those that are written down."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


def broken_links(page: Path) -> list[str]:
    found = []
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        file, _, anchor = target.partition("#")
        if re.match(r"\w+:", target):
            continue
        other = page.parent / file if file else page
        if not other.exists() or (anchor and anchor not in anchors(other.read_text())):
            found.append(target)
    return found


def missing_files(text: str) -> list[str]:
    """Paths below the root, and `room/file` forms in code, that name nothing."""
    found = [path for path in ROOT_PATH.findall(text) if not any(ROOT.glob(path.rstrip("/")))]
    for code in CODE.findall(text):
        if PACKAGE_PATH.fullmatch(code):
            bare = code.rstrip("/")
            places = [SOURCE / bare, SOURCE / f"{bare}.py", ROOT / "tests" / bare]
            found += [] if any(place.exists() for place in places) else [code]
    return found


def missing_names(text: str) -> list[str]:
    """`package.module.name` in code that cannot be imported."""
    return [code for code in CODE.findall(text) if DOTTED.fullmatch(code) and not is_there(code)]


def is_there(dotted: str) -> bool:
    parts = ["moeclipse", *dotted.removeprefix("moeclipse.").split(".")]
    for cut in range(len(parts), 1, -1):
        try:
            thing = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            thing = getattr(thing, name, None)
        return thing is not None
    return False


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken_links(page)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_is_named_exists(page: Path) -> None:
    assert not missing_files(page.read_text())
    assert not missing_names(page.read_text())


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in LONG], ids=name_of)
def test_pages_are_short(page: Path) -> None:
    words = len(page.read_text().split())
    assert words <= MAX_WORDS, f"{name_of(page)} has {words} words: it answers two questions"


def test_every_page_can_be_reached() -> None:
    """From the README, over any number of pages."""
    known, new = set(), {PAGES[0]}
    while new:
        page = new.pop()
        known.add(page)
        targets = [target.partition("#")[0] for target in LINK.findall(page.read_text())]
        new |= {(page.parent / file).resolve() for file in targets if file.endswith(".md")} - known
    assert set(PAGES) <= known, f"nobody links to {sorted(map(name_of, set(PAGES) - known))}"


def test_what_is_wrong_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A heading\n[a](#a-heading) [b](#nothing) [c](other.md) [d](https://example.org)\n")
    assert broken_links(page) == ["#nothing", "other.md"]
    text = "`comm/nobody` tests/nothing.py `sim/engine` `balance/nothing.py` bench/overlap.py `tests/`"
    assert sorted(missing_files(text)) == ["balance/nothing.py", "comm/nobody", "tests/nothing.py"]
    assert missing_names("`sim.engine.simulate` `sim.engine.Nothing` `moe.schedule`") == [
        "sim.engine.Nothing"
    ]
