"""Reductions over shared memory between processes of one host.

Everything is made of rounds (`rounds`): ranks write, meet, and read what the others wrote.

    one stage    a round:   each rank shows its input and adds all of them
    two stages   round t:   each rank shows its input and adds its own part of all of them
                 round t+1: each rank shows its part and copies the others', starting behind its own

Stage one writes its part into the shared area and not into the result, because peers can only read what was
shared beforehand. Ranks are added in order 0, 1, ... by whoever adds, so all ranks hold the same bits, and
one and two stages agree bit for bit. Longer tensors go through the areas in chunks.

A reduction is a generator that stops where it would wait for the first time: its input is shown, and peers
can read it while this rank computes. Whoever wants the result runs it to the end. Only one may be open: the
next one writes areas that are free only when this one has been read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from ctypes import memmove
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moeclipse.comm.failure import Watch
from moeclipse.comm.group import Group
from moeclipse.comm.reduce.reducer import Alone, PlanKey, Planned
from moeclipse.comm.reduce.rounds import DTYPES, WORDS_PER_RANK, PeerRounds
from moeclipse.comm.shared.host import PeerMemory
from moeclipse.core.errors import ConfigError
from moeclipse.ops.peer_reduce import add_residual, part_bounds, rms_norm, sum_ranks


class OneStagePlan:
    """One stage for one length and dtype, with everything looked up beforehand.

    For tensors of some kilobytes looking up is most of the work; numpy's calls cost half of torch's. Longer
    ones go in chunks, the same as without a plan: a rank that has one meets peers that have none.
    """

    def __init__(self, rounds: PeerRounds, dtype: torch.dtype, length: int, chunk: int) -> None:
        self._rounds, self._length, self._chunk = rounds, length, chunk
        self._itemsize, self._code = dtype.itemsize, rounds.code_of(0, dtype, length)
        n, me, view, most = rounds.num_ranks, rounds.index, rounds.memory.view, min(length, chunk)
        areas = [
            [view(peer, dtype, parity * rounds.area_bytes, most) for peer in range(n)] for parity in (0, 1)
        ]
        self._addresses = [parts[me].data_ptr() for parts in areas]
        self._areas, self._numpy = areas, n == 2 and dtype in (torch.float32, torch.float64)
        self._theirs: list[Any] = [parts[1 - me].numpy() for parts in areas] if self._numpy else []

    def __call__(self, x: torch.Tensor, out: torch.Tensor, label: str) -> None:
        if x.dim() != 1:
            x, out = x.view(-1), out.view(-1)
        if self._length <= self._chunk:
            parity = self._rounds.number % 2
            memmove(self._addresses[parity], x.data_ptr(), self._length * self._itemsize)
            self._rounds.exchange(self._code, label)
            self._add(x, out, parity)
            return
        for start in range(0, self._length, self._chunk):
            self._one_chunk(x, out, start, label)

    def _one_chunk(self, x: torch.Tensor, out: torch.Tensor, start: int, label: str) -> None:
        rounds, stop = self._rounds, min(start + self._chunk, self._length)
        parity = rounds.number % 2
        size = self._itemsize
        memmove(self._addresses[parity], x.data_ptr() + start * size, (stop - start) * size)
        if start:
            rounds.meet(label)
        else:
            rounds.exchange(self._code, label)
        self._add(x[start:stop], out[start:stop], parity)

    def _add(self, x: torch.Tensor, out: torch.Tensor, parity: int) -> None:
        count = x.numel()
        if self._numpy:  # a + b = b + a to the bit
            np.add(x.numpy(), self._theirs[parity][:count], out=out.numpy())
            return
        parts = [part[:count] for part in self._areas[parity]]
        if self._rounds.num_ranks == 2:
            parts[self._rounds.index] = x
        sum_ranks(parts, out)


class CpuReducer:
    """The reductions. All tensors are flat, contiguous and on the CPU; one call at a time."""

    dtypes, asynchronous = DTYPES, False

    def __init__(self, memory: PeerMemory) -> None:
        self._rounds = PeerRounds(memory)
        self._memory = memory
        self.index, self.num_ranks = memory.index, memory.num_ranks
        self._plans: dict[PlanKey, Planned] = {}

    @classmethod
    def open(cls, group: Group, watch: Watch, area_bytes: int, spin: int | None, folder: Path) -> CpuReducer:
        """Collective; NoPeerMemoryError where ranks cannot share memory."""
        words = WORDS_PER_RANK * group.size
        return cls(
            PeerMemory.open(group, watch, num_bytes=2 * area_bytes, num_words=words, spin=spin, folder=folder)
        )

    def close(self) -> None:
        self._rounds, self._plans = PeerRounds(self._memory), {}  # drops the views
        self._memory.close()

    @property
    def arrived(self) -> bool:
        return self._rounds.arrived

    def is_shared(self, x: torch.Tensor) -> bool:
        """Never: memory of its own cannot be shown to peers later."""
        del x
        return False

    def share(self, x: torch.Tensor) -> None:
        """Nothing would be gained."""

    def unshare(self, x: torch.Tensor) -> None: ...

    def capture(self, dtypes: Sequence[torch.dtype]) -> AbstractContextManager[None]:
        del dtypes
        raise ConfigError("capture() is for CUDA graphs over peer memory: this all-reduce is on the cpu")

    def settle(self) -> None:
        """What was called is done, or open."""

    def can_part(self, bounds: Sequence[int], dtype: torch.dtype) -> bool:
        """Parts may be of any length."""
        del bounds, dtype
        return True

    def plan(
        self,
        key: PlanKey,
        x: torch.Tensor,
        out: torch.Tensor,
        two_stages: bool,
        chunk_bytes: int,
        alone: Alone,
    ) -> Planned | None:
        """For calls in one stage."""
        del out
        if two_stages:
            return None
        planned = self._plans.get(key)
        if planned is None:
            chunk = self._elements(chunk_bytes, x.dtype)
            planned = self._plans[key] = alone(OneStagePlan(self._rounds, x.dtype, x.numel(), chunk))
        return planned

    def all_reduce(
        self, x: torch.Tensor, out: torch.Tensor, two_stages: bool, chunk_bytes: int, label: str
    ) -> Iterator[None]:
        self._rounds.announce(0, x.dtype, x.numel())
        step = self._two_stages if two_stages else self._one_stage
        length, chunk = x.numel(), self._elements(chunk_bytes, x.dtype)
        if length <= chunk:
            yield from step(x, out, label, True)
            return
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            yield from step(x[start:stop], out[start:stop], label, start == 0)

    def _elements(self, chunk_bytes: int, dtype: torch.dtype) -> int:
        return max(1, min(chunk_bytes, self._rounds.area_bytes) // dtype.itemsize)

    def _shown(self, label: str, first: bool) -> Iterator[None]:
        """The barrier of a step; the first one is where a reduction may be left open."""
        rounds = self._rounds
        rounds.post()
        if first:
            yield
        rounds.arrive(label)
        if first:
            rounds.compare(label)

    def _one_stage(self, x: torch.Tensor, out: torch.Tensor, label: str, first: bool) -> Iterator[None]:
        rounds, length = self._rounds, x.numel()
        rounds.area(self.index, x.dtype, length).copy_(x)
        yield from self._shown(label, first)
        parts = rounds.shown(x.dtype, length)
        if self.num_ranks == 2:
            parts[self.index] = x  # nearer than its copy; with more ranks `out` may be `x` and half added
        sum_ranks(parts, out)

    def _two_stages(self, x: torch.Tensor, out: torch.Tensor, label: str, first: bool) -> Iterator[None]:
        rounds, length, me = self._rounds, x.numel(), self.index
        bounds = part_bounds(length, self.num_ranks)
        mine = slice(bounds[me], bounds[me + 1])
        shown = rounds.area(me, x.dtype, length)
        if self.num_ranks == 2:  # nobody else reads my own part
            shown[bounds[1 - me] : bounds[2 - me]].copy_(x[bounds[1 - me] : bounds[2 - me]])
        else:
            shown.copy_(x)
        yield from self._shown(label, first)
        parts = rounds.shown(x.dtype, bounds[me + 1] - bounds[me], bounds[me])
        if self.num_ranks == 2:
            parts[me] = x[mine]
        reduced = rounds.area(me, x.dtype, bounds[me + 1] - bounds[me])
        sum_ranks(parts, reduced)
        out[mine].copy_(reduced)
        rounds.meet(label)
        for step in range(1, self.num_ranks):
            peer = (me + step) % self.num_ranks
            start, stop = bounds[peer], bounds[peer + 1]
            out[start:stop].copy_(rounds.area(peer, x.dtype, stop - start, back=1))

    def reduce_scatter(
        self, x: torch.Tensor, bounds: Sequence[int], out: torch.Tensor, label: str
    ) -> Iterator[None]:
        """out = the sum over ranks of x[bounds[me] : bounds[me + 1]]."""
        rounds, me = self._rounds, self.index
        rounds.announce(1, x.dtype, x.numel())
        lane = self._elements(rounds.area_bytes // self.num_ranks, x.dtype)  # elements for each peer
        longest = max(stop - start for start, stop in pairwise(bounds))
        for offset in range(0, max(longest, 1), lane):
            for peer, (start, stop) in enumerate(pairwise(bounds)):
                count = min(lane, stop - start - offset)
                if count > 0 and peer != me:
                    source = x[start + offset : start + offset + count]
                    rounds.area(me, x.dtype, count, peer * lane).copy_(source)
            yield from self._shown(label, offset == 0)
            count = min(lane, bounds[me + 1] - bounds[me] - offset)
            if count > 0:
                parts = rounds.shown(x.dtype, count, me * lane)
                first = bounds[me] + offset
                parts[me] = x[first : first + count]
                sum_ranks(parts, out[offset : offset + count])

    def all_gather(
        self, shard: torch.Tensor, bounds: Sequence[int], out: torch.Tensor, label: str
    ) -> Iterator[None]:
        """out[bounds[p] : bounds[p + 1]] = the shard of rank p."""
        rounds, me = self._rounds, self.index
        rounds.announce(2, shard.dtype, bounds[-1])
        lane = self._elements(rounds.area_bytes, shard.dtype)
        longest = max(stop - start for start, stop in pairwise(bounds))
        for offset in range(0, max(longest, 1), lane):
            count = min(lane, shard.numel() - offset)
            if count > 0:
                rounds.area(me, shard.dtype, count).copy_(shard[offset : offset + count])
            yield from self._shown(label, offset == 0)
            for step in range(self.num_ranks):
                peer = (me + step) % self.num_ranks
                start = bounds[peer] + offset
                count = min(lane, bounds[peer + 1] - start)
                if count > 0:
                    source = shard[offset : offset + count]
                    if peer != me:
                        source = rounds.area(peer, shard.dtype, count, back=1)
                    out[start : start + count].copy_(source)

    def all_reduce_rms_norm(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor,
        weight_D: torch.Tensor,
        eps: float,
        two_stages: bool,
        label: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(normed, h) with h = residual + sum over ranks; in two stages each rank adds rows of its own."""
        rounds, (T, D) = self._rounds, x_TD.shape
        rounds.announce(3, x_TD.dtype, T * D)
        h_TD = torch.empty_like(residual_TD)
        at_once = self._elements(rounds.area_bytes, x_TD.dtype) // D
        for start in range(0, max(T, 1), at_once):
            rows = slice(start, min(start + at_once, T))
            self._add_rows(x_TD[rows], residual_TD[rows], h_TD[rows], two_stages, label, start == 0)
        return rms_norm(h_TD, weight_D, eps), h_TD

    def _add_rows(
        self,
        x_RD: torch.Tensor,
        residual_RD: torch.Tensor,
        h_RD: torch.Tensor,
        two_stages: bool,
        label: str,
        first: bool,
    ) -> None:
        rounds, me, (R, D), dtype = self._rounds, self.index, x_RD.shape, x_RD.dtype
        rounds.area(me, dtype, R * D).copy_(x_RD.reshape(-1))
        rounds.meet(label)
        if first:
            rounds.compare(label)
        if not two_stages:
            h_RD.view(-1).copy_(add_residual(rounds.shown(dtype, R * D), residual_RD.reshape(-1)))
            return
        bounds = part_bounds(R, self.num_ranks)
        start, stop = bounds[me], bounds[me + 1]
        shown = rounds.shown(dtype, (stop - start) * D, start * D)
        reduced = add_residual(shown, residual_RD[start:stop].reshape(-1))
        rounds.area(me, dtype, (stop - start) * D).copy_(reduced)
        rounds.meet(label)
        for peer in range(self.num_ranks):
            start, stop = bounds[peer], bounds[peer + 1]
            h_RD[start:stop] = rounds.area(peer, dtype, (stop - start) * D, back=1).view(-1, D)
