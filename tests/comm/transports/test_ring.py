"""Both ends of a flow in one process, taking turns in every order: what is sent arrives, and in all of them
the fences stand where processors that reorder memory need them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from order import Rules, Watched

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.shared.signals import WORD, Peers, Signals
from moeclipse.comm.transports import ring
from moeclipse.comm.transports.ring import OFFERS, WORDS_PER_FLOW, Receiver, RingPlace, Sender

pytestmark = pytest.mark.peer_memory

WRITTEN, TAKEN, OFFERED = 0, 1, set(range(2, 2 + OFFERS))
SLEEPERS = {WORDS_PER_FLOW, WORDS_PER_FLOW + 1}


@pytest.fixture(autouse=True, scope="module")
def copies_are_watched() -> Iterator[None]:
    copy = ring.memmove

    def watched(*arguments: Any) -> None:
        Ends.acting.touch()
        copy(*arguments)

    ring.memmove = watched
    yield
    ring.memmove = copy


class Ends:
    """A sender and a receiver, and the memory between them; `arena` follows the ring in one tensor."""

    acting: Rules
    """Of the end that last looked at a word: it is the one that copies."""

    def __init__(self, room: int, arena_bytes: int) -> None:
        self.memory = torch.zeros(room + arena_bytes, dtype=torch.uint8)
        self.arena = self.memory[room:]
        words = memoryview(bytearray(8 * WORD * (WORDS_PER_FLOW + 2))).cast("Q")
        signals = [
            Signals(words, 0, Peers((0, 1), rank, (None, None), Mesh.single().watch), 0, WORDS_PER_FLOW)
            for rank in (0, 1)
        ]
        self.watch(signals[0], heard={TAKEN, *OFFERED}, said={WRITTEN})
        self.watch(signals[1], heard={WRITTEN}, said={TAKEN, *OFFERED})
        base = self.memory.data_ptr()
        place = RingPlace(base, room, 0, base + room)
        self.sender, self.receiver = Sender(signals[0], place, 1), Receiver(signals[1], place, 0)

    def watch(self, signals: Signals, heard: set[int], said: set[int]) -> None:
        rules = Rules(heard=heard, said=said, sleepers=SLEEPERS)
        rules.note = lambda: setattr(Ends, "acting", rules)
        words: Any = Watched(signals.words, rules)
        signals.words, signals.fence = words, rules.fence


class Log:
    """What a message's owner knows."""

    def __init__(self) -> None:
        self.open_bytes = 0


@settings(deadline=None, max_examples=150)
@given(
    room=st.sampled_from([1, 7, 64, 1000]),
    piece=st.sampled_from([1, 5, 64, 10_000]),
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=25),
    offers=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 1 << 20),
)
def test_messages_arrive_whole_and_in_order(
    room: int, piece: int, sizes: list[int], offers: float, seed: int
) -> None:
    lots = random.Random(seed)
    ends = Ends(room, sum(sizes))
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    sent = torch.randint(1, 256, (bounds[-1],), dtype=torch.uint8)
    plain = torch.zeros_like(sent)
    parts = list(pairwise(bounds))
    direct = [lots.random() < offers for _ in parts]
    out, into = Log(), Log()
    before, ring.PIECE_BYTES = ring.PIECE_BYTES, piece
    try:
        to_send, to_expect = list(parts), list(enumerate(parts))
        idle = 0
        while to_send or to_expect or out.open_bytes or into.open_bytes:
            turn = lots.randrange(4)
            moved = False
            if turn == 0 and to_send:
                start, stop = to_send.pop(0)
                ends.sender.send(sent.data_ptr() + start, stop - start, out)
                moved = True
            elif turn == 1 and to_expect:
                k, (start, stop) = to_expect.pop(0)
                target = ends.arena if direct[k] else plain
                place = start if direct[k] else None
                ends.receiver.expect(target.data_ptr() + start, stop - start, into, place)
                moved = True
            elif turn == 2:
                moved = ends.sender.move()
            elif turn == 3:
                moved = ends.receiver.move()
            idle = 0 if moved else idle + 1
            assert idle < 1000, "stuck"
    finally:
        ring.PIECE_BYTES = before
    for k, (start, stop) in enumerate(parts):
        target = ends.arena if direct[k] else plain
        assert torch.equal(target[start:stop], sent[start:stop]), k
    assert not ends.sender.queue
    assert not ends.receiver.queue


def test_an_offer_that_comes_in_the_middle_takes_what_is_left() -> None:
    ends, log = Ends(64, 1000), Log()
    sent = torch.randint(1, 256, (300,), dtype=torch.uint8)
    ends.sender.send(sent.data_ptr(), 300, log)
    assert log.open_bytes == 300 - 64, "the ring is full"
    ends.receiver.expect(ends.arena.data_ptr() + 100, 300, log, 100)
    assert ends.sender.move()
    assert log.open_bytes == 300, "nothing is left to send"
    assert ends.receiver.move()
    assert log.open_bytes == 0
    assert torch.equal(ends.arena[100:400], sent)
    assert not ends.arena[:100].any()
    assert not ends.arena[400:].any()


def test_a_full_ring_holds_back_what_comes_next() -> None:
    ends, log = Ends(64, 0), Log()
    sent = torch.randint(1, 256, (8 * 16,), dtype=torch.uint8)
    got = torch.zeros_like(sent)
    for k in range(8):
        ends.sender.send(sent.data_ptr() + 16 * k, 16, log)
    assert log.open_bytes == 4 * 16, "four wait for room"
    for k in range(8):
        ends.receiver.expect(got.data_ptr() + 16 * k, 16, log, None)
    while log.open_bytes:
        assert ends.receiver.move() | ends.sender.move()
    assert torch.equal(got, sent)


def test_a_receiver_makes_few_offers() -> None:
    ends, log = Ends(64, 1000), Log()
    for k in range(OFFERS + 2):
        ends.receiver.expect(ends.arena.data_ptr() + 10 * k, 10, log, 10 * k)
    sent = torch.arange(1, 1 + 10 * (OFFERS + 2), dtype=torch.uint8)
    for k in range(OFFERS + 2):
        ends.sender.send(sent.data_ptr() + 10 * k, 10, log)
    assert ends.sender.position == OFFERS + 20, "one for each direct message, ten for each in the ring"
    ends.receiver.move()
    assert torch.equal(ends.arena[: sent.numel()], sent)


def test_an_empty_ring_is_used_from_its_front() -> None:
    """A ring that is always emptied stays in the first half of its memory."""
    ends, log = Ends(1000, 0), Log()
    got = torch.zeros(40, dtype=torch.uint8)
    for turn in range(200):
        sent = torch.full((40,), turn % 255 + 1, dtype=torch.uint8)
        ends.receiver.expect(got.data_ptr(), 40, log, None)
        ends.sender.send(sent.data_ptr(), 40, log)
        ends.receiver.move()
        assert torch.equal(got, sent)
    assert not ends.memory[600:].any()
