"""The page of a run: one HTML file that needs nothing else.

Styles, scripts and figures are put into one file, so it opens from a disk, without a network, for ever. The
page builds itself from the figures (`page/page.js`); they stand in it as JSON, in which no character can end
the element, and all of their texts are set as text. A policy in the head lets nothing be loaded from
anywhere and lets only the scripts run that stand here, known by their digests.

Charts are drawn by hand, in SVG and canvas: why, docs/decisions.md says.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from moeclipse.core.shown import visible
from moeclipse.report.figures import figures
from moeclipse.report.run import RunData

NAME = "report.html"
SCRIPTS = ("charts.js", "pictures.js", "page.js")


def part(name: str) -> str:
    return (files("moeclipse.report") / "page_files" / name).read_text(encoding="utf-8")


def page_of(runs: Sequence[RunData], *, live: bool = False) -> str:
    """The whole page; `live`: it asks its server for new figures."""
    return fill(figures(runs), title_of(runs), live=live)


def title_of(runs: Sequence[RunData]) -> str:
    """`one`, `one and two`, `one, two and three`."""
    *some, last = [visible(run.name) for run in runs]
    return f"{', '.join(some)} and {last}" if some else last


def fill(found: dict[str, Any], title: str, *, live: bool = False) -> str:
    scripts = [part(name) for name in SCRIPTS]
    allowed = " ".join(f"'sha256-{digest(script)}'" for script in scripts)
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed}"
    policy += "; connect-src 'self'" if live else ""
    values = {
        "title": html.escape(f"{title} - MoEclipse"),
        "policy": html.escape(policy, quote=True),
        "style": part("page.css"),
        "data": as_json(found | {"live": live}),
        "scripts": "".join(f"<script>{script}</script>\n" for script in scripts),
    }
    page = part("page.html")
    before = page.split("{{")
    told = [before[0]]
    for piece in before[1:]:  # in one pass: a value that looks like a place is not filled again
        name, _, rest = piece.partition("}}")
        told += [values[name], rest]
    return "".join(told)


def as_json(value: Any) -> str:
    """JSON that may stand inside a script element: no `<` ends it, whatever a run is called."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def write_page(runs: Sequence[RunData], path: Path) -> None:
    """Beside, then renamed: who looks sees a whole page. Whom a run is closed to, its page is closed to."""
    open_to = 0o666
    for run in runs:
        open_to &= run.directory.stat().st_mode
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, open_to)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(page_of(runs))
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
