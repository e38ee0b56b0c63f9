"""Posts and waits: where their fences stand, and what they hand over between processes that never stop."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any

import pytest
import torch
from order import Rules, Watched

from moeclipse.comm.failure import Cause
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.shared import signals as signals_module
from moeclipse.comm.shared.host import PeerMemory
from moeclipse.comm.shared.signals import LINE, WORD, Peers, Signals
from moeclipse.core.errors import CommError
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


class Clock:
    """Seconds that pass when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def waiting(monkeypatch: pytest.MonkeyPatch) -> tuple[Signals, Clock, list[int]]:
    """Signals of rank 3, which waits for rank 5 and sleeps without sleeping; and how often it looked."""
    signals, _, _ = watched()
    signals.peers.ranks = (3, 5)
    clock, asked = Clock(), list[int]()
    monkeypatch.setattr(signals_module, "time", clock)

    def nap(_futex: int, _address: int, kind: int, _seen: int, limit: Any, *_: Any) -> None:
        assert kind == signals_module.WAIT
        clock.now += limit[0] + limit[1] * 1e-9

    monkeypatch.setattr(signals, "_call", nap)
    monkeypatch.setattr(signals.peers, "raise_reported", lambda: asked.append(1))
    return signals, clock, asked


def test_a_peer_that_does_not_come_is_named_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    signals, clock, asked = waiting(monkeypatch)
    with pytest.raises(CommError, match=r"^rank 3 waited 60 s in loss: rank 5 did not arrive$"):
        signals.wait(THEIRS, 1, 1, "loss")
    assert 60 < clock.now - 100 < 61
    assert 100 < len(asked) < 260, "four times a second the store is asked who failed"
    both = signals.peers.missing([0, 1], "loss")
    assert str(both) == "rank 3 waited 60 s in loss: ranks 3, 5 did not arrive"


def test_a_peer_that_ended_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    signals, clock, _ = waiting(monkeypatch)
    monkeypatch.setattr(signals.peers, "ended", lambda _: True)
    with pytest.raises(CommError, match=r"^rank 3 lost rank 5 in loss: its process None ended$"):
        signals.wait(THEIRS, 1, 1, "loss")
    assert clock.now - 100 < 0.1


def test_a_peer_that_posted_and_left_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    signals, _, _ = waiting(monkeypatch)
    signals.words[THEIRS * WORD] = 1
    monkeypatch.setattr(signals.peers, "ended", lambda _: True)
    signals.look(THEIRS, 1, 1, 1000.0, "loss")


def test_what_a_rank_reported_is_told_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = Peers((0, 1), 0, (None, None), Mesh.single().watch)
    peers.raise_reported()
    monkeypatch.setattr(type(peers.watch), "first_cause", lambda _: Cause(rank=1, text="ValueError: bad row"))
    with pytest.raises(CommError, match=r"^rank 1 failed: ValueError: bad row$"):
        peers.raise_reported()
    monkeypatch.setattr(type(peers.watch), "first_cause", lambda _: Cause(rank=0, text="its own"))
    peers.raise_reported()


def test_a_process_that_is_gone_is_seen() -> None:
    child = subprocess.Popen(["sleep", "60"])
    peers = Peers((0, 1), 0, (os.getpid(), child.pid), Mesh.single().watch)
    assert not peers.ended(1)
    assert not peers.ended(0), "it does not watch itself"
    child.kill()
    until = time.monotonic() + 300
    while not peers.ended(1) and time.monotonic() < until:
        time.sleep(0.01)
    assert peers.ended(1), "a zombie counts as gone"
    child.wait()
    peers.close()
    assert not peers.ended(1), "nobody is watched any more"


def test_whoever_sleeps_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    signals, _, events = watched()
    woken: list[tuple[int, int]] = []
    monkeypatch.setattr(signals, "_call", lambda _futex, address, kind, *_: woken.append((address, kind)))
    signals.words[(FIRST_SLEEPER + 1) * WORD] = 2
    events.clear()
    signals.post(MINE, 1)
    assert woken == [(MINE * LINE, signals_module.WAKE)]
    assert signals.read(MINE) == 1
    signals.close()
    assert not signals.words
    signals._count_sleepers(1)  # closed meanwhile
