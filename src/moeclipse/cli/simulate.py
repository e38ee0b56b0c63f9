"""`moeclipse simulate`: what a schedule does with a step, before anything runs.

    moeclipse simulate --schedule dualpipev --ranks 8 --microbatches 32 --trace step.json
    moeclipse simulate --ranks 8 --microbatches 32 --compare
    moeclipse simulate --ranks 8 --microbatches 20 --compare 1f1b zb-h1 dualpipe --costs unit
    moeclipse simulate --config runs/mine/config.toml --link infiniband

Every program is verified first; nothing here needs a device, and nothing but --config needs torch.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moeclipse.cli.display import count
from moeclipse.cli.guard import refuse_unwritable
from moeclipse.cli.words import read
from moeclipse.core.errors import ConfigError
from moeclipse.core.outside import read_text, told_of
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
OF_A_RUN = {
    "layers": "has those of model.num_layers, shared out by pipeline.layers",
    "stages_per_rank": "has as many as pipeline.layers_per_virtual_stage asks for",
    "chunks": "is cut into pipeline.chunks",
    "split": "cuts whole samples",
}
"""Options that the configuration itself has the word for."""
MAX_RANK_ROWS = 16
LONG_GRID = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateConfig:
    """Predict a pipeline schedule: timeline, bubble, hidden and exposed communication, peak memory."""

    schedule: str | None = None
    """gpipe, 1f1b, 1f1b-pairs, vpp, vpp+1, zb-h1, zb-v, dualpipe, dualpipev (the default), pp1 or layers."""
    ranks: int | None = None
    """Of the pipeline, 8 unless given; with --config all ranks of the run."""
    microbatches: int | None = None
    """32 unless given; with --config those of the run."""
    config: Path | None = None
    """The configuration of a run: its stages, dense first layers, head, chunks, recompute, dp, ep and tp."""
    device: str | None = None
    """With --config: on what the run computes (h100, h200, b200, cpu), h200 unless given."""
    link: str | None = None
    """With --config: what lies between ranks (nvlink4, nvlink5, infiniband, pcie5, loopback), nvlink4 unless
    given."""
    stages_per_rank: int | None = None
    """For schedules that have a choice (vpp, vpp+1); default 2."""
    compare: tuple[str, ...] | None = None
    """Lay these schedules side by side; without names: all of them."""
    costs: str | None = None
    """A TOML file, or a preset: deepseek-v3 (seconds per layer op, the default), unit (F=1, B=2, W=1)."""
    layers: int | None = None
    """MoE layers per rank, where costs speak of layer ops; 4 unless given."""
    overlap: Overlap | None = None
    """off, pair (only paired F and B) or pair+self (warm-up and cool-down too; the default)."""
    chunks: int | None = None
    """Slices of the rows of an action that overlaps with itself; 2 unless given."""
    split: Literal["moe", "layer"] | None = None
    """Cut the routed rows alone (moe, the default), or attention too (by sequences)."""
    recompute: Recompute | None = None
    """Recompute: parts of every layer that are computed again in backward; off unless given."""
    memory_limit: float | None = None
    """Refuse schedules that hold more on any rank: activations of a rank's layers for one microbatch; with
    --config of a layer."""
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
    config = read(SimulateConfig, argv, "simulate")
    console = Console(highlight=False, soft_wrap=True)
    if config.compare is not None:
        _refuse_single_options(config)
    refuse_unwritable({"--trace": config.trace, "--csv": config.csv})
    if config.config is not None:
        _simulate_run(console, config, config.config)
        return 0
    for name in ("device", "link"):
        if getattr(config, name) is not None:
            raise ConfigError(f"--{name} prices the step of a run; it goes with --config (here: --costs)")
    layers = 4 if config.layers is None else config.layers
    if layers < 1:
        raise ConfigError(f"--layers ({layers}) must be at least 1")
    question = Question(
        ranks=8 if config.ranks is None else config.ranks,
        microbatches=32 if config.microbatches is None else config.microbatches,
        costs=load_costs(config.costs or "deepseek-v3"),
        stages_per_rank=config.stages_per_rank,
        layers=layers,
        recompute=config.recompute or "off",
        memory_limit=config.memory_limit,
        expansion=Expansion(
            overlap=config.overlap or "pair+self",
            chunks=2 if config.chunks is None else config.chunks,
            split=config.split or "moe",
        ),
    )
    if config.compare is not None:
        compare(console, question, config.compare or SCHEDULES)
    else:
        simulate_one(console, question, config)
    return 0


def _simulate_run(console: Console, config: SimulateConfig, path: Path) -> None:
    from moeclipse.cli import simulate_run  # needs torch, which nothing else here does

    if config.from_csv is not None or config.csv is not None or config.grid:
        raise ConfigError(
            "--from-csv, --csv and --grid speak of whole actions, --config of layers; leave one of them out"
        )
    for name, instead in OF_A_RUN.items():
        if getattr(config, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} does not go with --config: the step of a run {instead}")
    run = simulate_run.load_run(
        path,
        num_ranks=config.ranks,
        costs=config.costs,
        device_name=config.device or "h200",
        link_name=config.link or "nvlink4",
        changes={
            "optim.accumulate": ("--microbatches", config.microbatches),
            "pipeline.recompute": ("--recompute", config.recompute),
            "pipeline.overlap": ("--overlap", config.overlap),
        },
        memory_limit=config.memory_limit,
    )
    view = View(in_seconds=True, activations="activations of a layer for one microbatch")
    if config.compare is not None:
        schedules = config.compare or simulate_run.RUN_SCHEDULES
        _refuse_unknown(schedules, simulate_run.RUN_SCHEDULES)
        with console.status("simulating ..."):
            answers, refused = simulate_run.answers_of(run, schedules)
        show_comparison(console, view, answers, refused, run.title, run.config.pipeline.overlap)
        return
    with console.status("simulating ..."):
        answer = run.answer(config.schedule or run.config.pipeline.schedule)
    console.print(f"{answer.name}: {run.title}", style="bold")
    show(console, view, answer, config)


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
    console.print(f"{answer.name}: {_terms(question)}", style="bold")
    if config.grid:
        console.print(format_grid(program, max_slots=LONG_GRID), markup=False)
        console.print()
    show(console, View(in_seconds=question.by_layer), answer, config)
    if config.csv is not None:
        config.csv.write_text(format_csv(program))
        console.print(f"order written to {config.csv}")


def show(console: Console, view: View, answer: Answer, config: SimulateConfig) -> None:
    """Timeline, tables and trace of one step."""
    width = config.width or max(40, min(console.width - 10, 160))
    console.print(_coloured(timeline(answer.result, width)))
    console.print()
    _rank_table(console, view, answer)
    _kind_table(console, view, answer)
    _verdict(console, view, answer)
    if config.trace is not None:
        write_perfetto(answer.result, config.trace, seconds_per_unit=1.0 if view.in_seconds else 1e-3)
        console.print(f"trace written to {config.trace}; open it at https://ui.perfetto.dev")


def _program(question: Question, config: SimulateConfig) -> Program:
    if config.from_csv is None:
        name = config.schedule or "dualpipev"
        return build(name, question.ranks, question.microbatches, question.stages_per_rank)
    if not config.from_csv.is_file():
        raise ConfigError(f"--from-csv: there is no file {config.from_csv}")
    try:
        text = read_text(config.from_csv, errors="replace")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--from-csv: {told_of(config.from_csv, error)}") from None
    return parse_csv(text, config.from_csv.name)


def _terms(question: Question) -> str:
    """On what terms schedules are simulated."""
    sizes = f"{count(question.ranks, 'rank')}, {count(question.microbatches, 'microbatch', 'es')}"
    what = f"{sizes}, costs {question.costs.name}"
    if question.by_layer:
        how = question.expansion
        what += f", {count(question.layers, 'layer')} per rank, overlap {how.overlap}"
        what += f", {how.chunks} chunks" if how.chunks > 1 else ""
        what += f", recompute {question.recompute}" if question.recompute != "off" else ""
    return what


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """How times are printed: as seconds, or in the unit of the costs."""

    in_seconds: bool
    activations: str = "activations of a rank's layers for one microbatch"
    """What memory is counted in."""

    def time(self, value: float) -> str:
        if not self.in_seconds:
            return f"{value:.4g}"
        if value >= 1:
            return f"{value:.3f} s"
        return f"{value * 1e3:.1f} ms" if value >= 1e-3 or not value else f"{value * 1e6:.0f} us"


def _rank_table(console: Console, view: View, answer: Answer) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("rank", "compute", "exposed", "straggle", "idle", "bubble", "peak activations"):
        table.add_column(column, justify="right")
    span = answer.summary.makespan or 1.0
    for rank, time in enumerate(answer.summary.ranks[:MAX_RANK_ROWS]):
        values = (time.compute, time.exposed, time.straggle, time.idle)
        table.add_row(
            str(rank),
            *(view.time(value) for value in values),
            f"{time.bubble / span:.1%}",
            f"{answer.summary.peak[rank]:.2f}",
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
        f"peak {max(summary.peak):.2f} {view.activations}",
        style="bold",
    )


def _refuse_unknown(schedules: tuple[str, ...], known: tuple[str, ...]) -> None:
    unknown = [name for name in schedules if name not in known]
    if unknown:
        raise ConfigError(f"unknown schedule {unknown[0]!r}; choose from {', '.join(known)}")


def compare(console: Console, question: Question, schedules: tuple[str, ...]) -> None:
    _refuse_unknown(schedules, SCHEDULES)
    with console.status("simulating ..."):
        answers, refused = ask_all(question, schedules)
    show_comparison(
        console,
        View(in_seconds=question.by_layer),
        answers,
        refused,
        _terms(question),
        question.expansion.overlap,
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
        f"memory: peak on the worst rank, in {view.activations}. "
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
            f"{max(summary.peak):.2f}",
            f"{answer.model_copies}x",
        )
    return table
