"""`moeclipse report`: the page of a run, its numbers for a script, and conditions for CI.

    moeclipse report runs/mine                                   # writes runs/mine/report.html
    moeclipse report runs/mine runs/before runs/third            # all on one page, with differences
    moeclipse report runs/mine --json
    moeclipse report runs/mine runs/before --fail-if "tokens_per_s < 0.95 * RUN2"
    moeclipse report runs/mine --live                            # serves the page while the run goes

Nothing here needs torch or a device. The exit status is 0, 1 where a condition holds, and 2 where something
is wrong with what was asked.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from moeclipse.cli.guard import refuse_unwritable
from moeclipse.cli.words import read
from moeclipse.core.errors import ConfigError
from moeclipse.core.shown import say
from moeclipse.report.advice import advise_run
from moeclipse.report.fail_if import judge
from moeclipse.report.figures import shown
from moeclipse.report.measures import measures_of
from moeclipse.report.page import NAME, write_page
from moeclipse.report.run import RunData, read_run
from moeclipse.report.serve import serve
from moeclipse.report.skew import skew_of
from moeclipse.report.thin import safe


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Show a run as one page, or several runs beside each other; print or check their numbers."""

    runs: tuple[Path, ...] = ()
    """Folders of runs; with several, each is compared with the first."""
    out: Path | None = None
    """Where the page is written; left out: report.html in the first run's folder."""
    json: bool = False
    """Print the numbers of the runs and write no page."""
    fail_if: tuple[str, ...] = ()
    """A condition like "exposed > 10%" or "tokens_per_s < 0.95 * RUN2": exit status 1 where it holds."""
    live: bool = False
    """Serve the page on loopback, and let it follow the run."""
    port: int = 0
    """With --live: where; 0: any that is free."""

    def problems(self) -> list[str]:
        problems = []
        if not self.runs:
            problems.append("report takes the folder of a run, or of several, like runs/NAME")
        if not 0 <= self.port < 1 << 16:
            problems.append(f"--port ({self.port}) must be between 0 and 65535")
        if self.live and (self.json or self.fail_if or self.out):
            problems.append("--live serves a page; leave out --json, --fail-if and --out")
        return problems


def main(argv: list[str]) -> int:
    config = read(ReportConfig, argv, "report", positional="runs", usage="RUN [RUN2 ...]")
    if problems := config.problems():
        raise ConfigError(problems)
    if config.live:
        return serve(list(config.runs), config.port, say=say)
    runs = [read_run(path) for path in config.runs]
    measured = [measures_of(run) for run in runs]
    judged = [judge(text, *measured) for text in config.fail_if]
    if config.json:
        say(json.dumps(numbers_of(runs), indent=1, allow_nan=False))
    elif not config.fail_if or config.out:
        out = config.out or config.runs[0] / NAME
        refuse_unwritable({"--out": out})
        write_page(runs, out)
        say(f"written: {out}")
    failed = [one.told for one in judged if one.holds]
    if failed:
        say(f"failed: {'; '.join(failed)}", error=True)
    return 1 if failed else 0


def numbers_of(runs: list[RunData]) -> dict[str, object]:
    """What `--json` prints."""
    found = []
    for run in runs:
        measures = measures_of(run)
        skew = shown("skew", partial(skew_of, run), run.gaps, None)
        advice = shown("advice", partial(advise_run, run, measures), run.gaps, [])
        found.append(
            {
                "name": run.name,
                "directory": str(run.directory),
                "ranks": run.num_ranks,
                "measures": measures,
                "skew": None if skew is None else asdict(skew),
                "advice": [asdict(one) for one in advice],
                "gaps": run.gaps,
            }
        )
    told: dict[str, object] = safe({"runs": found})
    return told
