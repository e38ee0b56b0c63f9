"""The exchange in two levels: inside the host, then across hosts among ranks of equal place.

Rows from rank l of host h to rank m of host g change over at rank m of host h:

    sizes    (h, l) -> (h, m)    how many rows (h, l) has for each (., m): numbers, on the CPU
    inside   (h, l) -> (h, m)    rows for all (., m), by host
    across   (h, m) -> (g, m)    rows of all (h, .), by rank

so with H hosts a rank sends H - 1 messages over the slow wire instead of (H - 1) x P / H, each P / H times as
large. Rows arrive in the order of a plain all-to-all. The price: every row travels once more, within a host,
and is copied twice; and the rank of the change-over cannot know how many rows come, so sizes travel first: in
each call every rank exchanges P integers with the ranks of its host.

Contract: `all_to_all` is collective, and a rank calls it in the same order as its peers; rows must not change
and the result must not be read before `get`. Every host has the same number of ranks.

How far it is asynchronous, and why that is safe. An exchange is a generator that yields the transfer of each
stage; who resumes it depends on the device.

* CPU (gloo): nobody waits. When a transfer is done, gloo's thread resumes the exchange, and that launches the
  next stage. Ranks get there at different times, but transfers of a group meet in the order of their launch,
  and swapped ones would silently exchange data. So each of the three stages has a group of its own, and no
  exchange overtakes an earlier one at any stage. Nor does one need anybody to call `get`: a rank may sit in
  `get` of one exchange while its peer already computes, or sits in `get` of another.
* CUDA: sizes are numbers of the host, and the host waits for them (for the ranks of its host to arrive, never
  for a device). Then both row transfers are enqueued on the lane's stream at once, with the reordering
  between them. A lane runs one exchange after the other, so two NCCL communicators are never under way
  together, which NCCL allows only with care; the inside of one exchange is not hidden under the across of
  another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from moeclipse.comm.async_ops.lane import InFlight, Lane
from moeclipse.comm.async_ops.work import CompletedWork, OwnWork
from moeclipse.comm.group import Group, number_hosts
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.transports.transport import Transport, direct
from moeclipse.core.errors import ConfigError

STAGES = 3  # sizes, inside, across


def two_level(mesh: Mesh, group: Group, hosts: Sequence[object] | None = None) -> Transport:
    """Collective over all ranks, made once for each group of the mesh and kept there.

    `hosts` names the host of each rank of the mesh; left out, the mesh asks the machines. Where a group is on
    one host, or every host has one rank of it, there is nothing to gain, and the exchange is direct.
    """
    numbers = mesh.hosts if hosts is None else number_hosts(hosts, mesh.num_ranks)
    families = [layout(ranks, numbers) for ranks in mesh.partitions[group.name]]
    for table in families:
        refuse_ragged(table)

    def make() -> Transport:
        tables = [table for table in families if len(table) > 1 and len(table[0]) > 1]
        if not tables:
            return direct(mesh, group, numbers)
        # Every rank enters every group; ranks of direct groups only help to make the others.
        alone = [(rank,) for rank in range(mesh.num_ranks) if not any(rank in sum(t, ()) for t in tables)]
        inside = [host for table in tables for host in table] + alone
        across = [tuple(sorted(ranks)) for table in tables for ranks in zip(*table, strict=True)] + alone
        groups = (
            mesh.new_group(f"{group.name}.sizes", inside, backend="gloo"),
            mesh.new_group(f"{group.name}.inside", inside),
            mesh.new_group(f"{group.name}.across", across),
        )
        mine = next((table for table in tables if mesh.rank in sum(table, ())), None)
        if mine is None:
            return direct(mesh, group, numbers)
        places = tuple(tuple(group.ranks.index(rank) for rank in host) for host in mine)
        return TwoLevelTransport(mesh.a2a, group, *groups, places)

    return mesh.once(f"two_level {group.name} {numbers}", make)


def layout(ranks: Sequence[int], hosts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each host, hosts by first appearance."""
    return tuple(
        tuple(rank for rank in ranks if hosts[rank] == host)
        for host in dict.fromkeys(hosts[rank] for rank in ranks)
    )


def refuse_ragged(table: tuple[tuple[int, ...], ...]) -> None:
    if len(set(map(len, table))) > 1:
        counts = ", ".join(map(str, map(len, table)))
        raise ConfigError(
            f'moe.transport = "two_level" needs the same number of ranks on every host, but the {len(table)} '
            f'hosts of ranks {sum(table, ())} have {counts} of them; use moe.transport = "direct", or start '
            "as many ranks on each host"
        )


@dataclass
class TwoLevelTransport:
    lane: Lane
    group: Group
    sizes: Group
    inside: Group
    across: Group
    places: tuple[tuple[int, ...], ...]
    """Of each host, the places of its ranks in the group."""

    queue: StageQueue = field(default_factory=lambda: StageQueue(), repr=False)

    def all_to_all(
        self,
        rows: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        label: str,
        out: torch.Tensor | None = None,
    ) -> InFlight[torch.Tensor]:
        rows = rows.detach()
        if out is None:
            out = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        stages = self.stages(rows, send_counts, receive_counts, out)

        def start() -> TwoLevelWork | CompletedWork:
            if rows.device.type == "cpu":
                return self.queue.start(stages)
            return self.run_inline(stages)

        return self.lane.launch(self.group, label, start, out, rows)

    def stages(
        self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], out: torch.Tensor
    ) -> Iterator[dist.Work]:
        """Launches the transfers one by one, each after the one before has been done."""
        places, hosts, peers = self.places, range(len(self.places)), range(len(self.places[0]))
        parts = rows.split(list(send))
        sent = torch.cat([parts[places[h][m]] for m in peers for h in hosts])
        counts_LH = torch.tensor([[send[places[h][m]] for h in hosts] for m in peers])
        table_LH = torch.empty_like(counts_LH)
        yield launch(self.sizes, table_LH, counts_LH)

        came = table_LH.tolist()
        change = rows.new_empty((sum(map(sum, came)), *rows.shape[1:]))
        yield launch(self.inside, change, sent, list(map(sum, came)), counts_LH.sum(1).tolist())

        parts = change.split([came[m][h] for m in peers for h in hosts])
        # Groups are in the order of their ranks, and where hosts interleave that differs from place to place.
        turns = sorted(hosts, key=lambda h: places[h][self.inside.index])
        sent = torch.cat([parts[m * len(hosts) + h] for h in turns for m in peers])
        leaving = [sum(came[m][h] for m in peers) for h in turns]
        arriving = [sum(receive[place] for place in places[h]) for h in turns]
        order = [place for h in turns for place in places[h]]
        if order == sorted(order):
            yield launch(self.across, out, sent, arriving, leaving)
            return
        arrived = torch.empty_like(out)
        yield launch(self.across, arrived, sent, arriving, leaving)
        parts = arrived.split([receive[place] for place in order])
        torch.cat([parts[order.index(place)] for place in range(len(order))], out=out)

    def run_inline(self, stages: Iterator[dist.Work]) -> CompletedWork:
        """On NCCL, waiting for rows orders the lane's stream; the host waits for sizes alone."""
        patience = timedelta(seconds=self.lane.watch.deadline_s)
        for number, work in enumerate(stages):
            if number > 0 and self.group.backend == "nccl":
                work.wait()
            else:
                work.wait(patience)
        return CompletedWork()


def launch(
    group: Group,
    out: torch.Tensor,
    rows: torch.Tensor,
    receive: list[int] | None = None,
    send: list[int] | None = None,
) -> dist.Work:
    work = dist.all_to_all_single(out, rows, receive, send, group=group.handle, async_op=True)
    assert work is not None
    return work


class TwoLevelWork(OwnWork):
    """One exchange under way; to its lane it looks like one transfer."""

    def __init__(self, stages: Iterator[dist.Work]) -> None:
        super().__init__()
        self.stages, self.launched = stages, 0
        self.work: dist.Work | None = None
        self.inference = torch.is_inference_mode_enabled()  # gloo's thread must be in the caller's mode

    @property
    def waits(self) -> bool:
        """Its last transfer is still under way. (`is_completed` turns true only after gloo's callbacks.)"""
        return self.work is not None and not self.work.get_future().done()

    def resume(self) -> None:
        if self.work is not None:
            self.work.get_future().wait()  # it is done: this raises what it failed with
        with torch.inference_mode(self.inference), torch.no_grad():
            self.work = next(self.stages, None)
        self.launched += 1


class StageQueue:
    """Exchanges that are open, in the order of their calls; none overtakes another at any stage."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open: list[TwoLevelWork] = []
        self._advancing = False
        self._broken: Exception | None = None

    def start(self, stages: Iterator[dist.Work]) -> TwoLevelWork:
        exchange = TwoLevelWork(stages)
        with self._lock:
            if self._broken is not None:
                raise RuntimeError(f"an earlier exchange has failed: {self._broken}")
            self._open.append(exchange)
        self.advance()
        return exchange

    def advance(self, *_: object) -> None:
        """Launch whatever may be launched. Called from the caller's thread and from gloo's."""
        with self._lock:
            if self._advancing:
                return  # a transfer was done as soon as it was launched: the loop below sees it
            self._advancing = True
            try:
                while (exchange := self._next()) is not None:
                    self._resume(exchange)
            except Exception as error:
                self._break(error)
            finally:
                self._advancing = False

    def _next(self) -> TwoLevelWork | None:
        for before, exchange in zip([None, *self._open], self._open, strict=False):
            first = before is None or before.launched > exchange.launched
            if (first or exchange.launched == STAGES) and not exchange.waits:
                return exchange
        return None

    def _resume(self, exchange: TwoLevelWork) -> None:
        exchange.resume()
        if exchange.work is not None:
            exchange.work.get_future().add_done_callback(self.advance)
            return
        self._open.remove(exchange)
        exchange.future.set_result(None)

    def _break(self, error: Exception) -> None:
        """What comes behind a failed exchange must not go on: ranks would no longer launch in one order."""
        self._broken, failed, self._open = error, self._open, []
        for exchange in failed:
            exchange.future.set_exception(error)
