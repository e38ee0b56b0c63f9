"""What `moeclipse simulate` prints: timelines, tables of ranks and of communication, schedules side by side.

View    how times and memory are printed: seconds or the unit of the costs, bytes or activations
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moeclipse.cli.display import count
from moeclipse.sim.compare import Answer, advise
from moeclipse.sim.trace import timeline, write_perfetto

STYLES = {"F": "blue", "B": "green", "I": "cyan", "W": "yellow", "#": "magenta", "R": "red", "!": "bold red"}
MAX_RANK_ROWS = 16
GIB = 2.0**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    in_seconds: bool
    activations: str = "activations of a rank's layers for one microbatch"
    """What memory is counted in, where bytes are not known."""

    def time(self, value: float) -> str:
        if not self.in_seconds:
            return f"{value:.4g}"
        if value >= 1:
            return f"{value:.3f} s"
        return f"{value * 1e3:.1f} ms" if value >= 1e-3 or not value else f"{value * 1e6:.0f} us"

    def held(self, answer: Answer) -> list[str]:
        """Of each rank at its peak."""
        if answer.bytes_of:
            return [f"{size / GIB:.2f}" for size in answer.bytes_of]
        return [f"{size:.2f}" for size in answer.summary.peak]

    def most(self, answer: Answer) -> str:
        held = answer.bytes_of or answer.summary.peak
        return self.held(answer)[max(range(len(held)), key=lambda rank: held[rank])]

    def unit(self, answer: Answer) -> str:
        return "GiB, weights and all" if answer.bytes_of else self.activations


def show(console: Console, view: View, answer: Answer, *, width: int = 0, trace: Path | None = None) -> None:
    """Timeline, tables and trace of one step; a width of 0 is that of the terminal."""
    width = width or max(40, min(console.width - 10, 160))
    console.print(_coloured(timeline(answer.result, width)))
    console.print()
    _rank_table(console, view, answer)
    _kind_table(console, view, answer)
    _verdict(console, view, answer)
    if trace is not None:
        write_perfetto(answer.result, trace, seconds_per_unit=1.0 if view.in_seconds else 1e-3)
        console.print(f"trace written to {trace}; open it at https://ui.perfetto.dev")


def _coloured(text: str) -> Text:
    """Colours for the glyphs of the rows; the legend and labels stay plain."""
    out = Text()
    *rows, legend = text.splitlines()
    for row in rows:
        label = 5 + len(row[5:].lstrip().split(" ")[0]) + (len(row[5:]) - len(row[5:].lstrip()))
        head = label if row.startswith("rank") else 0
        out.append(row[:head])
        for glyph in row[head:]:
            out.append(glyph, STYLES.get(glyph, ""))
        out.append("\n")
    return out.append(legend, "dim")


def _rank_table(console: Console, view: View, answer: Answer) -> None:
    table = Table(box=None, pad_edge=False)
    peak, held = "peak GiB" if answer.bytes_of else "peak activations", view.held(answer)
    for column in ("rank", "compute", "exposed", "straggle", "idle", "bubble", peak):
        table.add_column(column, justify="right")
    span = answer.summary.makespan or 1.0
    for rank, time in enumerate(answer.summary.ranks[:MAX_RANK_ROWS]):
        values = (time.compute, time.exposed, time.straggle, time.idle)
        table.add_row(
            str(rank),
            *(view.time(value) for value in values),
            f"{time.bubble / span:.1%}",
            held[rank],
        )
    console.print(table)
    left = len(answer.summary.ranks) - MAX_RANK_ROWS
    if left > 0:
        console.print(f"... and {left} more ranks", style="dim")


def _kind_table(console: Console, view: View, answer: Answer) -> None:
    kinds = {kind: time for kind, time in answer.summary.kinds.items() if time.total > 0}
    if not kinds:
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("communication (all ranks)")
    for column in ("total", "hidden", "exposed", ""):
        table.add_column(column, justify="right")
    for kind, time in sorted(kinds.items(), key=lambda item: item[0].name):
        values = (time.total, time.hidden, time.exposed)
        table.add_row(kind.name, *(view.time(v) for v in values), f"{time.hidden / time.total:.0%} hidden")
    console.print()
    console.print(table)


def _verdict(console: Console, view: View, answer: Answer) -> None:
    summary = answer.summary
    busiest = max(rank.compute for rank in summary.ranks)
    console.print(
        f"\nmakespan {view.time(summary.makespan)}: {summary.makespan / busiest:.3f} x the compute "
        f"of the busiest rank; worst bubble {view.time(summary.bubble)}; "
        f"peak {view.most(answer)} {view.unit(answer)}",
        style="bold",
    )


def show_comparison(
    console: Console,
    view: View,
    answers: list[Answer],
    refused: dict[str, str],
    terms: str,
    overlap: str = "",
) -> None:
    """One row for each schedule that was announced, and why the others have none."""
    console.print(f"{count(len(answers), 'schedule')}: {terms}", style="bold")
    if answers:
        console.print(_comparison(view, answers))
        for line in advise(answers):
            console.print(line, style="bold")
    for name, reason in refused.items():
        for prefix in (f"{name} {overlap}: ", f"{name}: ", f"pipeline.schedule: {name} ", f"{name} "):
            reason = reason.removeprefix(prefix)
        console.print(f"{name} left out: {reason}", style="dim")


def _comparison(view: View, answers: list[Answer]) -> Table:
    table = Table(
        box=None,
        pad_edge=False,
        caption="bubble, exposed, idle: mean over ranks. hidden: dispatch and combine under compute. "
        f"memory: peak on the worst rank, in {view.unit(answers[0])}. "
        "parameters: copies of the model.",
        caption_justify="left",
    )
    table.add_column("schedule", no_wrap=True)
    for column in ("makespan", "bubble", "exposed", "idle", "hidden", "memory", "parameters"):
        table.add_column(column, justify="right")
    for answer in answers:
        summary = answer.summary
        ranks = len(summary.ranks)
        hidden = answer.exchange_hidden
        table.add_row(
            f"{answer.name} x{answer.stages_per_rank}" if answer.stages_per_rank > 1 else answer.name,
            view.time(summary.makespan),
            f"{sum(r.bubble for r in summary.ranks) / ranks / summary.makespan:.1%}",
            view.time(sum(r.exposed for r in summary.ranks) / ranks),
            view.time(sum(r.idle for r in summary.ranks) / ranks),
            "-" if hidden is None else f"{hidden:.0%}",
            view.most(answer),
            f"{answer.model_copies}x",
        )
    return table
