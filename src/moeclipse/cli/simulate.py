"""`moeclipse simulate`: what a schedule does with a step, before anything runs.

    moeclipse simulate --schedule dualpipev --ranks 8 --microbatches 32 --trace step.json
    moeclipse simulate --ranks 8 --microbatches 32 --compare
    moeclipse simulate --ranks 8 --microbatches 20 --compare 1f1b zb-h1 dualpipe --costs unit
    moeclipse simulate runs/mine --compare
    moeclipse simulate mine.toml --ranks 64 --device h800

Every program is verified first; nothing here needs a device, and nothing but the step of a run needs torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from rich.console import Console

from moeclipse.cli.display import count
from moeclipse.cli.guard import refuse_unwritable
from moeclipse.cli.simulate_view import View, show, show_comparison
from moeclipse.cli.terminal import terminal
from moeclipse.cli.words import read
from moeclipse.core.errors import ConfigError
from moeclipse.core.outside import read_text, told_of
from moeclipse.core.steps import nth_window
from moeclipse.cost.file import load_costs
from moeclipse.cost.model import UNIT
from moeclipse.pipeline.config import PAIRED
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.grid import format_grid
from moeclipse.schedule.legal import SCHEDULES
from moeclipse.schedule.op import Program
from moeclipse.schedule.shape import Recompute
from moeclipse.schedule.templates import Expansion, Overlap
from moeclipse.schedule.torch_csv import format_csv, parse_csv
from moeclipse.sim.compare import Question, ask, ask_all

OF_A_RUN = {
    "layers": "is model.num_layers, shared out by pipeline.layers",
    "stages_per_rank": "follows from pipeline.layers_per_virtual_stage",
    "chunks": "is pipeline.chunks",
    "split": "is no choice: a run cuts whole samples",
}
"""Options that the configuration itself has the word for."""
OF_LAYERS: dict[str, str] = dict.fromkeys(
    ("layers", "overlap", "chunks", "split", "recompute"), "speaks of layers"
)
LONG_GRID = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateConfig:
    """Predict a pipeline schedule: timeline, bubble, hidden and exposed communication, peak memory."""

    run: str = ""
    """The folder of a run, or a configuration: its own step instead of a drawn one."""
    schedule: str | None = None
    """gpipe, 1f1b, 1f1b-pairs, vpp, vpp+1, zb-h1, zb-h2, zb-m, zb-v, dualpipe, pp1, layers or dualpipev."""
    ranks: int | None = None
    """Of the pipeline, 8 unless given; of a run all its ranks."""
    microbatches: int | None = None
    """32 unless given; of a run its optim.accumulate."""
    config: Path | None = None
    """The same as RUN: its stages, dense first layers, head, chunks, recompute, dp, ep and tp."""
    device: str | None = None
    """Of a run: the cluster, as in `moeclipse plan`: a100, h100, h800, h200, b200, gb200, mi300x, cpu, or a
    TOML file. Unless given, h200; for a run that has ended, what it measured."""
    link: str | None = None
    """Of a run: what lies between nodes (infiniband, hdr, ...); unless given, what the cluster has."""
    imbalance: float | None = None
    """Of a run: rows of the busiest rank, in mean ranks; 1.1 unless given."""
    stages_per_rank: int | None = None
    """For schedules that have a choice: vpp and vpp+1, default 2; zb-m, default 1."""
    group_size: int | None = None
    """Of vpp and vpp+1: microbatches that pass a stage before the rank's next one begins."""
    budget: int | None = None
    """Of zb-m: microbatches that a rank may hold; as many as ranks unless given."""
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
    """Refuse schedules that hold more on any rank: activations of a rank's layers for one microbatch; of a
    run GiB, with weights, gradients and all."""
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
    config = read(SimulateConfig, argv, "simulate", positional="run", usage="RUN")
    console = terminal()
    if config.run and config.config is not None:
        raise ConfigError(f"say which run to simulate, once: {config.run}, or --config {config.config}")
    source = Path(config.run) if config.run else config.config
    refuse_idle(config, source)
    refuse_unwritable({"--trace": config.trace, "--csv": config.csv})
    if source is not None:
        _simulate_run(console, config, source)
        return 0
    layers = 4 if config.layers is None else config.layers
    if layers < 1:
        raise ConfigError(f"--layers ({layers}) must be at least 1")
    question = Question(
        ranks=8 if config.ranks is None else config.ranks,
        microbatches=32 if config.microbatches is None else config.microbatches,
        costs=load_costs(config.costs or "deepseek-v3"),
        stages_per_rank=config.stages_per_rank,
        group_size=config.group_size or 0,
        budget=config.budget or 0,
        layers=layers,
        recompute=config.recompute or "off",
        memory_limit=config.memory_limit,
        expansion=Expansion(
            overlap=config.overlap or "pair+self",
            chunks=2 if config.chunks is None else config.chunks,
            split=config.split or "moe",
        ),
    )
    if not question.by_layer:
        _refuse(config, OF_LAYERS, f"costs {question.costs.name} are of whole actions")
    if config.compare is not None:
        compare(console, question, config.compare or SCHEDULES)
    else:
        simulate_one(console, question, config)
    return 0


def refuse_idle(config: SimulateConfig, source: Path | None) -> None:
    """Options that would change nothing are errors: whoever gives one expects that it counts."""
    if config.memory_limit is not None and not 0 < config.memory_limit < math.inf:
        raise ConfigError(f"--memory-limit ({config.memory_limit}) must be a positive number")
    if config.imbalance is not None and not 1 <= config.imbalance < math.inf:
        raise ConfigError(
            f"--imbalance ({config.imbalance}) must be at least 1: the busiest rank has the mean"
        )
    for name, least in (("group_size", config.group_size), ("budget", config.budget)):
        if least is not None and least < 1:
            raise ConfigError(f"--{name.replace('_', '-')} ({least}) must be at least 1")
    if config.compare is not None:
        alone = dict.fromkeys(("trace", "csv", "from_csv", "grid", "width"), "shows one schedule")
        _refuse(config, alone | {"schedule": "names one schedule"}, "leave it out with --compare")
    if config.from_csv is not None:
        names: tuple[str, ...] = ("schedule", "ranks", "microbatches", "stages_per_rank")
        names += ("group_size", "budget")
        _refuse(config, dict.fromkeys(names, "would choose an order"), "--from-csv brings its own")
    if config.overlap == "pair" and source is None and config.schedule not in (None, *PAIRED):
        raise ConfigError(
            f"--overlap pair changes nothing: {config.schedule} has no pairs; take off, pair+self, or one of "
            f"{', '.join(PAIRED)}"
        )
    if config.overlap in ("off", "pair"):
        _refuse(
            config,
            dict.fromkeys(("chunks", "split"), "cuts what overlaps with itself"),
            "--overlap pair+self",
        )
    if source is None:
        names = ("device", "link", "imbalance")
        _refuse(
            config,
            dict.fromkeys(names, "prices the step of a run"),
            "it goes with RUN or --config; here --costs say what ops take",
        )
        return
    of_actions: dict[str, str] = dict.fromkeys(("from_csv", "csv", "grid"), "speaks of whole actions")
    _refuse(config, of_actions, "a run is simulated in layers")
    _refuse(config, OF_A_RUN, "it does not go with the step of a run")
    if config.costs is not None:
        names = ("device", "link")
        _refuse(config, dict.fromkeys(names, "says what ops take"), "so does --costs; leave one of them out")


def _refuse(config: SimulateConfig, names: Mapping[str, str], why: str) -> None:
    for name, what in names.items():
        if getattr(config, name):
            raise ConfigError(f"--{name.replace('_', '-')} {what}; {why}")


def _simulate_run(console: Console, config: SimulateConfig, path: Path) -> None:
    if not path.exists():
        raise ConfigError(f"there is no file {path}; give the folder of a run, or a configuration")
    from moeclipse.cli import simulate_run  # needs torch, which nothing else here does

    of_schedule = (config.overlap, config.group_size, config.budget) != (None, None, None)
    terms = simulate_run.RunTerms(
        num_ranks=config.ranks,
        costs=config.costs,
        device=config.device,
        far=config.link,
        imbalance=config.imbalance,
        changes={
            # Options that only some schedules take are judged with the one that is asked for.
            "pipeline.schedule": ("--schedule", config.schedule if of_schedule else None),
            "optim.accumulate": ("--microbatches", config.microbatches),
            "pipeline.recompute": ("--recompute", config.recompute),
            "pipeline.overlap": ("--overlap", config.overlap),
            "pipeline.group_size": ("--group-size", config.group_size),
            "pipeline.budget": ("--budget", config.budget),
        },
        memory_limit=config.memory_limit,
    )
    run = simulate_run.load_run(path, terms)
    view = View(in_seconds=True)
    if config.compare is not None:
        schedules = config.compare or simulate_run.RUN_SCHEDULES
        _refuse_unknown(schedules, simulate_run.RUN_SCHEDULES)
        with console.status("simulating ..."):
            answers, refused = simulate_run.answers_of(run, schedules)
        show_comparison(console, view, answers, refused, run.title, run.config.pipeline.overlap)
    else:
        with console.status("simulating ..."):
            answer = run.answer(config.schedule or run.config.pipeline.schedule)
        console.print(f"{answer.name}: {run.title}", style="bold")
        show(console, view, answer, width=config.width, trace=config.trace)
    if run.measured is not None:
        console.print(
            f"measured {view.time(run.measured.step)} a step ({nth_window(run.measured.window)}); its sums "
            "of compute and of communication are those that are simulated",
            style="bold",
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
        console.print(format_grid(program, max_slots=LONG_GRID))
        console.print()
    show(console, _view(question), answer, width=config.width, trace=config.trace)
    if config.csv is not None:
        config.csv.write_text(format_csv(program))
        console.print(f"order written to {config.csv}")


def _view(question: Question) -> View:
    """Seconds, but for the units in which schedules are drawn."""
    return View(in_seconds=question.costs is not UNIT)


def _program(question: Question, config: SimulateConfig) -> Program:
    if config.from_csv is None:
        name = config.schedule or "dualpipev"
        orders = {"group_size": question.group_size, "budget": question.budget}
        return build(name, question.ranks, question.microbatches, question.stages_per_rank, **orders)
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
        _view(question),
        answers,
        refused,
        _terms(question),
        question.expansion.overlap,
    )
