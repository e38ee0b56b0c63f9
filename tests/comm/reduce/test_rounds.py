"""Rounds: two areas that take turns, one barrier, and calls that are compared."""

from __future__ import annotations

import time

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.reduce import rounds as module
from moeclipse.comm.reduce.rounds import DTYPES, KINDS, WORDS_PER_RANK, PeerRounds
from moeclipse.comm.shared.host import PeerMemory
from moeclipse.core.errors import CommError
from moeclipse.testing.run_ranks import run_ranks

pytestmark = pytest.mark.peer_memory

COUNT = 16


def opened(mesh: Mesh) -> PeerRounds:
    words = WORDS_PER_RANK * mesh.num_ranks
    return PeerRounds(PeerMemory.open(mesh.world, mesh.watch, num_bytes=2 * 4096, num_words=words))


def turns(mesh: Mesh) -> int:
    """What is written for a round is read in it, while the next one is written already."""
    rounds = opened(mesh)
    for number in range(1, 40):
        assert rounds.number == number
        rounds.area(mesh.rank, torch.float32, COUNT).fill_(100 * number + mesh.rank)
        rounds.meet("test")
        rounds.area(mesh.rank, torch.float32, COUNT).fill_(-1)  # of the next round: the other area
        if mesh.rank == number % mesh.num_ranks:
            time.sleep(0.001)  # a slow reader
        for peer, shown in enumerate(rounds.shown(torch.float32, COUNT)):
            assert shown.eq(100 * number + peer).all()
    return rounds.number


def test_two_areas_are_enough() -> None:
    assert run_ranks(3, turns) == [40] * 3


def offsets(mesh: Mesh) -> None:
    rounds = opened(mesh)
    whole = rounds.area(mesh.rank, torch.float64, 512)
    whole.copy_(torch.arange(512.0))
    part = rounds.area(mesh.rank, torch.float64, 3, first=100)
    assert part.tolist() == [100, 101, 102]
    assert rounds.area(mesh.rank, torch.float64, 3, first=100) is part, "views are kept"
    module.MAX_VIEWS = 2
    assert rounds.area(mesh.rank, torch.float64, 4).tolist() == [0, 1, 2, 3]
    assert len(rounds._views) == 1, "not for ever"
    mesh.barrier()


def test_views_of_an_area() -> None:
    run_ranks(2, offsets)


def arrival(mesh: Mesh) -> list[bool]:
    rounds = opened(mesh)
    rounds.post()
    mesh.barrier()
    written = rounds.arrived
    rounds.arrive("test")
    return [written, rounds.arrived]


def test_whether_all_peers_have_written() -> None:
    assert run_ranks(2, arrival) == [[True, False]] * 2, "this round, and not yet the next"


def compared(mesh: Mesh, at_once: bool) -> str:
    rounds = opened(mesh)
    calls = [(0, torch.float32, 8), (1, torch.bfloat16, 9)]
    for call in ((0, torch.float64, 4), calls[mesh.rank]):  # the first one is the same everywhere
        try:
            if at_once:
                rounds.exchange(rounds.code_of(*call), "loss")
            else:
                rounds.announce(*call)
                rounds.meet("loss")
                rounds.compare("loss")
        except CommError as error:
            return str(error)
    return "nobody was told"


@pytest.mark.parametrize("at_once", [False, True])
def test_ranks_that_call_something_else_are_told_before_they_read(at_once: bool) -> None:
    first, second = run_ranks(2, compared, at_once)
    assert first == (
        "rank 0 is in loss with all-reduce of 8 x float32, but rank 1 came with reduce-scatter of "
        "9 x bfloat16; all ranks must make the same calls"
    )
    assert second.startswith("rank 1 is in loss with reduce-scatter of 9 x bfloat16, but rank 0 came with")


def codes(mesh: Mesh) -> int:
    rounds = opened(mesh)
    calls = [(k, t, n) for k in range(len(KINDS)) for t in DTYPES for n in (0, 1, 1 << 40)]
    return len({rounds.code_of(*call) for call in calls})


def test_every_call_has_a_word_of_its_own() -> None:
    assert run_ranks(2, codes) == [4 * 4 * 3] * 2
