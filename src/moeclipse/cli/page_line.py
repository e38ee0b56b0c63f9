"""The last lines of a run: what skew cost, what would have helped, and where the page is that shows it.

Contract. A page is a service: whatever goes wrong with it is said in its line and costs the run nothing.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from moeclipse.cli.display import LABEL_WIDTH
from moeclipse.core.program import command
from moeclipse.report.advice import advise_run
from moeclipse.report.measures import measures_of
from moeclipse.report.page import NAME, write_page
from moeclipse.report.run import read_run
from moeclipse.report.skew import skew_of

MOST_BYTES = 64 << 20
"""Of metrics: a longer run's page takes a while, and is left to whoever asks for it."""
MOST_ADVICE = 2


def page_lines(directory: Path) -> list[tuple[str, str]]:
    """(label, text); the page is written."""
    by_hand = command("report", directory)
    try:
        if (directory / "metrics.jsonl").stat().st_size > MOST_BYTES:
            return [("page", by_hand)]
        run = read_run(directory)
        measures = measures_of(run)
        skew = skew_of(run)
        told = [one.in_words(measures["step_ms"]) for one in advise_run(run, measures)[:MOST_ADVICE]]
        write_page([run], directory / NAME)
    except Exception as error:  # the run is over and well: nothing here may end it otherwise
        return [("page", f"could not be written ({error}); {by_hand}")]
    uneven = labelled("skew", [] if skew is None else skew.in_words())
    return [*uneven, *labelled("advice", told), ("page", str(directory / NAME))]


def labelled(label: str, lines: list[str]) -> list[tuple[str, str]]:
    return [(label if index == 0 else "", text) for index, text in enumerate(lines)]


def tell_page(directory: Path, console: Console) -> None:
    for label, text in page_lines(directory):
        console.print(Text.assemble((f"{label:<{LABEL_WIDTH}}", "bold"), text))
