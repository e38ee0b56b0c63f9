"""Private names of torch that this room needs are there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from moeclipse.comm import private_torch
from moeclipse.comm.mesh import Mesh
from moeclipse.testing.run_ranks import run_ranks


def stored(mesh: Mesh) -> str:
    store = private_torch.default_store()
    assert isinstance(store, dist.Store)
    if mesh.rank == 0:
        store.set("from rank 0", "a word")
    return store.get("from rank 0").decode()


def test_the_store_that_started_the_group() -> None:
    assert run_ranks(2, stored) == ["a word"] * 2


def test_symmetric_memory_has_the_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import _symmetric_memory

    calls: list[Any] = []

    def empty(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        calls.append((size, dtype, device))
        return torch.empty(size, dtype=dtype)

    monkeypatch.setattr(_symmetric_memory, "empty", empty)  # fails where there is none
    monkeypatch.setattr(_symmetric_memory, "rendezvous", lambda own, group: (own.numel(), group))
    own = private_torch.symmetric_empty(12, torch.device("cuda", 1))
    assert calls == [((12,), torch.uint8, torch.device("cuda", 1))]
    handle: Any = "a group"
    assert private_torch.symmetric_rendezvous(own, handle) == (12, "a group")
