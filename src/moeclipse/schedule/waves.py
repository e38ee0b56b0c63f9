"""Large graphs in waves: all nodes that wait for nothing any more are taken at once, by arrays.

A pipeline of a thousand ranks is a thousand nodes wide and some ten thousand waves long, so arrays of a
wave's width replace a walk over each of its millions of edges. For narrow graphs the walk is faster
(`graph`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Edges in compressed rows: those of node n are after[first[n] : first[n + 1]]."""

    first: Ints
    after: Numbers

    @staticmethod
    def build(num_nodes: int, source: Ints, target: Ints) -> Rows:
        first = np.zeros(num_nodes + 1, dtype=np.int64)
        np.cumsum(np.bincount(source, minlength=num_nodes), out=first[1:])
        after = target.astype(np.int32)[np.argsort(source, kind="stable")]
        return Rows(first=first, after=after)

    def reached(self, nodes: Numbers) -> tuple[Numbers, Ints]:
        """What follows `nodes`, in their order, and how many follow each."""
        begin = self.first[nodes]
        count = self.first[nodes + 1] - begin
        end = np.cumsum(count)
        total = int(end[-1]) if len(end) else 0
        return self.after[np.arange(total) + np.repeat(begin - end + count, count)], count


@dataclass(frozen=True, kw_only=True)
class Waves:
    """The order of a graph: no node of a wave waits for another of the same wave."""

    order: Numbers
    begin: list[int]
    """First place of each wave in `order`, and the end."""
    hard: Rows
    host: Rows

    def longest_path(self, duration: Floats, inline_compute: bool) -> tuple[Floats, Floats]:
        """(start, finish) of every node: it starts when the last of what it waits for has ended."""
        start, finish = np.zeros(len(duration)), np.empty(len(duration))
        for first, last in zip(self.begin, self.begin[1:], strict=False):
            wave = self.order[first:last]
            end = start[wave] + duration[wave]
            finish[wave] = end
            for rows in (self.hard, self.host) if inline_compute else (self.hard,):
                targets, count = rows.reached(wave)
                np.maximum.at(start, targets, np.repeat(end, count))
        return start, finish


def sort_in_waves(
    num_nodes: int, source: Ints, target: Ints, is_host: npt.NDArray[np.bool_]
) -> tuple[Waves, Numbers]:
    """The waves, and for how many others each node waits in the end: for none, unless there is a cycle."""
    hard = Rows.build(num_nodes, source[~is_host], target[~is_host])
    host = Rows.build(num_nodes, source[is_host], target[is_host])
    waiting = np.bincount(target, minlength=num_nodes).astype(np.int32)
    waves: list[Numbers] = []
    wave = np.flatnonzero(waiting == 0).astype(np.int32)
    while len(wave):
        waves.append(wave)
        reached = np.concatenate([hard.reached(wave)[0], host.reached(wave)[0]])
        targets, count = np.unique(reached, return_counts=True)
        left = waiting[targets] - count
        waiting[targets] = left
        wave = targets[left == 0]
    begin = np.concatenate([[0], np.cumsum([len(wave) for wave in waves])]).astype(np.int64)
    order = np.concatenate(waves) if waves else np.zeros(0, dtype=np.int32)
    return Waves(order=order, begin=begin.tolist(), hard=hard, host=host), waiting
