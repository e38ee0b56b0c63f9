"""Draws docs/overlap.svg: where the rows of one MoE layer are when, blocking above, smart below.

    .venv/bin/python docs/draw_overlap.py

Both halves are programs of `schedule/smart`, verified and timed by the simulator with the same costs, and are
drawn on the same scale. A block's colour says whose rows it holds, its lane what happens to them. The picture
is a function of this file and of the simulator: a test draws it again and compares it byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moeclipse.cost.exchange import ExchangeCosts
from moeclipse.schedule.kinds import COMPUTE
from moeclipse.schedule.shape import ExchangeShape
from moeclipse.schedule.smart import end_units, exchange_shape, smart
from moeclipse.sim.engine import Simulation
from moeclipse.sim.exchange import simulate_exchange
from moeclipse.sim.measure import summarise

FILE = Path(__file__).parent / "overlap.svg"

RANKS, ROWS = 4, 4096  # rows that each rank has for each rank's expert
COSTS = ExchangeCosts(row_bytes=8192, near_bandwidth=50e9, far_bandwidth=50e9, row_seconds=0.25e-6)
SETTING = "4 ranks, 16,384 rows of 8 kB each, 50 GB/s, 0.25 µs per row"

WIDTH, LEFT, RIGHT = 960, 104, 28
LANE, GAP, PANEL, TOP = 38, 34, 164, 48  # heights of a lane, between lanes, of a panel, above the first one
LANES = {"a2a": "all-to-all", COMPUTE: "experts"}
WORDS = {"S": "in", "C": "compute", "R": "back"}

STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #24292f }
.paper { fill: #ffffff; stroke: #d0d7de } .quiet { fill: #57606a } .small { font-size: 12px }
.head { font-size: 15px; font-weight: 600 } .block { fill: #ffffff; font-size: 12px; text-anchor: middle }
.lane { fill: #eef1f4 } .wait { fill: url(#stripes) } .way { fill: none; stroke-width: 1.6; opacity: .75 }
.tick { stroke: #8c959f } .saved { fill: none; stroke: #57606a }
.end { stroke: #24292f; stroke-dasharray: 3 3 } .stripe { stroke: #c3cad1 }
.r0 { fill: #57606a } .r1 { fill: #b35900 } .r2 { fill: #0b6e99 } .r3 { fill: #6f42c1 }
.w0 { stroke: #57606a } .w1 { stroke: #b35900 } .w2 { stroke: #0b6e99 } .w3 { stroke: #6f42c1 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .paper { fill: #0d1117; stroke: #30363d } .quiet { fill: #9da7b3 }
  .block { fill: #0d1117 } .lane { fill: #1b222b } .tick { stroke: #6e7681 } .saved { stroke: #9da7b3 }
  .end { stroke: #e6edf3 } .stripe { stroke: #3a434d }
  .r0 { fill: #9da7b3 } .r1 { fill: #f0a052 } .r2 { fill: #56c2ee } .r3 { fill: #b99bf8 }
  .w0 { stroke: #9da7b3 } .w1 { stroke: #f0a052 } .w2 { stroke: #56c2ee } .w3 { stroke: #b99bf8 }
}
"""


@dataclass(frozen=True)
class Block:
    """One op of rank 0; times in milliseconds."""

    lane: str
    what: str
    """S: rows arrive (and this rank's leave), C: they are computed, R: results go back."""
    step: int
    chunk: int | None
    start: float
    finish: float


def times(shape: ExchangeShape) -> Simulation:
    return simulate_exchange(smart(shape), [[ROWS] * RANKS] * RANKS, COSTS)


def blocks_of(result: Simulation) -> list[Block]:
    """Of rank 0, which looks like any other: all have the same rows. What takes no time is left out."""
    part = result.rank_slice(0)
    timed = zip(result.program.ranks[0], result.start[part] * 1e3, result.finish[part] * 1e3, strict=True)
    found = [
        Block(op.lane, str(op)[0], op.step or 0, op.chunk, float(start), float(finish))
        for op, start, finish in timed
    ]
    return [block for block in found if block.finish > block.start]


def hidden_of(result: Simulation) -> str:
    """What a reader wants to know of a panel."""
    time = summarise(result).communication()
    hidden, total = time.hidden / RANKS * 1e3, time.total / RANKS * 1e3
    return f"{hidden:.1f} of {total:.1f} ms of communication hidden"


def x_of(ms: float, longest: float) -> float:
    return LEFT + ms / longest * (WIDTH - LEFT - RIGHT)


def panel(name: str, blocks: list[Block], result: Simulation, top: float, longest: float) -> Iterator[str]:
    makespan = result.makespan * 1e3
    end, last = x_of(makespan, longest), x_of(longest, longest)
    yield f'<text class="head" x="{LEFT}" y="{top - 12}">{name}</text>'
    yield (
        f'<text class="quiet" x="{last:.1f}" y="{top - 12}" text-anchor="end">'
        f"{makespan:.1f} ms, {hidden_of(result)}</text>"
    )
    for row, (lane, words) in enumerate(LANES.items()):
        y = top + row * (LANE + GAP)
        yield f'<text class="quiet" x="{LEFT - 12}" y="{y + 24}" text-anchor="end">{words}</text>'
        yield f'<rect class="lane" x="{LEFT}" y="{y}" width="{last - LEFT:.1f}" height="{LANE}" rx="4"/>'
        if lane == COMPUTE:
            yield from waits(blocks, makespan, y, longest)
    yield from ways(blocks, top, longest)
    for block in blocks:
        yield from drawn(block, top, longest)
    yield f'<line class="end" x1="{end:.1f}" x2="{end:.1f}" y1="{top - 4}" y2="{top + 2 * LANE + GAP + 4}"/>'
    if makespan < longest:
        yield from saved(makespan, top, longest)


def waits(blocks: list[Block], makespan: float, y: float, longest: float) -> Iterator[str]:
    """Stripes where experts have nothing to do before the layer is done."""
    busy = sorted((block.start, block.finish) for block in blocks if block.lane == COMPUTE)
    edges = [0.0, *(moment for pair in busy for moment in pair), makespan]
    for start, finish in zip(edges[::2], edges[1::2], strict=True):
        x, width = x_of(start, longest), x_of(finish, longest) - x_of(start, longest)
        if width > 0.5:
            yield f'<rect class="wait" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE}"/>'
        if width > 60:
            middle = x + width / 2
            yield f'<text class="quiet small" x="{middle:.1f}" y="{y + 24}" text-anchor="middle">waits</text>'


def ways(blocks: list[Block], top: float, longest: float) -> Iterator[str]:
    """A line for the rows of each step, from where they arrive to their experts and back to the wire."""
    at = {(block.what, block.step): block for block in blocks}
    above, below = top + LANE, top + LANE + GAP
    for what, step in at:
        if what == "C" and ("S", step) in at:
            here, came, goes = at["C", step], at["S", step], at["R", step]
            for (x1, y1), (x2, y2) in (
                ((came.finish, above), (here.start, below)),
                ((here.finish, below), (goes.start, above)),
            ):
                a, b, middle = x_of(x1, longest), x_of(x2, longest), (y1 + y2) / 2
                path = f"M{a:.1f} {y1}C{a:.1f} {middle} {b:.1f} {middle} {b:.1f} {y2}"
                yield f'<path class="way w{step}" d="{path}"/>'


def drawn(block: Block, top: float, longest: float) -> Iterator[str]:
    y = top + list(LANES).index(block.lane) * (LANE + GAP)
    x, width = x_of(block.start, longest), x_of(block.finish, longest) - x_of(block.start, longest)
    place = f'x="{x + 0.75:.1f}" y="{y}" width="{width - 1.5:.1f}" height="{LANE}"'
    yield f'<rect class="r{block.step}" {place} rx="3"/>'
    words = WORDS[block.what] if width > 60 else "own"
    yield f'<text class="block" x="{x + width / 2:.1f}" y="{y + 24}">{words}</text>'


def saved(end: float, top: float, longest: float) -> Iterator[str]:
    """An arrow over the time that one panel does not need."""
    x1, x2, y = x_of(end, longest), x_of(longest, longest), top + LANE + GAP / 2
    arrow = f"M{x1 + 8:.1f} {y}H{x2 - 2:.1f}M{x1 + 14:.1f} {y - 5}L{x1 + 8:.1f} {y}l6 5"
    yield f'<path class="saved" d="{arrow}"/>'
    words = f"{longest - end:.1f} ms earlier"
    middle = (x1 + x2) / 2
    yield f'<text class="quiet small" x="{middle:.1f}" y="{y - 6}" text-anchor="middle">{words}</text>'


def axis(y: float, longest: float) -> Iterator[str]:
    for ms in range(int(longest) + 1):
        x = x_of(ms, longest)
        yield f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 6}" y2="{y}"/>'
        unit = " ms" if ms == int(longest) else ""
        yield f'<text class="quiet small" x="{x:.1f}" y="{y + 16}" text-anchor="middle">{ms}{unit}</text>'


def legend(y: float, shape: ExchangeShape) -> Iterator[str]:
    x = float(LEFT)
    for step in range(RANKS):
        (rank,) = shape.receive_from(0, step)
        words = f"rows of rank {rank}" if step else "its own rows"
        yield f'<rect class="r{step}" x="{x:.1f}" y="{y - 11}" width="14" height="14" rx="3"/>'
        yield f'<text class="small" x="{x + 20:.1f}" y="{y}">{words}</text>'
        x += 130
    yield f'<rect class="lane" x="{x}" y="{y - 11}" width="14" height="14"/>'
    yield f'<rect class="wait" x="{x}" y="{y - 11}" width="14" height="14"/>'
    yield f'<text class="small" x="{x + 20}" y="{y}">experts wait</text>'


def draw() -> str:
    whole = exchange_shape(RANKS, blocking=True)
    cut = exchange_shape(RANKS, units=end_units(RANKS))
    panels = {"blocking": times(whole), "smart": times(cut)}
    longest = max(result.makespan for result in panels.values()) * 1e3
    bottom = TOP + len(panels) * PANEL - 34
    height = bottom + 90
    told = "; ".join(f"{name}: {hidden_of(result)}" for name, result in panels.items())
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">',
        f"<title>One MoE layer, forward, on rank 0 of {RANKS}</title><desc>{told}</desc>",
        f"<style>{STYLE}</style>",
        '<defs><pattern id="stripes" width="7" height="7" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><line class="stripe" x1="0" y1="0" x2="0" y2="7" stroke-width="3"/>'
        "</pattern></defs>",
        f'<rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        *axis(bottom, longest),
    ]
    for number, (name, result) in enumerate(panels.items()):
        lines += panel(name, blocks_of(result), result, TOP + number * PANEL, longest)
    lines += legend(bottom + 46, cut)
    caption = f"Forward of one MoE layer, simulated, as one rank sees it: {SETTING}."
    lines.append(f'<text class="quiet small" x="{LEFT}" y="{bottom + 72}">{caption}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    FILE.write_text(draw())
