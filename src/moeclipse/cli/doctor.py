"""`moeclipse doctor`: what works on this machine, what does not, and what to do about it.

Exit status 0 means that training can run here; `--json` gives the same findings to programs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence

from moeclipse.cli import checks, exchange, kernels, peers
from moeclipse.cli.checks import Finding
from moeclipse.cli.words import read
from moeclipse.core.program import command
from moeclipse.core.shown import say, visible

MARKS = {"works": ("✓", "ok"), "info": ("·", "--"), "limited": ("!", "! "), "broken": ("✗", "XX")}
COLOURS = {"works": "32", "info": "90", "limited": "33", "broken": "31"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What works on this machine, what does not, and what to do."""

    json: bool = False
    """Print the findings as JSON."""
    dir: str = "runs"
    """The folder of runs whose disk is looked at."""


def main(words: list[str]) -> int:
    options = read(DoctorOptions, words, "doctor")
    items = list(examine(options.dir))
    able = can_train(items)
    if options.json:
        say(json.dumps({"can_train": able, "items": [dataclasses.asdict(item) for item in items]}, indent=2))
    else:
        stream = sys.stdout
        coloured = stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        for line in render(items, unicode=speaks_unicode(stream.encoding), coloured=coloured):
            stream.write(f"{line}\n")
    return 0 if able else 1


def examine(directory: str) -> Iterator[Finding]:
    """All checks; those that fork come before any device is opened."""
    answer, exchanged = peers.try_peers(), exchange.try_nccl()
    yield from checks.versions()
    yield from checks.backends()
    yield from exchange.nccl(exchanged)
    yield from checks.devices()
    yield from kernels.kernels()
    yield from peers.peers(answer)
    yield from checks.machine(directory)
    yield from checks.network()
    yield from checks.environment(os.environ)


def can_train(items: Sequence[Finding]) -> bool:
    return not any(item.state == "broken" for item in items)


def speaks_unicode(encoding: str | None) -> bool:
    return (encoding or "").lower().replace("-", "").startswith("utf")


def render(items: Sequence[Finding], unicode: bool, coloured: bool) -> Iterator[str]:
    section = ""
    width = max(len(item.name) for item in items)
    for item in items:
        if item.section != section:
            yield from ([""] if section else [])
            section = item.section
            yield _paint(section, "1", coloured)
        mark = MARKS[item.state][0 if unicode else 1]
        yield f"  {_paint(mark, COLOURS[item.state], coloured)} {item.name:<{width}}  {visible(item.value)}"
        if item.advice:
            arrow = "→" if unicode else "->"
            yield f"    {'':<{width}}  {_paint(f'{arrow} {visible(item.advice)}', '2', coloured)}"
    broken = [item.name for item in items if item.state == "broken"]
    limited = [item.name for item in items if item.state == "limited"]
    yield ""
    if broken:
        yield f"Training cannot run here yet: mend {', '.join(broken)}."
    else:
        seen = f"Look at: {', '.join(limited)}. " if limited else ""
        yield f"{seen}Training can run here: {command('train')}"


def _paint(text: str, colour: str, coloured: bool) -> str:
    return f"\033[{colour}m{text}\033[0m" if coloured else text
