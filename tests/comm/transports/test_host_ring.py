"""All-to-all over peer memory: uneven, empty, larger than the rings, several at once, and killed."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peer_files import left_over
from rank_signals import await_file

from moeclipse.comm.async_ops.lane import all_to_all
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.transports.host_ring import PeerExchange, PeerTransport
from moeclipse.comm.transports.transport import Transport
from moeclipse.core.errors import CommError, ConfigError
from moeclipse.testing.run_ranks import run_ranks, run_ranks_raw

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]


def uneven(mesh: Mesh, dtype: torch.dtype) -> torch.Tensor:
    """Rank r sends p rows of value 10 r + p to each peer p: nothing at all to rank 0."""
    send = list(range(mesh.num_ranks))
    rows = torch.cat([torch.full((p, 2), 10 * mesh.rank + p) for p in send]).to(dtype)
    with PeerExchange.open(mesh.experts, mesh.watch) as exchange:
        got = exchange.all_to_all(mesh.a2a, mesh.experts, rows, send, [mesh.rank] * mesh.num_ranks, "test")
        return got.get()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_arrive_where_they_belong(dtype: torch.dtype) -> None:
    for rank, rows in enumerate(run_ranks(3, uneven, dtype)):
        expected = torch.tensor([10 * source + rank for source in range(3) for _ in range(rank)]).to(dtype)
        assert rows.dtype == dtype
        assert rows.shape == (3 * rank, 2)
        assert torch.equal(rows[:, 0], expected)


def storm(mesh: Mesh, buffer_bytes: int, seed: int) -> int:
    """Random counts, several exchanges under way, got in any order, with stragglers; as torch does it."""
    P, lots, own = mesh.num_ranks, random.Random(seed), random.Random(100 * seed + mesh.rank)
    moved = 0
    with PeerExchange.open(mesh.experts, mesh.watch, buffer_bytes=buffer_bytes) as exchange:
        for turn in range(25):
            depth = lots.choice([1, 2, 4])
            results = []
            for k in range(depth):
                counts = [[lots.choice([0, 0, 1, 7, 300]) for _ in range(P)] for _ in range(P)]
                send, receive = counts[mesh.rank], [row[mesh.rank] for row in counts]
                width = lots.choice([1, 3])
                rows = torch.randn(sum(send), width).to(lots.choice([torch.float32, torch.bfloat16]))
                expected = all_to_all(mesh.a2a, mesh.experts, rows, send, receive, "gloo").get()
                if own.random() < 0.1:
                    time.sleep(own.random() * 0.003)
                label = f"turn {turn}, exchange {k}"
                got = exchange.all_to_all(mesh.a2a, mesh.experts, rows, send, receive, label)
                results.append((got, expected))
            own.shuffle(results)  # every rank in its own order
            for got, expected in results:
                assert torch.equal(got.get(), expected)
                assert got.get() is got.get(), "getting twice waits once"
                moved += len(expected)
    return moved


@pytest.mark.parametrize(("num_ranks", "buffer_bytes"), [(2, 64), (2, 1 << 20), (3, 1000), (4, 5000)])
def test_it_equals_torch_whatever_fits_into_the_rings(num_ranks: int, buffer_bytes: int) -> None:
    assert min(run_ranks(num_ranks, storm, buffer_bytes, 1)) > 0


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8])
def test_storms(num_ranks: int) -> None:
    for seed, buffer_bytes in enumerate((64, 1000, 1 << 16, 1 << 20)):
        run_ranks(num_ranks, storm, buffer_bytes, 10 * num_ranks + seed, deadline_s=300)


def direct(mesh: Mesh) -> list[int]:
    """Large results lie in peer memory, stay what they are while they are held, and make room when not."""
    P, rows = mesh.num_ranks, torch.arange(1 << 16).float().view(-1, 16) + 1e6 * mesh.rank
    counts = [len(rows) // P] * P
    expected = all_to_all(mesh.a2a, mesh.experts, rows, counts, counts, "gloo").get()
    inside = []
    with PeerExchange.open(mesh.experts, mesh.watch, arena_bytes=600_000) as exchange:
        arena = exchange._arena
        assert arena is not None
        held = []
        for turn in range(12):
            if turn == 6:
                held.clear()
            if turn % 3 == mesh.rank:
                time.sleep(0.003)
            got = exchange.all_to_all(mesh.a2a, mesh.experts, rows + turn, counts, counts, "test").get()
            inside.append(arena.place_of(got) is not None)
            held.append((got, turn))
            assert all(torch.equal(kept, expected + t) for kept, t in held)
        # Into a result that was given back, as a layer may keep it.
        exchange.all_to_all(mesh.a2a, mesh.experts, rows - 5, counts, counts, "test", held[0][0]).get()
        assert torch.equal(held[0][0], expected - 5)
        mesh.barrier()
    assert torch.equal(held[0][0], expected - 5), "results outlive the exchange"
    return [k for k, yes in enumerate(inside) if yes]


@pytest.mark.peer_memory
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_large_results_lie_in_peer_memory_while_there_is_room(num_ranks: int) -> None:
    assert run_ranks(num_ranks, direct) == [[0, 1, 6, 7]] * num_ranks


def ways(mesh: Mesh) -> int:
    """Rank 1 comes when rank 0 has said where it wants its rows."""
    rows = torch.ones(1 << 16)
    counts = [len(rows) // 2] * 2
    with PeerExchange.open(mesh.experts, mesh.watch) as exchange:
        mesh.barrier()
        if mesh.rank == 1:
            time.sleep(0.3)
        got = exchange.all_to_all(mesh.a2a, mesh.experts, rows, counts, counts, "test").get()
        assert torch.equal(got, rows)
        return exchange._sends[0].position


@pytest.mark.peer_memory
def test_who_comes_first_does_not_wait_and_who_comes_later_writes_where_rows_belong() -> None:
    assert run_ranks(2, ways) == [1 << 17, 1]


def crowded_out(mesh: Mesh) -> bool:
    """There is room for the rings alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=20 << 20, f_frsize=1))
        exchange = PeerExchange.open(mesh.experts, mesh.watch)
    with exchange:
        rows = torch.ones(1 << 16, 2)
        got = exchange.all_to_all(mesh.a2a, mesh.experts, rows, [1 << 15] * 2, [1 << 15] * 2, "test")
        assert torch.equal(got.get(), rows)
        return exchange._arena is None and not exchange.obstacle


@pytest.mark.peer_memory
def test_rings_suffice() -> None:
    assert run_ranks(2, crowded_out) == [True, True]


def beside(mesh: Mesh, arrived: Path) -> None:
    """Rows that fit leave at launch: a peer gets them while this rank is away."""
    P = mesh.num_ranks
    with PeerExchange.open(mesh.experts, mesh.watch) as exchange:
        rows = torch.ones(2 * P, 100)
        got = exchange.all_to_all(mesh.a2a, mesh.experts, rows, [2] * P, [2] * P, "test")
        if mesh.rank == 0:
            await_file(arrived)
        assert got.get().sum() == 200 * P
        arrived.touch()
        mesh.barrier()


def test_a_rank_that_computes_does_not_hold_up_its_peers(tmp_path: Path) -> None:
    run_ranks(2, beside, tmp_path / "arrived")


def records(mesh: Mesh) -> tuple[list[str], bool, int]:
    """Rank 1 comes first and has to wait; when rank 0 wants its rows, they lie ready."""
    with PeerExchange.open(mesh.experts, mesh.watch) as exchange:
        mesh.barrier()
        mesh.recorder.begin_step()
        if mesh.rank == 0:
            time.sleep(0.3)
        rows = torch.ones(4, 3)
        exchange.all_to_all(mesh.a2a, mesh.experts, rows, [2, 2], [2, 2], "dispatch, layer 0").get()
        stamps = mesh.recorder.end_step()
    group, label, launched, done = stamps.transfers[0]
    return [group, label], launched < done, len(stamps.waits)


@pytest.mark.peer_memory
def test_transfers_are_recorded_as_any_other_and_what_lay_ready_as_none() -> None:
    name = ["experts", "dispatch, layer 0"]
    assert run_ranks(2, records) == [(name, False, 0), (name, True, 1)]


def wired(mesh: Mesh) -> bool:
    """As the MoE layer calls it, into memory that is there already."""
    with PeerExchange.open(mesh.experts, mesh.watch) as exchange:
        transport: Transport = PeerTransport(mesh.a2a, exchange)
        out = torch.empty(4, 3)
        got = transport.all_to_all(torch.full((4, 3), 1.0 + mesh.rank), [2, 2], [2, 2], "test", out)
        assert got.get().tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 2
        with pytest.raises(
            ConfigError, match=r"out is torch.float32 \(4, 3\), expected torch.float64 \(4, 3\)"
        ):
            transport.all_to_all(torch.ones(4, 3).double(), [2, 2], [2, 2], "test", out)
        return got.get() is out


@pytest.mark.peer_memory
def test_it_is_a_transport() -> None:
    assert run_ranks(2, wired) == [True, True]


def refused(mesh: Mesh) -> None:
    with PeerExchange.open(mesh.experts, mesh.watch) as exchange:
        rows = torch.ones(4, 3)
        call = exchange.all_to_all
        with pytest.raises(ConfigError, match=r"send_counts \[1, 2\] add up to 3, but there are 4 rows"):
            call(mesh.a2a, mesh.experts, rows, [1, 2], [2, 2], "test")
        with pytest.raises(ConfigError, match="must be 2 numbers >= 0 each"):
            call(mesh.a2a, mesh.experts, rows, [4], [2, 2], "test")
        with pytest.raises(ConfigError, match=f"rank {mesh.rank} sends 2 rows to itself but receives 1"):
            call(mesh.a2a, mesh.experts, rows, [2, 2], [1, 1], "test")
        with pytest.raises(ConfigError, match=r"this exchange serves ranks \(0, 1\), not"):
            call(mesh.a2a, Mesh.single().world, rows, [4], [4], "test")
        meta = torch.ones(4, 3, device="meta")
        assert "between processes on the CPU" in exchange.should_use(meta).why
    with pytest.raises(
        CommError, match="this exchange cannot be used any more: it was closed; open a new one"
    ):
        exchange.all_to_all(mesh.a2a, mesh.experts, rows, [2, 2], [2, 2], "test")
    with PeerExchange.open(mesh.experts, mesh.watch, buffer_bytes=1 << 50) as small:
        assert "in /dev/shm" in small.should_use(rows).why
        got = small.all_to_all(mesh.a2a, mesh.experts, rows, [2, 2], [2, 2], "through gloo")
        assert torch.equal(got.get(), rows)


@pytest.mark.peer_memory
def test_mistakes_are_named_and_gloo_takes_over() -> None:
    run_ranks(2, refused)


def test_one_rank_sends_nothing() -> None:
    mesh, rows = Mesh.single(), torch.ones(4, 2)
    with PeerExchange.open(mesh.experts, mesh.watch) as exchange:
        assert exchange.all_to_all(mesh.a2a, mesh.experts, rows, [4], [4], "test").get() is rows


def gone(mesh: Mesh, how: str) -> None:
    with PeerExchange.open(mesh.experts, mesh.watch, buffer_bytes=3000) as exchange:
        for turn in range(1000):
            if mesh.rank == 1 and turn == 20:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(3)
            rows = torch.ones(300, 10)
            exchange.all_to_all(mesh.a2a, mesh.experts, rows, [100] * 3, [100] * 3, f"turn {turn}").get()
            if mesh.rank == 1 and turn == 20:
                return


@pytest.mark.parametrize(
    ("how", "deadline_s", "texts"),
    [("killed", 300.0, ("lost rank 1", "rank 1")), ("late", 1.0, ("rank 1 did not arrive",))],
)
def test_a_missing_peer_is_named(how: str, deadline_s: float, texts: tuple[str, ...]) -> None:
    begun = time.monotonic()
    outcomes = run_ranks_raw(3, gone, how, collective_deadline_s=deadline_s)
    assert time.monotonic() - begun < 150
    for rank in (0, 2):
        ok, text = outcomes[rank]
        assert not ok
        assert any(expected in text.strip().splitlines()[-1] for expected in texts), text
    assert left_over() == []
