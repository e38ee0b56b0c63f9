"""`moeclipse plan --page FILE`: one plan as a page that needs nothing else, in the style of a run's report.

The table of the best plans, what the explained one takes and why, its layer in parts, bytes of each stage
rank, and its first microbatches drawn to scale. No script runs in it: figures are there as text and SVG, and
a policy in the head lets nothing be loaded. All texts are escaped.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moeclipse.report.page import part
from moeclipse.schedule import kinds
from moeclipse.sim.engine import Simulation

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
COLOURS = {
    kinds.F: "var(--a)",
    kinds.B: "var(--compute)",
    kinds.I: "var(--transfer)",
    kinds.W: "var(--straggle)",
    kinds.PAIR: "var(--kernel)",
}
NAMES = {kinds.F: "forward", kinds.B: "backward", kinds.I: "dX", kinds.W: "dW", kinds.PAIR: "F and B paired"}
WIDTH, ROW, LABEL = 1160, 22, 60
MOST_RANKS = 32


class PlanPage(NamedTuple):
    """What stands on it."""

    title: str
    chosen: str
    """The layout that is explained."""
    cards: Sequence[tuple[str, str]]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    """Of the best plans."""
    number: int
    """Of the explained one, from 1."""
    parts: Sequence[Sequence[str]]
    """Of a layer: name, forward, dX, dW."""
    stages: Sequence[tuple[str, float]]
    """(name, GiB) of each rank of the pipeline."""
    room: float
    shown: str
    simulation: Simulation

    def text(self) -> str:
        sections = [
            section("", cards(self.cards)),
            section("Best plans", table(self.columns, self.rows, self.number - 1)),
            section(
                "A layer, in milliseconds", table(("part", "forward", "dX", "dW"), self.parts), half=True
            ),
            section(f"GiB at the peak, of {self.room:.1f}", bars(self.stages, self.room), half=True),
            section(self.shown, timeline_svg(self.simulation)),
        ]
        head = f"<h1>{html.escape(self.chosen)}</h1><p class='soft'>{html.escape(self.title)}</p>"
        return (
            "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
            f'<meta http-equiv="Content-Security-Policy" content="{html.escape(POLICY, quote=True)}">\n'
            "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
            f"<title>{html.escape(self.chosen)} - MoEclipse</title>\n<link rel='icon' href='data:,'>\n"
            f"<style>\n{part('page.css')}\ntd,th {{ text-align: right; padding: 2px 10px; }} "
            "td:first-child, th:first-child, td:last-child, th:last-child { text-align: left; } "
            ".chosen td { font-weight: 600; } .wide { overflow-x: auto; }\n</style>\n</head>\n"
            f"<body>\n<header>{head}</header>\n<main>\n{''.join(sections)}</main>\n</body>\n</html>\n"
        )


def section(title: str, body: str, *, half: bool = False) -> str:
    heading = f"<h2>{html.escape(title)}</h2>" if title else ""
    return f"<section{' class=half' if half else ''}>{heading}<div class='wide'>{body}</div></section>\n"


def cards(values: Iterable[tuple[str, str]]) -> str:
    each = (
        f"<div class='card'><div class='what'>{html.escape(what)}</div>"
        f"<div class='value'>{html.escape(value)}</div></div>"
        for what, value in values
    )
    return f"<div class='cards'>{''.join(each)}</div>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], chosen: int = -1) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = []
    for number, row in enumerate(rows):
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        body.append(f"<tr{' class=chosen' if number == chosen else ''}>{cells}</tr>")
    return f"<table><tr>{head}</tr>{''.join(body)}</table>"


def bars(values: Sequence[tuple[str, float]], room: float) -> str:
    """Each beside its number; the whole width is what may be taken."""
    rows = []
    for name, size in values:
        share = min(size / room, 1.0) * 100 if room else 0.0
        box = f"<rect width='{2 * share:.1f}' height='12' fill='var(--held)'/>"
        bar = f"<svg width='200' height='12'>{box}</svg>"
        rows.append(f"<tr><td>{html.escape(name)}</td><td>{size:.1f}</td><td>{bar}</td></tr>")
    return f"<table>{''.join(rows)}</table>"


def timeline_svg(result: Simulation) -> str:
    """Actions of each rank, to scale; a title tells each."""
    span = result.makespan or 1.0
    ranks = result.program.ranks[:MOST_RANKS]
    scale = (WIDTH - LABEL) / span
    drawn, used = [], set()
    for rank, ops in enumerate(ranks):
        top, first = rank * ROW, result.begin[rank]
        drawn.append(f"<text x='0' y='{top + 14}' fill='var(--soft)' font-size='12'>rank {rank}</text>")
        for place, op in enumerate(ops):
            start, finish = float(result.start[first + place]), float(result.finish[first + place])
            used.add(op.kind)
            box = f"x='{LABEL + scale * start:.1f}' width='{max(scale * (finish - start) - 0.5, 0.5):.1f}'"
            told = f"{op}: {1e3 * (finish - start):.1f} ms from {1e3 * start:.1f}"
            fill = COLOURS.get(op.kind, "var(--idle)")
            drawn.append(
                f"<rect {box} y='{top + 2}' height='{ROW - 5}' rx='2' fill='{fill}'>"
                f"<title>{html.escape(told)}</title></rect>"
            )
    marks = "".join(
        f"<span class='mark' style='background:{COLOURS[kind]}'></span>{NAMES[kind]} &ensp;"
        for kind in COLOURS
        if kind in used
    )
    height = ROW * len(ranks)
    picture = f"<svg viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}' role='img'>"
    return f"{picture}{''.join(drawn)}</svg><p class='soft'>{marks} {1e3 * span:.1f} ms in all</p>"
