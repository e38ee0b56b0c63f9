"""Which programs a layer's exchange runs: how ranks are grouped, in how many chunks rows are cut.

"blocking" is one group of all ranks and one chunk: send all, compute all, return all. "smart" cuts the
exchange into units (step, chunk). Ranks that are close form a group: those of one host, where there are
several hosts; otherwise each rank for itself, so that rows that stay on a rank are computed while the others
travel.

Programs are built and verified once for each granularity and kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from moeclipse.moe.config import MoEConfig
from moeclipse.moe.routed import Programs
from moeclipse.schedule.check import verify
from moeclipse.schedule.shape import ExchangeShape
from moeclipse.schedule.smart import exchange_shape, smart

Groups = tuple[tuple[int, ...], ...]
START_CHUNKS = 1


class ExchangeSchedule:
    """The granularity in use, and its verified programs."""

    def __init__(self, config: MoEConfig, hosts: tuple[int, ...]) -> None:
        self.config, self.num_ranks = config, len(hosts)
        self.groups = start_groups(config.schedule, config.group_size, hosts)
        chunks = 1 if config.schedule == "blocking" else config.chunks
        self.chunks = START_CHUNKS if chunks == "auto" else chunks
        self.units: tuple[tuple[int, int], ...] | None = None
        self._programs: dict[ExchangeShape, Programs] = {}

    @property
    def shape(self) -> ExchangeShape:
        return exchange_shape(self.num_ranks, groups=self.groups, chunks=self.chunks, units=self.units)

    def programs(self, shape: ExchangeShape) -> Programs:
        if shape not in self._programs:
            backward = replace(shape, backward=True)
            self._programs[shape] = Programs(forward=verify(smart(shape)), backward=verify(smart(backward)))
        return self._programs[shape]


def start_groups(
    schedule: Literal["blocking", "smart"], size: int | Literal["auto"], hosts: tuple[int, ...]
) -> Groups:
    """The partition of the ranks before anything was measured."""
    ranks = range(len(hosts))
    if schedule == "blocking":
        return (tuple(ranks),)
    if size != "auto":
        return tuple(tuple(ranks[first : first + size]) for first in range(0, len(ranks), size))
    if len(set(hosts)) > 1:
        return tuple(tuple(rank for rank in ranks if hosts[rank] == host) for host in dict.fromkeys(hosts))
    return tuple((rank,) for rank in ranks)
