"""The grid: ranks downward, slots to the right, every action in the first slot in which it can run.

Each action takes one slot, so the picture shows dependencies and idle slots, not durations; for those see
the timeline of the simulator.
"""

from __future__ import annotations

from moeclipse.schedule.check import Verified, verify
from moeclipse.schedule.op import Program

IDLE = "."


def slots(verified: Verified) -> list[int]:
    """First slot of each op, in rank order; transfers take none."""
    graph = verified.graph
    at = [0] * graph.num_nodes
    members = graph.members
    takes_slot = [op.comm is None for ops in verified.program.ranks for op in ops]
    for v in graph.order:
        nodes = [v] if members is None else members[v]
        begin = max(at[node] for node in nodes)
        for node in nodes:
            at[node] = begin
            end = begin + (1 if node < graph.num_ops and takes_slot[node] else 0)
            for after in graph.hard.after[graph.hard.first[node] : graph.hard.first[node + 1]]:
                at[after] = max(at[after], end)
    return at[: graph.num_ops]


def format_grid(program: Program | Verified, max_slots: int | None = None) -> str:
    """Compute ops only; longer programs are cut after `max_slots`."""
    verified = program if isinstance(program, Verified) else verify(program)
    at = slots(verified)
    ranks = verified.program.ranks
    rows: list[dict[int, str]] = []
    node = 0
    for ops in ranks:
        row: dict[int, str] = {}
        for op in ops:
            if op.comm is None:
                row[at[node]] = str(op)
            node += 1
        rows.append(row)
    last = max((slot for row in rows for slot in row), default=-1) + 1
    shown = last if max_slots is None else min(last, max_slots)
    widths = [max([1, *(len(row.get(slot, "")) for row in rows)]) for slot in range(shown)]
    label = len(f"rank {len(ranks) - 1}")
    lines = []
    for rank, row in enumerate(rows):
        cells = [f"{row.get(slot, IDLE):<{widths[slot]}}" for slot in range(shown)]
        more = " ..." if shown < last else ""
        lines.append(f"{f'rank {rank}':<{label}}  {' '.join(cells)}".rstrip() + more)
    return "\n".join(lines)
