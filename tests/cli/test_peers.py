"""What doctor says about peer memory: two forked ranks really try it."""

from __future__ import annotations

import multiprocessing
import time

import pytest

from moeclipse.cli import peers
from moeclipse.cli.peers import try_peers


@pytest.mark.peer_memory
def test_two_ranks_really_share_memory() -> None:
    able, text = try_peers()
    assert able, text
    assert "ranks share memory; two of them reduced 64 KB in " in text


def test_a_rank_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no such memory\nand more lines")

    monkeypatch.setattr("torch.distributed.init_process_group", refuse)
    assert try_peers() == (False, "no such memory")


def test_ranks_that_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(multiprocessing.active_children())
    monkeypatch.setattr(peers, "_reduce", lambda *_: time.sleep(60))
    assert try_peers(0.5) == (False, "no answer in 0.5 s")
    for child in set(multiprocessing.active_children()) - before:
        child.join(5)
        assert not child.is_alive(), "nobody is left behind"


def test_what_cannot_be_had_is_said_with_the_reason() -> None:
    found = {item.name: item for item in peers.peers((False, "peer memory needs 8.1 MiB in /dev/shm"))}
    item = found["all-reduce"]
    assert (item.state, item.value) == ("limited", "peer memory needs 8.1 MiB in /dev/shm")
    assert "torch.distributed instead" in item.advice
    assert found["cpu"].state == "info"
    assert found["cpu"].value
