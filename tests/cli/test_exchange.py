"""What the doctor says about NCCL; the exchange itself runs in tests/gpu/test_nccl.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from moeclipse.cli import exchange


def findings(answer: tuple[bool, str] | None) -> list[tuple[str, str]]:
    return [(found.state, found.value) for found in exchange.nccl(answer)]


def test_without_a_device_there_is_nothing_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert exchange.try_nccl() is None
    assert findings(None)[0][0] == "info"


def test_two_ranks_are_asked_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 1))
    asked = []
    for answer, state in (((True, "exchanged"), "works"), ((False, "no interface"), "broken")):
        monkeypatch.setattr(exchange, "ask_two_ranks", lambda *given, a=answer: asked.append(given) or a)
        assert exchange.try_nccl(5.0) == answer
        assert findings(answer) == [(state, f"2.29.1: {answer[1]}")]
    assert asked == [(exchange._exchange, 5.0)] * 2
