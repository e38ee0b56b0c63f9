"""`moeclipse skew`: what uneven gates cost a run or a configuration, and what would help.

    moeclipse skew runs/NAME                          # on the loads that the run has recorded
    moeclipse skew my.toml --ranks 8                  # on made loads, before anything runs
    moeclipse skew qwen3-30b-a3b --ranks 64 --device h200 --workloads "hot rank" burst

Every cure is replayed over the same steps (`balance/cures`). What is counted, and how far to believe it:
docs/skew.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from moeclipse.balance.config import PlacementConfig, usual_slots
from moeclipse.balance.cures import CURES, Bed, CureSeconds, replay
from moeclipse.balance.objective import PlacementCosts, rows_per_pair
from moeclipse.balance.workloads import WORKLOADS, SharedLayer, counts
from moeclipse.cli.display import count
from moeclipse.cli.terminal import terminal
from moeclipse.cli.words import read
from moeclipse.core.errors import ConfigError
from moeclipse.core.program import command
from moeclipse.core.shown import visible
from moeclipse.report.cures import FLAGS, WORTH, Cures, cures_of
from moeclipse.report.gain import short
from moeclipse.report.run import read_run

if TYPE_CHECKING:
    from moeclipse.cost.cluster import Cluster
    from moeclipse.train.config import TrainConfig

TOLD = ("even", "hot experts", "hot rank", "rotating", "burst")
DRAWN = 1 << 14
"""(token, expert) pairs that are drawn of a step, at most: the others are taken to be like them."""
NAMED_TOKENS = 8192
TABLE_WIDTH = 120
STATE_VALUES, MATRICES_PASSED = 3, 3
"""Of AdamW: master weights and two moments. Forward, and both products of backward."""


@dataclass(frozen=True, kw_only=True)
class SkewConfig:
    """What uneven gates cost a run or a configuration, and what would help, how sure that is."""

    source: str = ""
    """A run's folder, a TOML file, a preset, or a model by name."""
    ranks: int | None = None
    """Of the configuration: all that train; left out: as it says, or 8."""
    device: str = "h200"
    """For a configuration: a100, h100, h200, ..., cpu, or a TOML file that describes a cluster."""
    slots: int | None = None
    """Experts that a rank can hold in each layer; left out: as training would choose."""
    tokens: int | None = None
    """Of a rank and step; left out: as the configuration says, or 8,192 for models that are named."""
    steps: int = 48
    """Replayed of each workload, or the newest of those that a run has recorded."""
    layers: int = 4
    """Of a run, that are replayed: the others are taken to be like them."""
    workloads: tuple[str, ...] = ()
    """For a configuration, of even, hot experts, hot rank, spread heat, ragged sources, nothing, rotating and
    burst; left out: five of them."""
    seed: int = 1
    """Of made loads."""

    def problems(self) -> Iterator[str]:
        if not self.source:
            yield "say what to look at: a run's folder, a TOML file, a preset, or a model by name"
        for name, least in (("steps", 2), ("layers", 1), ("ranks", 2), ("slots", 1), ("tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                yield f"--{name} ({value}) must be at least {least}"
        for name in self.workloads:
            if name not in WORKLOADS:
                yield f"--workloads {name!r} is unknown; choose of {', '.join(WORKLOADS)}"


def main(argv: list[str]) -> int:
    options = read(SkewConfig, argv, "skew", positional="source", usage="RUN|CONFIG")
    if problems := list(options.problems()):
        raise ConfigError(problems)
    console = terminal()
    path = Path(options.source)
    if path.is_dir() and ((path / "metrics.jsonl").is_file() or (path / "load.npz").is_file()):
        tell_run(console, options, path)
    else:
        tell_config(console, options)
    return 0


# --- a run -----------------------------------------------------------------------------------------------


def tell_run(console: Console, options: SkewConfig, path: Path) -> None:
    if options.ranks or options.slots or options.tokens:
        raise ConfigError("--ranks, --slots and --tokens are for configurations: a run's own are taken")
    run = read_run(path)
    found = cures_of(run, options.steps, options.layers)
    if found is None:
        raise ConfigError(
            f"{path}: what its loads or its exchange cost is not known (that needs ranks that share experts, "
            "load.npz with single steps, and prices in choices.json); give its configuration instead: "
            f"{command('skew', path / 'config.toml')}"
        )
    now, of = found.layers
    console.print(
        f"{visible(run.name)}: {count(found.steps, 'recorded step')}, {now} of {count(of, 'layer')} with "
        f"experts, {short(found.step_ms)} ms a step",
        style="bold",
    )
    console.print(
        f"uneven gates cost {short(found.cost_ms)} ms of it "
        f"({100 * found.cost_ms / found.step_ms:.0f} %) where experts stay"
    )
    wide(console).print(run_table(found))
    console.print(found.advice())
    console.print(
        f"how sure: replayed on the run's own loads, not run; {found.prices}; the range is that of quarters "
        "of the steps"
    )


def wide(console: Console) -> Console:
    """Rows are not cut, however narrow the terminal is."""
    return terminal(soft_wrap=False, width=max(console.width, TABLE_WIDTH))


def run_table(found: Cures) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("of an even gate", "wins of a step", "range", "as flags"):
        table.add_column(name, justify="left" if name == "as flags" else "right", no_wrap=True)
    for cure in found.found:
        share = f"{100 * cure.share:+.1f} %" if cure.way != "static" else ""
        span = f"{100 * cure.low:+.1f} to {100 * cure.high:+.1f} %" if cure.way != "static" else ""
        name = f"{cure.way} (this run)" if cure.way == found.now else cure.way
        table.add_row(name, f"{cure.throughput:.2f}", share, span, FLAGS[cure.way])
    return table


# --- a configuration -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Looked:
    """One layer of a configuration on its ranks."""

    title: str
    shape: SharedLayer
    bed: Bed
    share: float
    """Of a token's products, what experts have."""


def tell_config(console: Console, options: SkewConfig) -> None:
    looked, workloads = look_at(options), options.workloads or TOLD
    console.print(looked.title, style="bold")
    table = Table(box=None, pad_edge=False)
    table.add_column("gates", no_wrap=True)
    for name in ("fullest", *CURES, "best", "step"):
        table.add_column(name, justify="left" if name == "best" else "right", no_wrap=True)
    gains: dict[str, list[float]] = {way: [] for way in CURES}
    costs = []
    for workload in workloads:
        steps = (counts(workload, options.seed, step, looked.shape) for step in range(options.steps))
        found = replay(steps, looked.bed)
        spared = {way: saved_of_step(found, way, looked.share) for way in CURES}
        costs.append(lost_of_step(found, looked.share))
        for way, each in spared.items():
            gains[way].append(each)
        best = max(CURES, key=lambda way: spared[way])
        fullest = 1 / max(float(np.mean(found.balance["static"])), 1e-9)
        cells = [f"{found.throughput(way):.2f}" for way in CURES]
        name, won = ("-", "") if spared[best] < WORTH else (best, f"-{100 * spared[best]:.0f} %")
        table.add_row(workload, f"{fullest:.2f}", *cells, name, won)
    wide(console).print(table)
    console.print(
        "throughput of a layer over that of a gate which is forced to be even, for the same tokens; fullest: "
        "rows of the fullest rank over the mean; step: what the best saves of a step, by the experts' "
        f"{100 * looked.share:.0f} % of its products"
    )
    console.print(advice_of_config(workloads, costs, gains))
    console.print(
        "how sure: loads are made, prices are those of the device as written down, and wires do not hide "
        "behind products here; the order of cures is surer than their size. A run's own loads say more: "
        "moeclipse skew runs/NAME"
    )


def lost_of_step(found: CureSeconds, share: float) -> float:
    """What an uneven gate makes a step take longer, where experts stay."""
    return share * (1 / found.throughput("static") - 1)


def saved_of_step(found: CureSeconds, way: str, share: float) -> float:
    """Part of a step with experts that stay, where the rest of it takes what products say."""
    static = float(np.sum(found.seconds["static"]))
    slower = 1 / found.throughput("static")
    now = share * slower / (share * slower + 1 - share)
    return now * (1 - float(np.sum(found.seconds[way])) / static)


def advice_of_config(workloads: tuple[str, ...], costs: list[float], gains: dict[str, list[float]]) -> str:
    mean = {way: float(np.mean(each)) for way, each in gains.items()}
    best = max(mean.values())
    worst = int(np.argmax(costs))
    cost = f"uneven gates make a step up to {100 * costs[worst]:.0f} % longer ({workloads[worst]})"
    if best < WORTH:
        return f"{cost}; nothing of it wins 1 % of a step"
    way = next(way for way in CURES if mean[way] >= 0.9 * best)
    return f"{cost}; most helps {way} ({FLAGS[way]}): {100 * mean[way]:.0f} % of a step over these gates"


def look_at(options: SkewConfig) -> Looked:
    # Torch takes a second to load, which a look at a run need not wait for.
    from moeclipse.cost.cluster import cluster_at
    from moeclipse.train.predict.model_sizes import sizes_of_run
    from moeclipse.train.predict.plan_config import config_for
    from moeclipse.train.predict.shapes import SHAPES

    config = config_for(options.source)
    machine = cluster_at(options.device)
    dp, sharing = axes_of(config, options.ranks)
    sizes = sizes_of_run(config)
    if not any(sizes.moe_layers):
        raise ConfigError("no layer of this model has experts: gates cost it nothing")
    experts, top_k = config.moe.num_experts, config.gate.top_k
    usual = (
        NAMED_TOKENS
        if options.source in SHAPES
        else config.data.batch_size * config.data.seq_len / dp / sharing
    )
    tokens = options.tokens or usual
    drawn = int(min(max(DRAWN // (sharing * max(experts // 32, 1)), 32), max(tokens, 1)))
    slots = options.slots or slots_of(config, experts, sharing)
    costs = costs_on(machine, sizes.expert_parameters, sizes.d_model, tokens / drawn)
    saved = rows_per_pair(top_k, sharing)
    bed = Bed(
        costs=replace(costs, row_bytes=saved * costs.row_bytes),
        slots=slots,
        node_P=tuple(rank // machine.gpus_per_node for rank in range(sharing)),
        calls=config.optim.accumulate,
        config=replace(PlacementConfig(planner="incremental"), lifetime=config.placement.lifetime),
    )
    layers = sum(sizes.moe_layers)
    products = 2 * MATRICES_PASSED * top_k * sizes.expert_parameters * layers
    title = (
        f"{options.source}: {count(layers, 'layer')} of {experts} experts, top-{top_k}, on "
        f"{count(sharing, 'rank')} that share them ({machine.device.name}), {slots} slots each, "
        f"{tokens:,.0f} tokens a rank and step"
    )
    share = products / sizes.flops_per_token(config.data.seq_len)
    shape = SharedLayer(num_experts=experts, top_k=top_k, num_ranks=sharing, tokens=drawn)
    return Looked(title=title, shape=shape, bed=bed, share=min(share, 1.0))


def axes_of(config: TrainConfig, ranks: int | None) -> tuple[int, int]:
    """(groups of ranks with the same experts, ranks that share the experts of a layer)."""
    parallel = config.parallel
    known = isinstance(parallel.dp, int) and isinstance(parallel.ep, int)
    if known and ranks is None:
        dp, ep = parallel.dp, parallel.ep
    else:
        try:
            dp, ep = parallel.sizes(ranks or 8, config.moe.num_experts, config.moe.expert_tp)
        except ValueError as error:
            raise ConfigError(f"--ranks {ranks or 8}: {error}") from None
    sharing = int(ep) if config.moe.expert_tp == "sharded" else int(ep) * parallel.tp
    if sharing < 2:
        raise ConfigError(
            "one rank holds all experts of a layer (parallel.ep 1): none waits for another; give more --ranks"
        )
    return int(dp), sharing


def slots_of(config: TrainConfig, experts: int, ranks: int) -> int:
    given = config.placement.slots_per_rank
    return given if isinstance(given, int) else usual_slots(experts, ranks)


def costs_on(machine: Cluster, parameters: float, d_model: int, more: float) -> PlacementCosts:
    """bf16 weights (fp32 on CPU), fp32 gradients and AdamW; `more`: rows for each that is drawn."""
    weight = 4 if machine.device.name == "cpu" else 2
    near, far = machine.near, machine.far
    return PlacementCosts(
        row_seconds=more
        * MATRICES_PASSED
        * 2
        * parameters
        / (machine.device.flops * machine.device.efficiency),
        row_bytes=more * weight * d_model,
        weight_bytes=weight * parameters,
        gradient_bytes=4 * parameters,
        state_bytes=4 * STATE_VALUES * parameters,
        near_bandwidth=near.bandwidth * near.efficiency,
        far_bandwidth=far.bandwidth * far.efficiency,
        card_per_rank=True,
    )
