"""`moeclipse place`: plan who holds which expert from the loads of a run, without a device.

    moeclipse place runs/NAME --plot
    moeclipse place runs/NAME/load.npz --ranks 16 --slots 3
    moeclipse place runs/NAME/load.npz --ranks 16 --slots 3 --nodes 2 --current plan.json --out next.json

Planners see the loads up to the step before the last one in the file; balance is measured on the last one,
with the split that training uses. What is not given comes from the run: its shape, and the costs that it has
measured. Nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moeclipse.balance.heatmap import Panel, draw, write_png
from moeclipse.balance.load import Load
from moeclipse.balance.objective import nodes_of
from moeclipse.balance.placement import Placement
from moeclipse.balance.planner import PLANNERS, PlanConfig
from moeclipse.balance.replicate import slots_for
from moeclipse.balance.split import ReplicaTable, split_rows
from moeclipse.cli.display import count
from moeclipse.cli.guard import refuse_unwritable
from moeclipse.cli.heatmap import heat_lines
from moeclipse.cli.place_plans import LayerLoads, Verdict, fitting, judge, planned
from moeclipse.cli.place_run import RunFacts
from moeclipse.cli.terminal import terminal
from moeclipse.cli.words import read
from moeclipse.core.errors import ConfigError
from moeclipse.core.outside import read_json, told_of
from moeclipse.core.steps import nth

BESIDE = "beside the loads"
TOLD_LAYERS = TOLD_RANKS = 3
COMPARED = ("greedy", "incremental", "wrap_fill", "exact")


@dataclass(frozen=True, kw_only=True)
class PlaceConfig:
    """Plan placements from the loads of a run: balance, moves and cross-node rows of every planner."""

    load: Path
    """A run's folder, or loads that training wrote: runs/NAME/load.npz."""
    ranks: int | None = None
    """Ranks that share the experts of a layer; left out: as many as wrote the loads."""
    slots: int | None = None
    """Experts that a rank can hold in each layer; left out: an even share and one more."""
    nodes: int | None = None
    """Nodes that the ranks stand on, in equal runs; left out: the hosts of the run, or one."""
    current: Path | None = None
    """The placement that holds now (JSON); without it: experts in order, one replica each."""
    out: Path | None = None
    """Write the plan of --planner here, as JSON that --current and training read."""
    plot: Path | None = None
    """Write a heat map of loads and ranks here, as PNG; without a name: beside the loads."""
    planner: str = "incremental"
    """Whose plan is written: auto, incremental, wrap_fill, exact, greedy or random."""
    layer: int | None = None
    """Only this layer, by its number in the model."""
    seconds: float = 6.0
    """For comparing planners: layers that would take longer are left out, unless a plan is written; 0: no
    layer is left out."""
    time_limit: float = 2.0
    """Seconds for the exact solver, over all layers; 0 leaves it out."""
    max_moved: float = 0.05
    """Part of the slots that one incremental plan may fill anew."""
    every: int | None = None
    """Steps until the next plan, what a migration is shared among; left out: the run's own, or 50."""
    d_model: int | None = None
    d_ff: int | None = None
    """Shape of an expert, for seconds; left out: the run's own, or 2048 x 1408."""
    device: str | None = None
    link: str | None = None
    """Between nodes. Left out: what the run has measured, or an H200 and InfiniBand."""


@dataclass(frozen=True, kw_only=True)
class FullConfig(PlaceConfig):
    """With all that was left out."""

    ranks: int = 0
    slots: int = 0
    nodes: int = 0
    every: int = 0


def options_of(words: list[str]) -> PlaceConfig:
    named = "RUN|LOAD.npz"
    config = read(PlaceConfig, words, "place", positional="load", usage=named, bare={"plot": BESIDE})
    negative = [name for name in ("seconds", "time_limit") if getattr(config, name) < 0]
    if negative:
        told = {name.replace("_", "-"): getattr(config, name) for name in negative}
        raise ConfigError([f"--{name} ({value:g}) must not be negative" for name, value in told.items()])
    return config


def main(argv: list[str]) -> int:
    given = options_of(argv)
    console = terminal()
    facts = RunFacts.read(given.load)
    load = Load.read(facts.load)
    config = fill(given, load, facts)
    refuse_unwritable({"--out": config.out, "--plot": config.plot})
    layers = layers_of(config, load, facts.layer_numbers(load.num_layers), facts.copies(config.ranks))
    node_P = nodes_of(config.ranks, config.nodes)
    hardware = (config.d_model, config.d_ff, config.device, config.link)
    costs, told = facts.costs(*hardware, every=config.every, ranks=config.ranks, nodes=config.nodes)
    each = max(config.time_limit, 1e-3) / len(layers)
    wanted = PlanConfig(planner=config.planner, max_moved=config.max_moved, time_limit=each)
    _headline(console, config, load, layers)
    console.print(told)
    _draw_loads(console, layers)
    names = list(COMPARED) if config.planner in COMPARED else [config.planner, *COMPARED]
    names = [name for name in names if name != "exact" or config.time_limit]
    slots_P = (config.slots,) * config.ranks

    def planned_by(layers: list[LayerLoads], quiet: bool = False) -> list[Verdict]:
        on = terminal(quiet=True) if quiet else console
        given = [(on, name, wanted, slots_P, name == config.planner, layers, costs, node_P) for name in names]
        return [verdict for one in given if (verdict := planned(*one)) is not None]

    whole = config.out is not None or config.plot is not None  # what is written has all layers
    seconds = 0.0 if whole else config.seconds
    fit = fitting(layers, seconds, lambda worst: planned_by(worst, quiet=True))
    if len(fit) < len(layers):
        console.print(
            f"compared on {len(fit)} of {len(layers)} layers, the least even ones: more would take longer "
            f"than {config.seconds:g} s (--seconds 0: all)"
        )
    layers = fit
    verdicts = [judge("static", [layer.current for layer in layers], layers, costs, node_P, 0.0)]
    verdicts += planned_by(layers)
    console.print(_comparison(verdicts, config.nodes > 1))
    chosen = next(verdict for verdict in verdicts if verdict.name == config.planner)
    for line in gains(layers, verdicts[0], chosen):
        console.print(line)
    _draw_ranks(console, layers, verdicts[0], chosen, node_P)
    if config.out is not None:
        config.out.write_text(plan_text(chosen.placements))
        console.print(f"plan of {chosen.name} written to {config.out}")
    if config.plot is not None:
        write_png(config.plot, heat_map(layers, verdicts[0], chosen, node_P))
        console.print(f"heat map written to {config.plot}")
    return 0


def gains(layers: list[LayerLoads], static: Verdict, chosen: Verdict) -> list[str]:
    """Which layers gain most, and the whole: what holds now against the plan."""
    before, after = (sum(s.total for s in verdict.scores) for verdict in (static, chosen))
    name = chosen.name.replace("_", "-")
    if after >= before:
        return [f"{name} predicts no gain: experts can stay where they are"]
    found = [
        f"ranks at {_mean(static, 'balance'):.2f}; {name} predicts experts and their exchange "
        f"{before / after:.1f} x faster"
    ]
    rows = list(zip(layers, static.scores, chosen.scores, strict=True))
    rows.sort(key=lambda row: row[2].total - row[1].total)
    gaining = [row for row in rows if row[2].total < row[1].total]
    for layer, old, new in gaining[:TOLD_LAYERS] if len(rows) > 1 else []:
        found.append(
            f"  layer {layer.number}: balance {old.balance:.2f} to {new.balance:.2f}, "
            f"{1e3 * old.total:.3f} to {1e3 * new.total:.3f} ms"
        )
    if len(gaining) > TOLD_LAYERS:
        found.append(f"  and {count(len(gaining) - TOLD_LAYERS, 'more layer')}")
    return found


def fill(config: PlaceConfig, load: Load, facts: RunFacts) -> FullConfig:
    """What was not given, from the run and its loads."""
    ranks = facts.ranks if config.ranks is None else config.ranks
    ranks = min(load.average_LPE.shape[1], load.num_experts) if ranks is None else ranks
    share = -(-load.num_experts // max(ranks, 1))
    given = {field.name: getattr(config, field.name) for field in fields(config)}
    given["ranks"] = ranks
    slots = config.slots if config.slots is not None or config.ranks is not None else facts.slots
    given["slots"] = min(share + 1, load.num_experts) if slots is None else slots
    hosts = len(set(facts.hosts)) if ranks == facts.ranks else 1
    given["nodes"] = (hosts or 1) if config.nodes is None else config.nodes
    given["every"] = config.every or facts.size("every")
    given["plot"] = facts.load.with_suffix(".png") if config.plot == Path(BESIDE) else config.plot
    return FullConfig(**given)


def layers_of(
    config: FullConfig, load: Load, names: list[int] | None = None, copies: int = 1
) -> list[LayerLoads]:
    """`names`: the number in the model of each layer with experts; `copies`: groups that share the rows."""
    if config.ranks < 1 or config.slots < 1:
        raise ConfigError(f"--ranks ({config.ranks}) and --slots ({config.slots}) must be at least 1")
    if config.planner not in PLANNERS:
        raise ConfigError(f"--planner {config.planner!r} is unknown; choose one of {', '.join(PLANNERS)}")
    slots_for(load.num_experts, config.ranks, config.slots)
    names = list(range(load.num_layers)) if names is None else names
    if config.layer is not None and config.layer not in names:
        known = ", ".join(map(str, names))
        raise ConfigError(f"--layer ({config.layer}) has no experts; choose one of {known}")
    numbers = range(load.num_layers) if config.layer is None else [names.index(config.layer)]
    current = _current(config, load, len(numbers))
    past = load.before_last()
    found = []
    for number, placement in zip(numbers, current, strict=True):
        seen_PE = past.counts(number, config.ranks) / copies
        measured = load.last_step(number, config.ranks)
        next_PE = np.rint(seen_PE).astype(np.int64) if measured is None else measured // copies
        if not seen_PE.any() or not next_PE.any():
            raise ConfigError(
                f"layer {names[number]} of {config.load} has no rows: there is nothing to plan for it"
            )
        found.append(LayerLoads(number=names[number], seen_PE=seen_PE, next_PE=next_PE, current=placement))
    return found


def _current(config: FullConfig, load: Load, count: int) -> list[Placement]:
    if config.current is None:
        return [Placement.contiguous(load.num_experts, config.ranks)] * count
    expected = {"num_experts": load.num_experts, "num_ranks": config.ranks, "max_slots": config.slots}
    if not config.current.is_file():
        raise ConfigError(f"--current: there is no file {config.current}")
    try:
        value = read_json(config.current)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--current: {told_of(config.current, error)}") from None
    values = value["layers"] if isinstance(value, dict) and "layers" in value else [value] * count
    if not isinstance(values, list) or len(values) != count:
        number = len(values) if isinstance(values, list) else "no list of"
        raise ConfigError(
            f"--current: {config.current} holds {number} placements, but {count} layers are planned; "
            "give one for each of them, or a single one for all"
        )
    return [Placement.parse(entry, **expected) for entry in values]


def plan_text(placements: list[Placement]) -> str:
    if len(placements) == 1:
        return placements[0].to_json()
    body = ",\n".join(placement.to_json().rstrip() for placement in placements)
    return f'{{"layers": [\n{body}\n]}}\n'


def _headline(console: Console, config: FullConfig, load: Load, layers: list[LayerLoads]) -> None:
    nodes = f" on {config.nodes} nodes" if config.nodes > 1 else ""
    which = f"layer {layers[0].number}" if len(layers) == 1 else f"{len(layers)} layers"
    console.print(
        f"{which}, {load.num_experts} experts, {count(config.ranks, 'rank')}{nodes} "
        f"with {config.slots} slots each",
        style="bold",
    )
    if len(load.steps_N) > 1:
        console.print(
            f"planned from the loads up to step {nth(load.steps_N[-2])}; "
            f"measured on step {nth(load.steps_N[-1])}, which no planner has seen"
        )
    else:
        console.print("the file holds no single steps: planned from and measured on the same average")


def _draw_loads(console: Console, layers: list[LayerLoads]) -> None:
    """Layers by experts as shades: what is above, at and below the mean."""
    console.print("\nload of each expert (left to right), relative to the layer's mean", style="dim")
    loads = np.array([layer.seen_PE.sum(0) for layer in layers])
    numbers = [layer.number for layer in layers]
    for line in heat_lines(loads, console.width, not console.options.ascii_only, numbers):
        console.print(line)
    console.print()


def _comparison(verdicts: list[Verdict], several_nodes: bool) -> Table:
    caption = (
        "balance: mean over fullest rank, 1 is perfect. moves: experts sent, per layer (with their state). "
    )
    caption += "ms/step: predicted for one layer: fullest rank, cross-node rows, replicas, moves."
    table = Table(box=None, pad_edge=False, caption=caption, caption_justify="left")
    table.add_column("planner", no_wrap=True)
    columns = ["balance", "worst", "moves", "sent", "cross-node", "ms/step", "plan ms"]
    for column in columns if several_nodes else [name for name in columns if name != "cross-node"]:
        table.add_column(column, justify="right", no_wrap=True)
    best = min(_mean(verdict, "total") for verdict in verdicts)
    for verdict in verdicts:
        cells = [
            f"{_mean(verdict, 'balance'):.3f}",
            f"{min(s.balance for s in verdict.scores):.3f}",
            f"{_mean(verdict, 'moves'):.1f} ({_mean(verdict, 'states'):.1f})",
            f"{_mean(verdict, 'sent_share'):.0%}",
            f"{_mean(verdict, 'cross_share'):.1%}",
            f"{1e3 * _mean(verdict, 'total'):.3f}",
            f"{verdict.milliseconds:.1f}" if verdict.milliseconds else "-",
        ]
        if not several_nodes:
            del cells[4]
        table.add_row(
            verdict.name.replace("_", "-"), *cells, style="bold" if _mean(verdict, "total") == best else ""
        )
    return table


def _mean(verdict: Verdict, what: str) -> float:
    return float(np.mean([getattr(s, what) for s in verdict.scores]))


def _rank_loads(layers: list[LayerLoads], verdict: Verdict, node_P: tuple[int, ...]) -> np.ndarray:
    """Rows of each rank relative to the layer's mean: [layers, P]."""
    loads = []
    for layer, placement in zip(layers, verdict.placements, strict=True):
        table = ReplicaTable.of(placement, layer.seen_PE.sum(0))
        load_P = split_rows(layer.next_PE, table, node_P).load_P
        loads.append(load_P / max(load_P.mean(), 1e-300))
    return np.array(loads)


def _draw_ranks(
    console: Console, layers: list[LayerLoads], static: Verdict, chosen: Verdict, node_P: tuple[int, ...]
) -> None:
    """The ranks of the worst layer, before and after, each by its number."""
    worst = int(np.argmin([s.balance for s in static.scores]))
    mark = "#" if console.options.ascii_only else "█"
    room = max(min(console.width - 30, 60), 10)
    console.print(f"\nranks of layer {layers[worst].number}, rows relative to the mean", style="dim")
    now_P = _rank_loads(layers, static, node_P)[worst]
    order = np.argsort(-now_P, kind="stable")
    shown = [*order[:TOLD_RANKS], *order[TOLD_RANKS:][-1:]]  # the fullest as it is, and the emptiest
    for verdict, colour in ((static, "red"), (chosen, "green")):
        load_P = _rank_loads(layers, verdict, node_P)[worst]
        for place, rank in enumerate(shown):
            name = verdict.name.replace("_", "-") if place == 0 else ""
            bar = mark * round(load_P[rank] / now_P.max() * room)
            console.print(Text.assemble(f"{name:<12}rank {rank:<4}", (bar, colour), f" {load_P[rank]:.2f}"))


def heat_map(
    layers: list[LayerLoads], static: Verdict, chosen: Verdict, node_P: tuple[int, ...]
) -> np.ndarray:
    loads = np.array([layer.next_PE.sum(0) for layer in layers], dtype=float)
    relative = loads / np.maximum(loads.mean(1, keepdims=True), 1e-300)
    return draw(
        [
            Panel(title="load", rows=relative, columns="experts"),
            Panel(title="static", rows=_rank_loads(layers, static, node_P), columns="ranks"),
            Panel(
                title=chosen.name.replace("_", "-"), rows=_rank_loads(layers, chosen, node_P), columns="ranks"
            ),
        ],
        names=[layer.number for layer in layers],
    )
