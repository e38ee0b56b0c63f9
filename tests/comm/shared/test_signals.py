"""Posts and waits: where their fences stand, and what they hand over between processes that never stop."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from order import Rules, Watched

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.shared.host import PeerMemory
from moeclipse.comm.shared.signals import LINE, WORD, Peers, Signals
from moeclipse.testing.run_ranks import run_ranks

pytestmark = pytest.mark.peer_memory

MINE, THEIRS, FIRST_SLEEPER = 0, 1, 2


def watched() -> tuple[Signals, Rules, list[str]]:
    """Signals of rank 0 of 2, and what they do."""
    words: Any = memoryview(bytearray(LINE * 4)).cast("Q")
    peers = Peers((0, 1), 0, (None, None), Mesh.single().watch)
    signals = Signals(words, 0, peers, 3, FIRST_SLEEPER)
    rules = Rules(heard={THEIRS}, said={MINE}, sleepers={FIRST_SLEEPER, FIRST_SLEEPER + 1})
    fast: Any = Watched(words, rules)
    signals.words, signals.fence = fast, rules.fence
    return signals, rules, rules.events


def test_a_post_comes_behind_a_release_and_sleepers_behind_a_full_fence() -> None:
    signals, _, events = watched()
    signals.post(MINE, 1)
    assert events == ["release", "store", "full", "look"]


def test_a_wait_ends_in_an_acquire() -> None:
    signals, rules, events = watched()
    signals.words[THEIRS * WORD] = 1
    events.clear()
    signals.wait(THEIRS, 1, 1, "test")
    assert events == ["load", "acquire"]
    assert signals.soon(THEIRS, 1, 0.0)
    rules.touch()


def test_a_sleeper_says_so_before_the_kernel_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    signals, _, events = watched()
    asleep = (FIRST_SLEEPER + signals.peers.index) * WORD

    def system_call(*_: Any) -> None:
        assert signals.words[asleep] == 1
        events.append("sleep")

    monkeypatch.setattr(signals, "_call", system_call)
    assert not signals.soon(THEIRS, 1, 0.0)
    assert events[events.index("full") :] == ["full", "look", "sleep", "load", "acquire"]
    assert signals.words[asleep] == 0


SLOTS, LINES = 8, 4


def hand_over(mesh: Mesh, seconds: float) -> int:
    """Numbers through slots of some lines each, as fast as both ends can: no slot holds an older number, nor
    one that came too early. The last number says stop."""
    peer = 1 - mesh.rank
    with PeerMemory.open(mesh.world, mesh.watch, num_bytes=SLOTS * LINES * LINE, num_words=2) as memory:
        signals, slots = memory.signals, memory.view(0, torch.int64, 0, SLOTS * LINES * WORD).numpy()
        data = memoryview(slots)
        places = [[(slot * LINES + line) * WORD for line in range(LINES)] for slot in range(SLOTS)]
        number, until = 0, time.monotonic() + seconds
        while True:
            number += 1
            places_now = places[number % SLOTS]
            if mesh.rank == 0:
                signals.wait(peer, max(0, number - SLOTS), peer, "test")
                last = number % 100 == 0 and time.monotonic() > until
                for place in places_now:
                    data[place] = -number if last else number
                signals.post(0, number)
            else:
                signals.wait(peer, number, peer, "test")
                found = [data[place] for place in places_now]
                last = found[0] < 0
                assert found == [-number if last else number] * LINES
                signals.post(1, number)
            if last:
                return number


def test_numbers_are_handed_over_without_a_pause() -> None:
    first, second = run_ranks(2, hand_over, 1.0)
    assert first == second > 100
