"""`moeclipse simulate`: what a schedule does with a step, before anything runs.

    moeclipse simulate --schedule dualpipev --ranks 8 --microbatches 32 --trace step.json
    moeclipse simulate --ranks 8 --microbatches 32 --compare
    moeclipse simulate --ranks 8 --microbatches 20 --compare 1f1b zb-h1 dualpipe --costs unit

Every program is verified first; nothing here needs torch or a device.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moeclipse.cli.display import count
from moeclipse.core.errors import ConfigError
from moeclipse.cost.file import load_costs
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.grid import format_grid
from moeclipse.schedule.legal import SCHEDULES
from moeclipse.schedule.op import Program
from moeclipse.schedule.shape import Recompute
from moeclipse.schedule.templates import Expansion, Overlap
from moeclipse.schedule.torch_csv import format_csv, parse_csv
from moeclipse.sim.compare import Answer, Question, advise, ask, ask_all
from moeclipse.sim.trace import timeline, write_perfetto

STYLES = {"F": "blue", "B": "green", "I": "cyan", "W": "yellow", "#": "magenta", "R": "red", "!": "bold red"}
MAX_RANK_ROWS = 16
LONG_GRID = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateConfig:
    """Predict a pipeline schedule: timeline, bubble, hidden and exposed communication, peak memory."""

    schedule: str = "dualpipev"
    """gpipe, 1f1b, 1f1b-pairs, vpp, vpp+1, zb-h1, zb-v, dualpipe, dualpipev or pp1."""
    ranks: int = 8
    microbatches: int = 32
    stages_per_rank: int | None = None
    """For schedules that have a choice (vpp, vpp+1); default 2."""
    compare: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="[SCHEDULE ...]")] = None
    """Lay these schedules side by side; without names: all of them."""
    costs: str = "deepseek-v3"
    """A TOML file, or a preset: deepseek-v3 (seconds per layer op), unit (F=1, B=2, W=1)."""
    layers: int = 4
    """MoE layers per rank, where costs speak of layer ops."""
    overlap: Overlap = "pair+self"
    """off, pair (only paired F and B) or pair+self (warm-up and cool-down too)."""
    chunks: int = 2
    """Slices of the rows of an action that overlaps with itself."""
    split: Literal["moe", "layer"] = "moe"
    """Cut the routed rows alone, or attention too (by sequences)."""
    recompute: Recompute = "off"
    """Parts of every layer that run again in backward."""
    memory_limit: float | None = None
    """Refuse schedules that hold more activations (of a rank's layers for one microbatch) on any rank."""
    trace: Path | None = None
    """Write a trace for ui.perfetto.dev."""
    grid: bool = False
    """Print which action runs in which slot."""
    csv: Path | None = None
    """Write the order in the CSV form of torch.distributed.pipelining."""
    from_csv: Path | None = None
    """Read the order from such a file instead of generating it."""
    width: int = 0
    """Columns of the timeline; 0: as wide as the terminal."""


def main(argv: list[str]) -> int:
    config = tyro.cli(SimulateConfig, args=argv, prog="moeclipse simulate")
    console = Console(highlight=False, soft_wrap=True)
    question = Question(
        ranks=config.ranks,
        microbatches=config.microbatches,
        costs=load_costs(config.costs),
        stages_per_rank=config.stages_per_rank,
        layers=config.layers,
        recompute=config.recompute,
        memory_limit=config.memory_limit,
        expansion=Expansion(overlap=config.overlap, chunks=config.chunks, split=config.split),
    )
    if config.layers < 1:
        raise ConfigError(f"--layers ({config.layers}) must be at least 1")
    if config.compare is not None:
        _refuse_single_options(config)
        compare(console, question, config.compare or SCHEDULES)
    else:
        simulate_one(console, question, config)
    return 0


def _refuse_single_options(config: SimulateConfig) -> None:
    given = [name for name in ("trace", "csv", "from_csv", "grid") if getattr(config, name)]
    if given:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ConfigError(
            f"{flags} shows one schedule; leave it out with --compare, or use --schedule instead"
        )


def simulate_one(console: Console, question: Question, config: SimulateConfig) -> None:
    program = _program(question, config)
    if config.from_csv is not None:
        shape = program.pipeline()
        question = dataclasses.replace(
            question, ranks=shape.placement.num_ranks, microbatches=shape.num_microbatches
        )
    with console.status("simulating ..."):
        answer = ask(question, program.name, program)
    _headline(console, question, answer.name)
    if config.grid:
        console.print(format_grid(program, max_slots=LONG_GRID), markup=False)
        console.print()
    width = config.width or max(40, min(console.width - 10, 160))
    console.print(_coloured(timeline(answer.result, width)))
    console.print()
    _rank_table(console, question, answer)
    _kind_table(console, question, answer)
    _verdict(console, question, answer)
    if config.csv is not None:
        config.csv.write_text(format_csv(program))
        console.print(f"order written to {config.csv}")
    if config.trace is not None:
        write_perfetto(answer.result, config.trace, seconds_per_unit=1.0 if question.by_layer else 1e-3)
        console.print(f"trace written to {config.trace}; open it at https://ui.perfetto.dev")


def _program(question: Question, config: SimulateConfig) -> Program:
    if config.from_csv is None:
        return build(config.schedule, question.ranks, question.microbatches, question.stages_per_rank)
    if not config.from_csv.is_file():
        raise ConfigError(f"--from-csv: there is no file {config.from_csv}")
    return parse_csv(config.from_csv.read_text(), config.from_csv.name)


def _headline(console: Console, question: Question, name: str) -> None:
    sizes = f"{count(question.ranks, 'rank')}, {count(question.microbatches, 'microbatch', 'es')}"
    what = f"{name}: {sizes}, costs {question.costs.name}"
    if question.by_layer:
        how = question.expansion
        what += f", {count(question.layers, 'layer')} per rank, overlap {how.overlap}"
        what += f", {how.chunks} chunks" if how.chunks > 1 else ""
        what += f", recompute {question.recompute}" if question.recompute != "off" else ""
    console.print(what, style="bold")


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


def _time(question: Question, value: float) -> str:
    if not question.by_layer:
        return f"{value:.4g}"
    return f"{value:.3f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def _rank_table(console: Console, question: Question, answer: Answer) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("rank", "compute", "exposed", "straggle", "idle", "bubble", "peak activations"):
        table.add_column(column, justify="right")
    span = answer.summary.makespan or 1.0
    for rank, time in enumerate(answer.summary.ranks[:MAX_RANK_ROWS]):
        values = (time.compute, time.exposed, time.straggle, time.idle)
        table.add_row(
            str(rank),
            *(_time(question, value) for value in values),
            f"{time.bubble / span:.1%}",
            f"{answer.summary.peak[rank]:.2f}",
        )
    console.print(table)
    left = len(answer.summary.ranks) - MAX_RANK_ROWS
    if left > 0:
        console.print(f"... and {left} more ranks", style="dim")


def _kind_table(console: Console, question: Question, answer: Answer) -> None:
    kinds = {kind: time for kind, time in answer.summary.kinds.items() if time.total > 0}
    if not kinds:
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("communication (all ranks)")
    for column in ("total", "hidden", "exposed", ""):
        table.add_column(column, justify="right")
    for kind, time in sorted(kinds.items(), key=lambda item: item[0].name):
        values = (time.total, time.hidden, time.exposed)
        table.add_row(
            kind.name, *(_time(question, v) for v in values), f"{time.hidden / time.total:.0%} hidden"
        )
    console.print()
    console.print(table)


def _verdict(console: Console, question: Question, answer: Answer) -> None:
    summary = answer.summary
    busiest = max(rank.compute for rank in summary.ranks)
    console.print(
        f"\nmakespan {_time(question, summary.makespan)}: {summary.makespan / busiest:.3f} x the compute "
        f"of the busiest rank; worst bubble {_time(question, summary.bubble)}; "
        f"peak {max(summary.peak):.2f} activations of a rank's layers for one microbatch",
        style="bold",
    )


def compare(console: Console, question: Question, schedules: tuple[str, ...]) -> None:
    unknown = [name for name in schedules if name not in SCHEDULES]
    if unknown:
        raise ConfigError(f"unknown schedule {unknown[0]!r}; choose from {', '.join(SCHEDULES)}")
    _headline(console, question, f"{len(schedules)} schedules")
    with console.status("simulating ..."):
        answers, refused = ask_all(question, schedules)
    if answers:
        console.print(_comparison(question, answers))
        for line in advise(answers):
            console.print(line, style="bold")
    for name, reason in refused.items():
        for prefix in (f"{name} {question.expansion.overlap}: ", f"{name}: ", f"{name} "):
            reason = reason.removeprefix(prefix)
        console.print(f"{name} left out: {reason}", style="dim")


def _comparison(question: Question, answers: list[Answer]) -> Table:
    table = Table(
        box=None,
        pad_edge=False,
        caption="bubble, exposed, idle: mean over ranks. hidden: dispatch and combine under compute. "
        "memory: peak on the worst rank, in activations of a rank's layers for one microbatch. "
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
            _time(question, summary.makespan),
            f"{sum(r.bubble for r in summary.ranks) / ranks / summary.makespan:.1%}",
            _time(question, sum(r.exposed for r in summary.ranks) / ranks),
            _time(question, sum(r.idle for r in summary.ranks) / ranks),
            "-" if hidden is None else f"{hidden:.0%}",
            f"{max(summary.peak):.2f}",
            f"{answer.model_copies}x",
        )
    return table
