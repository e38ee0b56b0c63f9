"""Rows over gloo, pair by pair: what arrives, in any order of waiting, and what happens when a rank dies."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_signals import await_file

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.transports import gloo_pairs
from moeclipse.comm.transports.gloo_pairs import ACK, LARGE, REST, TAG
from moeclipse.comm.transports.transport import TorchTransport, direct
from moeclipse.testing.run_ranks import run_ranks, run_ranks_raw

WIDTH = 16


def transport(mesh: Mesh) -> TorchTransport:
    return direct(mesh, mesh.experts, range(mesh.num_ranks))


def rows_for(source: int, target: int, turn: int, count: int) -> torch.Tensor:
    """Rows that say where they come from, where they go and when."""
    return torch.full((count, WIDTH), float(source + 10 * target + 100 * turn))


def storm(mesh: Mesh, turns: int, seed: int) -> None:
    """Exchanges of random sizes, several under way, waited for in another order than they were launched."""
    P, me, wire = mesh.num_ranks, mesh.rank, transport(mesh)
    row = 4 * WIDTH
    sizes = [0, 0, 1, 7, LARGE // row - 1, LARGE // row, 3 * LARGE // row + 5, 3 * REST // row]
    counts = random.Random(seed)
    order = random.Random(seed * 100 + me)
    under_way: list[Any] = []
    for turn in range(turns):
        table = [[counts.choice(sizes) for _ in range(P)] for _ in range(P)]
        if turn % 3 == 0:  # one step of a ring: one peer each way
            table = [
                [n * (target == (source + turn) % P) for target, n in enumerate(row)]
                for source, row in enumerate(table)
            ]
        rows = torch.cat([rows_for(me, target, turn, table[me][target]) for target in range(P)])
        expected = torch.cat([rows_for(source, me, turn, table[source][me]) for source in range(P)])
        receive = [table[source][me] for source in range(P)]
        out = torch.full_like(expected, -1.0) if turn % 2 else None
        under_way.append((wire.all_to_all(rows, table[me], receive, f"turn {turn}", out), expected))
        while len(under_way) > order.randrange(1, 6):
            result, wanted = under_way.pop(order.randrange(len(under_way)))
            assert torch.equal(result.get(), wanted)
    for result, wanted in under_way:
        assert torch.equal(result.get(), wanted)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_everything_arrives_where_it_belongs(ranks: int) -> None:
    run_ranks(ranks, storm, 40, ranks)


Call = tuple[str, int, int, float]


def calls_of(mesh: Mesh, count: int, all_sent: Path | None = None) -> list[Call]:
    """What one exchange of `count` floats per peer asks of torch: (name, peer, tag, seconds).

    With `all_sent`, which rank 0 makes when rank 1 has all from it, rank 1 does not sign before.
    """
    calls: list[Call] = []
    real = {name: getattr(dist, name) for name in ("irecv", "isend")}

    def noted(name: str) -> Any:
        def call(tensor: torch.Tensor, peer: int, *, group: Any = None, tag: int) -> Any:
            if all_sent is not None and mesh.rank == 1 and (name, tag) == ("isend", ACK):
                await_file(all_sent)
                time.sleep(0.3)  # who does not wait for it would go on meanwhile
            calls.append((name, peer, tag, time.monotonic()))
            sent = [call[:3] for call in calls].count(("isend", 1, TAG))
            if all_sent is not None and mesh.rank == 0 and sent == 2:
                all_sent.touch()
            return real[name](tensor, peer, group=group, tag=tag)

        return call

    gloo_pairs.dist = type("Noted", (), {name: staticmethod(noted(name)) for name in real})
    P = mesh.num_ranks
    transport(mesh).all_to_all(torch.ones(count * P), [count] * P, [count] * P, "rows").get()
    return calls


def test_ready_to_receive_before_sending() -> None:
    for calls in run_ranks(4, calls_of, LARGE):
        assert [name for name, _, tag, _ in calls if tag == TAG] == ["irecv"] * 6 + ["isend"] * 6


def test_the_next_peer_has_its_turn_when_the_one_before_has_signed(tmp_path: Path) -> None:
    """And the rest does not wait for the receipt: else nobody would ever sign here."""
    sender, receiver, _ = run_ranks(3, calls_of, LARGE, tmp_path / "sent")
    to_second = [when for name, peer, tag, when in sender if (name, peer, tag) == ("isend", 2, TAG)]
    signed = [when for name, peer, tag, when in receiver if (name, peer, tag) == ("isend", 0, ACK)]
    assert len(to_second) == 2
    assert min(to_second) > min(signed), "rank 2 waited until rank 1 had signed"


def test_few_rows_are_sent_whole_and_nobody_signs() -> None:
    for calls in run_ranks(3, calls_of, LARGE // 4 - 1):
        assert sorted(name for name, *_ in calls) == ["irecv"] * 2 + ["isend"] * 2
        assert {tag for _, _, tag, _ in calls} == {TAG}


def third_is_sent(mesh: Mesh, file: Path) -> None:
    """Rank 1 sends nothing before rank 0 has sent a third time."""
    sent: list[int] = []

    def isend(tensor: torch.Tensor, peer: int, *, group: Any = None, tag: int) -> Any:
        if tag == TAG:
            if mesh.rank == 1 and not sent:
                await_file(file)
            sent.append(peer)
            if mesh.rank == 0 and len(sent) == 5:  # each is sent in two parts
                file.touch()
        return real(tensor, peer, group=group, tag=tag)

    real = dist.isend
    gloo_pairs.dist = type("Slow", (), {"isend": staticmethod(isend), "irecv": staticmethod(dist.irecv)})
    mesh.barrier()
    wire = transport(mesh)
    results = [wire.all_to_all(torch.ones(2 * LARGE), [LARGE] * 2, [LARGE] * 2, "rows") for _ in range(3)]
    for result in results:
        result.get()


def test_who_has_not_sent_yet_signs_all_the_same(tmp_path: Path) -> None:
    run_ranks(2, third_is_sent, tmp_path / "sent")


def dies(mesh: Mesh) -> None:
    wire = transport(mesh)
    n = LARGE
    wire.all_to_all(torch.ones(3 * n), [n] * 3, [n] * 3, "warm up").get()
    if mesh.rank == 2:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    results = [wire.all_to_all(torch.ones(3 * n), [n] * 3, [n] * 3, f"dispatch {k}") for k in range(3)]
    for result in results:
        result.get()


def test_a_rank_that_dies_is_named_by_all_others() -> None:
    outcomes = run_ranks_raw(3, dies, collective_deadline_s=4, deadline_s=40)
    for rank in (0, 1):
        assert not outcomes[rank][0]
        assert re.search(r"dispatch \d", outcomes[rank][1])
        assert re.search(r"rank[s]? 2", outcomes[rank][1])


def threads_left(mesh: Mesh) -> tuple[int, int]:
    before = threading.active_count()
    storm(mesh, 5, 1)
    while_used = threading.active_count() - before
    mesh._kept.clear()
    gc.collect()
    until = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    return while_used, threading.active_count() - before


def test_its_threads_end_with_it() -> None:
    assert run_ranks(2, threads_left) == [(2, 0)] * 2
