"""A rank that dies, fails or hangs: the others end within the deadline and name it."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from moeclipse.comm import failure
from moeclipse.comm.async_ops.lane import all_to_all
from moeclipse.comm.failure import Cause, Watch
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.watch.culprits import Stand
from moeclipse.testing.run_ranks import run_ranks_raw


def exchange(mesh: Mesh, label: str) -> None:
    n = mesh.num_ranks
    all_to_all(mesh.a2a, mesh.experts, torch.zeros(n, 4), [1] * n, [1] * n, label).get()


def fail(mesh: Mesh, how: str) -> None:
    exchange(mesh, "dispatch of rows, layer 0, microbatch 0")
    if mesh.rank == 1:
        if how == "raise":
            raise ValueError("the disk of rank 1 is full")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    exchange(mesh, "combine of rows, layer 3, microbatch 1")


def others(how: str, deadline_s: float = 300.0) -> tuple[str, float]:
    begun = time.monotonic()
    outcomes = run_ranks_raw(3, fail, how, collective_deadline_s=deadline_s, deadline_s=200)
    texts = [text for rank, (ok, text) in enumerate(outcomes) if rank != 1 and not ok]
    assert len(texts) == 2, outcomes
    return texts[0].strip().splitlines()[-1], time.monotonic() - begun


def test_others_fail_with_the_message_of_the_rank_that_failed() -> None:
    text, seconds = others("raise")
    assert "rank 1 failed: ValueError: the disk of rank 1 is full" in text
    assert seconds < 150


def test_a_killed_rank_is_noticed_within_seconds() -> None:
    text, seconds = others("kill")
    assert "rank 0 lost rank 1 in combine of rows, layer 3, microbatch 1: " in text
    assert seconds < 150


def named(mesh: Mesh) -> str:
    try:
        if mesh.rank == 1:
            time.sleep(6)
            return "late"
        exchange(mesh, "combine of rows, layer 3, microbatch 1")
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_the_deadline_names_rank_collective_layer_and_microbatch() -> None:
    outcomes = run_ranks_raw(3, named, collective_deadline_s=2.0, deadline_s=30)
    assert outcomes[0] == outcomes[2], "all ranks give the same cause"
    ok, text = outcomes[0]
    assert ok, text
    assert text[:7] in ("rank 0 ", "rank 2 ")
    assert text[7:] == "waited 2 s in combine of rows, layer 3, microbatch 1: rank 1 did not arrive"


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> list[Watch]:
    """Of three ranks in one process, over one store."""
    monkeypatch.setattr(failure, "GRACE_S", 0.15)
    monkeypatch.setattr(failure, "SIGN_S", 0.15)
    store = dist.HashStore()
    return [Watch(store=store, rank=rank, num_ranks=3, deadline_s=4) for rank in range(3)]


def test_the_first_message_counts(watches: list[Watch]) -> None:
    assert watches[0].first_cause() is None
    watches[2].publish("the disk is full")
    watches[1].publish("rank 2 is gone")
    assert watches[0].first_cause() == Cause(rank=2, text="the disk is full")
    broken = RuntimeError("connection reset")
    assert str(watches[0].explain("rows", (0, 1, 2), broken)) == "rank 2 failed: the disk is full"


def test_who_is_second_repeats_the_words_of_the_first(watches: list[Watch]) -> None:
    assert str(watches[2].verdict("rank 2 waited")) == "rank 2 waited"
    assert str(watches[0].verdict("rank 0 waited")) == "rank 2 waited"


FORGED = [b"", b"x", b"\xff\xfe", b'{"rank": 2, "text": "the disk is full"}', b"0" * 64 + b' {"rank": 2}']


@pytest.mark.parametrize("words", FORGED)
def test_what_no_rank_has_signed_ends_nobody(
    watches: list[Watch], capsys: pytest.CaptureFixture, words: bytes
) -> None:
    own = [replace(watch, secret=b"of this run") for watch in watches]
    store = own[0].store
    assert store is not None
    stranger = replace(watches[2], secret=b"guessed")
    stranger.publish("a forged failure")
    stranger.sign(Stand(waits=True, op="rows"))
    for key in ("failure/first", "alarm", "waiting/2"):
        if words:
            store.set(key, words)
        assert own[0].first_cause() is None
        assert own[0].told() is None
    assert not own[0].alarmed()
    assert 2 not in own[0].stands((1, 2))
    assert capsys.readouterr().err.count("no rank of this run has signed") == 3, "each is told once"
    assert own[1].publish("the disk is full"), "a rank's own words take the place of nobody's"
    assert own[0].first_cause() == Cause(rank=1, text="the disk is full")
    assert not own[2].publish("too late")


def test_words_are_signed_for_their_own_place(watches: list[Watch]) -> None:
    own = [replace(watch, secret=b"of this run") for watch in watches]
    store = own[0].store
    assert store is not None
    own[1].sign(Stand(waits=False))
    store.set("waiting/2", store.get("waiting/1"))
    assert sorted(own[0].stands((1, 2))) == [0, 1]


def agreed(mesh: Mesh) -> str:
    return mesh.watch.secret.hex()


def test_ranks_agree_on_a_secret_that_is_not_in_the_store() -> None:
    outcomes = run_ranks_raw(2, agreed, deadline_s=60)
    assert outcomes[0] == outcomes[1]
    assert len(bytes.fromhex(outcomes[0][1])) == 32
    assert run_ranks_raw(2, agreed, deadline_s=60) != outcomes, "it is drawn anew in every start"


def test_who_gives_no_sign_is_lost(watches: list[Watch]) -> None:
    watches[1].sign(Stand(waits=True, op="rows"))
    error = watches[0].explain("rows", (0, 1, 2), RuntimeError("reset. This is typically the network"))
    assert str(error) == "rank 0 lost rank 2 in rows: reset."
    watches[0].publish("my own words")
    error = watches[0].explain("rows", (0, 1), RuntimeError("reset"))
    assert str(error) == "rank 0 lost a peer in rows: reset", "its own failure explains nothing"


@pytest.mark.parametrize(
    ("signs", "named"),
    [
        ({}, "rank 1 did not arrive; rank 2 did not arrive"),
        ({1: "rows"}, "rank 2 did not arrive"),
        ({1: "rows", 2: "gradients"}, "rank 2 waits in gradients"),
        ({1: "rows", 2: "rows"}, "all ranks arrived, so the network stalled"),
    ],
)
def test_at_the_deadline_everyone_says_where_they_stand(
    watches: list[Watch], signs: dict[int, str], named: str
) -> None:
    for rank, label in signs.items():
        watches[rank].sign(Stand(waits=True, op=label))
    error = watches[0].explain("rows", (0, 1, 2), RuntimeError("Timed out waiting 4000ms"))
    assert str(error) == f"rank 0 waited 4 s in rows: {named}"


@pytest.mark.parametrize(
    ("label", "named"),
    [
        ("rows", "rank 2 cannot be reached by the others: the network there is cut"),
        ("gradients", "rank 2 cannot be reached by the others: the network there is cut"),
        ("", "rank 2 did not arrive"),
    ],
)
def test_where_all_ranks_wait_the_network_is_asked(
    watches: list[Watch], monkeypatch: pytest.MonkeyPatch, label: str, named: str
) -> None:
    asked: list[dict[int, str]] = []
    monkeypatch.setattr(failure, "unreachable", lambda known: asked.append(known) or [2])
    for rank in (1, 2):
        there = Stand(waits=True, op="rows" if rank == 1 else label, address=f"10.0.0.{rank}")
        if there.op:
            watches[rank].sign(there)
    error = watches[0].explain("rows", (0, 1, 2), RuntimeError("Timed out waiting 4000ms"))
    assert str(error) == f"rank 0 waited 4 s in rows: {named}"
    assert asked == ([{1: "10.0.0.1", 2: "10.0.0.2"}] if label else []), "of a silent rank all is known"


def test_a_store_that_died_with_its_host_adds_no_failure_of_its_own(watches: list[Watch]) -> None:
    class Dead:
        def __getattr__(self, name: str) -> None:
            raise RuntimeError("connection refused")

    watch = replace(watches[0], store=Dead())
    watch.publish("out of memory")
    assert watch.first_cause() is None
    assert str(watch.explain("rows", (0, 1), RuntimeError("reset"))) == "rank 0 lost rank 1 in rows: reset"


def test_alone_there_is_nobody_to_ask() -> None:
    watch = Watch(store=None, rank=0, num_ranks=1, deadline_s=3)
    watch.publish("nobody hears")
    assert watch.first_cause() is None
    assert str(watch.explain("rows", (0,), TimeoutError("timed out"))) == "rank 0 waited 3 s in rows"
