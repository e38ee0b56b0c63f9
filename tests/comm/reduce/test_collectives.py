"""Collectives on a lane over peer memory: as torch's, asynchronous, recorded honestly, with a way out."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_signals import await_file

from moeclipse.comm.async_ops.lane import InFlight
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.reduce import all_reduce
from moeclipse.comm.reduce.collectives import Collectives, PeerCollectives, collectives
from moeclipse.core.errors import ConfigError, DeadlineError
from moeclipse.testing.run_ranks import run_ranks, run_ranks_raw

pytestmark = pytest.mark.peer_memory

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def by_peers(wire: Any, call: Callable[[], InFlight[torch.Tensor]]) -> InFlight[torch.Tensor] | None:
    """What `call` launched, if it went over peer memory."""
    before = wire._open
    launched = call()
    return launched if wire._open is not before else None


def as_torch_does(mesh: Mesh, seed: int) -> int:
    """Random calls, left open for a while; integers, whose sums are exact in every dtype and order."""
    P, lots, own = mesh.num_ranks, random.Random(seed), random.Random(100 * seed + mesh.rank)
    plain = Collectives(mesh.grads, mesh.world)
    wire = collectives(mesh, mesh.world, mesh.grads, "on")
    checked = 0
    for turn in range(25):
        dtype, length = lots.choice(DTYPES), lots.choice([1, 3, 403, 5000])
        x = torch.randint(-8, 9, (length,), generator=torch.Generator().manual_seed(turn * 8 + mesh.rank))
        x, more = x.to(dtype), [lots.randrange(0, length // P + 1) for _ in range(P - 1)]
        bounds = [0, *(sum(more[: k + 1]) for k in range(P - 1)), length]
        kind = lots.choice(["gather", "all_reduce", "reduce_scatter", "all_gather_shards"])
        given = (bounds,) if kind in ("reduce_scatter", "all_gather_shards") else ()
        expected = getattr(plain, kind)(x.clone(), *given, "gloo").get()
        mine = x.clone()
        got = by_peers(wire, lambda: getattr(wire, kind)(mine, *given, f"{kind}, turn {turn}"))  # noqa: B023
        assert got is not None
        if own.random() < 0.2:
            time.sleep(own.random() * 0.003)
        if lots.random() < 0.6:  # else the next call completes it
            assert torch.equal(got.get(), expected), (kind, length, dtype)
            assert got.get() is got.get()
        else:
            following = wire.all_reduce(torch.ones(7), "the next call")
            assert torch.equal(following.get(), torch.full((7,), float(P)))
            assert torch.equal(got.get(), expected), (kind, length, dtype)
        checked += 1
    return checked


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_they_equal_those_of_torch(num_ranks: int) -> None:
    assert run_ranks(num_ranks, as_torch_does, num_ranks) == [25] * num_ranks


def shown_at_launch(mesh: Mesh, arrived: Path) -> tuple[float, float]:
    """A peer gets its sum while this rank computes; waiting counts as communication, reading does not."""
    wire = collectives(mesh, mesh.world, mesh.grads, "on")
    wire.all_reduce(torch.ones(1), "warm up").get()
    mesh.recorder.begin_step()
    got = wire.all_reduce(torch.ones(1000), "gradients")
    begun = time.monotonic()
    if mesh.rank == 0:
        await_file(arrived)
        time.sleep(2.0)
    away = time.monotonic() - begun
    got.get()
    arrived.touch()
    ((_, _, launched, done),) = mesh.recorder.end_step().transfers
    return done - launched, away


def test_a_rank_that_computes_does_not_hold_up_its_peers(tmp_path: Path) -> None:
    (seconds, away), _ = run_ranks(2, shown_at_launch, tmp_path / "arrived")
    assert seconds < 0.75 * away, "what lay ready is not sold as a long transfer that was hidden"


def left_to_torch(mesh: Mesh) -> str:
    wire = collectives(mesh, mesh.world, mesh.grads, "auto", max_bytes=100)
    assert isinstance(wire, PeerCollectives)
    assert not by_peers(wire, lambda: wire.all_reduce(torch.ones(26), "too large"))
    assert not by_peers(wire, lambda: wire.gather(torch.ones(4, dtype=torch.int64), "another dtype"))
    assert not by_peers(wire, lambda: wire.all_reduce(torch.ones(0), "nothing"))
    assert by_peers(wire, lambda: wire.all_reduce(torch.ones(25), "small"))
    assert type(collectives(mesh, mesh.world, mesh.grads, "off")) is Collectives
    mesh._kept.clear()
    all_reduce.MAX_RANKS = 1  # as if the group were too large
    assert type(collectives(mesh, mesh.world, mesh.grads, "auto")) is Collectives
    with pytest.raises(ConfigError, match=r"parallel.peer = 'on', but ranks \(0, 1\) cannot use peer memory"):
        collectives(mesh, mesh.world, mesh.grads, "on")
    return "as it should be"


def test_what_does_not_apply_goes_over_torch() -> None:
    assert run_ranks(2, left_to_torch) == ["as it should be"] * 2


def alone(mesh: Mesh) -> None:
    wire = collectives(mesh, mesh.world, mesh.grads, "on")
    wire.all_reduce(torch.ones(3), "step 1").get()
    if mesh.rank == 1:
        time.sleep(3)
        return
    wire.all_reduce(torch.ones(3), "all-reduce of d_x, layer 3").get()


def test_a_missing_rank_is_named_at_the_deadline() -> None:
    ok, text = run_ranks_raw(2, alone, collective_deadline_s=1.0)[0]
    assert not ok
    assert DeadlineError.__name__ in text
    assert "rank 0 waited 1 s in all-reduce of d_x, layer 3: rank 1 did not arrive" in text
