"""`moeclipse plan`: which layout fits, and how fast it will be, before a GPU is asked for.

    moeclipse plan --model deepseek-v3 --gpus 2048 --device h800 --tokens-per-step 63M
    moeclipse plan --model path/to/hf-folder --gpus 8 --device h100 --seq-len 8192 --lora.rank 16
    moeclipse plan my.toml --gpus 64 --explain 3 -o best.toml

What is counted and how far it is from published steps: docs/planning.md.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from moeclipse.cli.display import count
from moeclipse.cli.guard import refuse_unwritable
from moeclipse.cli.plan_page import PlanPage
from moeclipse.cli.terminal import terminal
from moeclipse.cli.words import read
from moeclipse.core.config import flag_layer, to_toml
from moeclipse.core.errors import ConfigError
from moeclipse.core.program import command
from moeclipse.cost.cluster import Cluster, cluster_at
from moeclipse.plan.layouts import search
from moeclipse.plan.question import Plan, Request, SearchResult
from moeclipse.plan.step import Step, Terms
from moeclipse.sim.trace import timeline
from moeclipse.train.config import TrainConfig
from moeclipse.train.predict.plan_config import (
    batch_for,
    config_for,
    place_of,
    planned_config,
    rules_of,
    says_batch,
    state_of,
    what_would_fit,
)

SHOWN = 10
COLUMNS = ("", "step", "tokens/s/GPU", "MFU", "exposed", "bubble", "peak GiB", "host GiB")
IN_WORDS = ("bound by", "behind 1 by", "layout")
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}
GIB = 2.0**30
NOTHING_FITS = 1
TABLE_WIDTH = 185
"""Rows are not cut, however narrow the terminal is."""
USUAL_TOKENS, MOST_TOKENS, FEWEST_TOKENS = 64 * 1024, 4 * 1024**2, 8 * 1024
"""Of a step where nobody says: so many a GPU, together at most so many, but no fewer a GPU than this."""
MEDIAN_ERROR = 0.04
"""Of predicted steps (docs/planning.md, `tests/plan/test_published.py`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Find the layout of a model on a cluster: step time, memory, and what bounds it.

    Keys of the configuration are flags, too: --lora.rank 16, --optim.state 8bit, --model.num-layers 24.
    """

    source: str = ""
    """A TOML file, a preset, a model by name, or a Hugging Face folder; or --model."""
    model: str = ""
    """The same; by name: deepseek-v3, kimi-k2, qwen3-30b-a3b, qwen3-235b-a22b, gpt-oss-120b, mixtral-8x22b or
    glm-4.5."""
    gpus: int = 8
    device: str = "h100"
    """a100, h100, h800, h200, b200, gb200, mi300x, cpu, or a TOML file that describes a cluster."""
    tokens_per_step: str = ""
    """As 63M or 500k; unless given, what the file or preset says, or 64k a GPU and at most 4M."""
    seq_len: int = 0
    """Tokens of a sequence; 0: what the file or preset says, or 4,096."""
    dtype: Literal["bf16", "fp8"] = "bf16"
    """Of products; we train in bf16, so fp8 answers a question and writes no file."""
    imbalance: float = 1.1
    """Rows of the busiest rank, in mean ranks: of memory and of seconds."""
    explain: int = 0
    """Show all about the plan of this number."""
    out: Path | None = None
    """Write the best plan (or the explained one) as a configuration that `moeclipse train` takes."""
    page: Path | None = None
    """Write the explained plan (or the best) as a page for a browser, beside the table of all."""
    width: int = 0
    """Columns of the timeline; 0: as wide as the terminal."""


def main(argv: list[str]) -> int:
    own, keys = split_flags(argv)
    options = read(PlanOptions, own, "plan", positional="source", usage="MODEL", short={"-o": "out"})
    flags, problems = flag_layer(TrainConfig, keys)
    if problems:
        raise ConfigError(problems)
    console = terminal()
    check(options)
    refuse_unwritable({"--out": options.out, "--page": options.page})
    cluster = cluster_at(options.device)
    on_cpu = cluster.device.name == "cpu"
    config = config_for(options.source or options.model, flags, on_cpu=on_cpu)
    request = request_of(options, config, cluster)
    sequence = request.terms.sequence
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("simulating layouts", total=None)
        found = search(request, lambda done, total: bar.update(task, completed=done, total=total))
    console.print(title_of(request, found), style="bold")
    if not found.plans:
        for line in refusals(request, config, found):
            console.print(line)
        return NOTHING_FITS
    wide = terminal(soft_wrap=False, width=max(console.width, TABLE_WIDTH))
    wide.print(table_of(request, found.plans[:SHOWN]))
    for line in (*reading(request, found.plans[:SHOWN]), next_steps(options)):
        console.print(line, style="dim")
    if options.explain > len(found.plans[:SHOWN]):
        raise ConfigError(f"--explain {options.explain}: there are plans 1 to {len(found.plans[:SHOWN])}")
    chosen = found.plans[max(options.explain, 1) - 1]
    if options.explain:
        explain(console, request, found.plans[0], chosen, options.width)
    if options.page is not None:
        options.page.write_text(page_of(request, found, max(options.explain, 1)).text(), encoding="utf-8")
        console.print(f"written to {options.page}")
    if options.out is not None:
        options.out.write_text(to_toml(planned_config(config, chosen, request.batch, sequence)))
        console.print(f"written to {options.out}; run it with: {command('train', options.out)}")
    return 0


def split_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(options of this command, keys of the configuration): a key has a section, and takes what follows."""
    own: list[str] = []
    keys: list[str] = []
    of_config = False
    for word in words:
        if word.startswith("-") and not word[1:2].isdigit():
            of_config = word.startswith("--") and "." in word.partition("=")[0]
        (keys if of_config else own).append(word)
    return own, keys


def check(options: PlanOptions) -> None:
    if bool(options.source) == bool(options.model):
        raise ConfigError("say which model to plan, once: as the first word, or with --model")
    if options.gpus < 1:
        raise ConfigError(f"--gpus ({options.gpus}) must be at least 1")
    if options.seq_len < 0:
        raise ConfigError(f"--seq-len ({options.seq_len}) must not be negative")
    if not 1 <= options.imbalance < math.inf:
        raise ConfigError(
            f"--imbalance ({options.imbalance}) must be at least 1: the busiest rank has the mean"
        )
    if options.explain < 0:
        raise ConfigError(f"--explain ({options.explain}) must be the number of a plan")
    if options.out is not None and options.dtype == "fp8":
        raise ConfigError("--out cannot go with --dtype fp8: a run computes in bf16")


def request_of(options: PlanOptions, config: TrainConfig, cluster: Cluster) -> Request:
    import torch  # which mistakes before it do not need

    from moeclipse.train.predict.model_sizes import sizes_of_run

    of_file = says_batch(options.source or options.model)
    sequence = options.seq_len or (config.data.seq_len if of_file else 4096)
    if options.tokens_per_step:
        batch = batch_for(tokens_in(options.tokens_per_step), sequence, options.gpus)
    elif of_file:
        batch = config.data.batch_size
    else:
        batch = batch_for(usual_tokens(options.gpus), sequence, options.gpus)
    if config.memory.weights == "host" and options.gpus > 1:
        raise ConfigError(f"memory.weights = 'host' needs one GPU, not {options.gpus}; leave it out")
    terms = Terms(
        model=sizes_of_run(config),
        cluster=cluster,
        sequence=sequence,
        dtype=options.dtype,
        imbalance=options.imbalance,
        state=state_of(config, torch.float32 if cluster.device.name == "cpu" else torch.bfloat16),
        place=place_of(config, cluster),
    )
    return Request(
        terms=terms,
        num_gpus=options.gpus,
        batch=batch,
        imbalance=options.imbalance,
        most_bytes=1e9 * config.memory.device_gb,
        refuse=rules_of(config, batch, sequence),
    )


def usual_tokens(num_gpus: int) -> float:
    return max(min(USUAL_TOKENS * num_gpus, MOST_TOKENS), FEWEST_TOKENS * num_gpus)


def tokens_in(text: str) -> float:
    """Of 63M, 500k or 4194304."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgb]?)", text.lower().replace(",", "").replace("_", ""))
    if match is None or not float(match[1]):
        raise ConfigError(f"--tokens-per-step {text!r} must be a number like 4194304, 500k or 63M")
    return float(match[1]) * UNITS[match[2]]


def title_of(request: Request, found: SearchResult) -> str:
    terms = request.terms
    name = terms.cluster.device.name
    node = f"{name}, {terms.cluster.gpus_per_node} a node"
    what = f"{count(request.num_gpus, 'rank' if name == 'cpu' else 'GPU')} ({node})"
    batch = f"{request.batch:,} x {terms.sequence:,} tokens a step"
    total = terms.model.parameters
    size = f"{total / 1e9:.1f} B parameters" if total >= 1e9 else f"{total / 1e6:.1f} M parameters"
    dropped = found.dropped.get("memory", 0)
    return f"{size}, {what}, {batch}: {found.considered:,} layouts, {dropped:,} too large"


def reading(request: Request, plans: tuple[Plan, ...]) -> list[str]:
    """How to read the table, and what to do with it."""
    best, device = plans[0], request.terms.cluster.device
    room = f"{best.room / GIB:.1f} of {device.memory / GIB:.1f} GiB may be taken"
    lines = [
        "layout: pp stages, dp copies, ep ranks that share experts, tp ranks that share matrices; schedule; "
        "microbatches x sequences in each; what backward computes again",
        "exposed: communication that nothing hides; bubble: waiting for other stages; end: sums of gradients "
        f"and the update; peak: of the fullest rank, where {room}",
    ]
    if any(plan.host_bytes for plan in plans):
        lines.append(
            "host: part of state, inputs of layers, or experts, that lies in the host's memory, where each "
            f"rank is taken to have {request.terms.place.host_room / GIB:.0f} GiB of it (--memory.host-gb)"
        )
    near = sum(plan.time.seconds <= (1 + MEDIAN_ERROR) * best.time.seconds for plan in plans)
    if near > 1:
        lines.append(
            f"1 to {near} differ by less than predictions are off ({MEDIAN_ERROR:.0%} in the median): take "
            "the plainest of them, or the one with most room"
        )
    return lines


def next_steps(options: PlanOptions) -> str:
    """What can be asked of a plan, as far as it was not."""
    ways = [
        ("--explain N", "one of them in parts", bool(options.explain)),
        ("--page FILE", "a page for a browser", options.page is not None),
        ("-o FILE", "the file for moeclipse train", options.out is not None or options.dtype == "fp8"),
    ]
    return "; ".join(f"{flag}: {what}" for flag, what, asked in ways if not asked)


def refusals(request: Request, config: TrainConfig, found: SearchResult) -> list[str]:
    """Why there is no plan, and what to change."""
    if found.nearest is not None and not set(found.dropped) - {"memory"}:
        return what_would_fit(request, config, found.nearest)
    reasons = [reason for reason in found.dropped if reason != "memory"]
    if reasons:
        return [f"no layout can be run: {reasons[0]}"]
    return [
        f"no layout divides {request.num_gpus} GPUs and {request.batch:,} sequences a step, with "
        f"{request.terms.model.experts.num_experts} experts: give a number of sequences with more divisors "
        "(--tokens-per-step)"
    ]


def table_of(request: Request, plans: tuple[Plan, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    rows, names = rows_of(request, plans), (*COLUMNS, *IN_WORDS)
    filled = [at for at, name in enumerate(names) if name != "host GiB" or any(row[at] for row in rows)]
    for at in filled:
        table.add_column(names[at], justify="left" if names[at] in IN_WORDS else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[at] for at in filled))
    return table


def rows_of(request: Request, plans: tuple[Plan, ...]) -> list[list[str]]:
    found = []
    for number, plan in enumerate(plans, 1):
        time = plan.time
        found.append(
            [
                str(number),
                seconds_text(time.seconds),
                f"{tokens_per_second(request, plan):,.0f}",
                f"{mfu(request, plan):.1%}",
                f"{time.exposed / time.seconds:.1%}",
                f"{time.bubble / time.seconds:.1%}",
                f"{plan.peak / GIB:.1f}",
                f"{plan.host_bytes / GIB:.1f}" if plan.host_bytes else "",
                time.bound,
                "" if number == 1 else loses_by(plans[0], plan),
                plan.layout.title,
            ]
        )
    return found


def page_of(request: Request, found: SearchResult, number: int) -> PlanPage:
    """Of the plan of this number."""
    plans = found.plans[:SHOWN]
    plan = plans[number - 1]
    row, layout = rows_of(request, plans)[number - 1], plan.layout
    step = Step(request.terms, layout, plan.stages)
    shown = min(layout.microbatches, 3 * layout.pp)
    layers = [f"rank {rank}" for rank in range(len(plan.bytes_of))]
    return PlanPage(
        title=f"{title_of(request, found)}. Layers of each stage: {', '.join(map(str, plan.stages))}",
        chosen=layout.title,
        cards=[card for card in zip((*COLUMNS, *IN_WORDS)[1:9], row[1:9], strict=True) if card[1]],
        columns=(*COLUMNS, *IN_WORDS),
        rows=rows_of(request, plans),
        number=number,
        parts=parts_of(request, step),
        stages=[(name, size / GIB) for name, size in zip(layers, plan.bytes_of, strict=True)],
        room=plan.room / GIB,
        shown=f"{count(shown, 'microbatch', 'es')} of {layout.microbatches}",
        simulation=step.simulation(shown),
    )


def parts_of(request: Request, step: Step) -> list[list[str]]:
    """Of a layer: name, and milliseconds of forward, dX and dW."""
    last = request.terms.model.num_layers - 1
    parts = {"attention": step.work.attention(last), **step.parts}
    found = [[name, *(f"{1e3 * each:.3f}" for each in part)] for name, part in parts.items() if sum(part)]
    for name, moved in (("dispatch", step.work.dispatch()), ("combine", step.work.combine())):
        found.append([name, f"{1e3 * moved:.3f}", f"{1e3 * moved:.3f}", ""])
    return found


def tokens_per_second(request: Request, plan: Plan) -> float:
    return request.batch * request.terms.sequence / plan.time.seconds / request.num_gpus


def mfu(request: Request, plan: Plan) -> float:
    """Of the bf16 peak, whatever the type of products."""
    flops = request.terms.model.flops_per_token(request.terms.sequence)
    return tokens_per_second(request, plan) * flops / request.terms.cluster.device.flops


def loses_by(best: Plan, other: Plan) -> str:
    """What a plan takes more of than the best one."""
    names = ("compute", "exposed", "bubble", "end", "copies")
    more = {name: getattr(other.time, name) - getattr(best.time, name) for name in names}
    name = max(more, key=lambda each: more[each])
    return f"{seconds_text(more[name])} {name}"


def seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def explain(console: Console, request: Request, best: Plan, plan: Plan, width: int) -> None:
    layout, time = plan.layout, plan.time
    console.print(f"\n{layout.title}", style="bold")
    console.print(
        f"step {seconds_text(time.seconds)} = compute {seconds_text(time.compute)} + exposed "
        f"{seconds_text(time.exposed)} + bubble {seconds_text(time.bubble)} + end {seconds_text(time.end)}"
        + (f" + copies of state {seconds_text(time.copies)}" if layout.host else "")
    )
    if plan is not best:
        console.print(f"behind the best by {loses_by(best, plan)}")
    step = Step(request.terms, layout, plan.stages)
    table = Table(box=None, pad_edge=False)
    for name in ("a layer, ms", "forward", "dX", "dW"):
        table.add_column(name, justify="left" if name.startswith("a") else "right")
    for row in parts_of(request, step):
        table.add_row(*row)
    console.print(table)
    per_rank = ", ".join(f"{size / GIB:.1f}" for size in plan.bytes_of)
    console.print(f"peak GiB by stage rank: {per_rank}; room {plan.room / GIB:.1f}")
    console.print(f"layers of each stage: {', '.join(map(str, plan.stages))}")
    shown = min(layout.microbatches, 3 * layout.pp)
    console.print(f"\n{count(shown, 'microbatch', 'es')} of {layout.microbatches}:")
    console.print(timeline(step.simulation(shown), width or max(40, min(console.width - 10, 160))))
