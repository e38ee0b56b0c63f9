"""JSON values that ranks tell each other: of any length, in order, within the deadline."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from moeclipse.comm import failure
from moeclipse.comm.gather_json import tell, tell_all
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CommError
from moeclipse.testing.run_ranks import run_ranks, run_ranks_raw

VALUES: list[Any] = [{"wörter": ["ein", None, 2.5]}, "", [1] * 300]


def test_every_value_is_padded_to_the_longest_and_cut_again() -> None:
    """Told by hand: what each of three members shares first is its length, then that many bytes and zeros."""
    texts = [json.dumps(value).encode() for value in VALUES]
    shapes: list[torch.Size] = []

    def share(mine: torch.Tensor) -> torch.Tensor:
        shapes.append(mine.shape)
        if len(shapes) == 1:
            return torch.tensor([[len(text)] for text in texts])
        rows = [text.ljust(max(map(len, texts)), b"\0") for text in texts]
        assert mine.numpy().tobytes() == rows[1]
        return torch.tensor([list(row) for row in rows], dtype=torch.uint8)

    assert tell(VALUES[1], "cpu", share) == VALUES
    assert shapes == [(1,), (max(map(len, texts)),)]


def told(mesh: Mesh) -> list[Any]:
    return tell_all(mesh.experts, mesh.watch, VALUES[mesh.rank], "what everyone wants")


def test_every_member_hears_all() -> None:
    assert run_ranks(3, told) == [VALUES] * 3


def late(mesh: Mesh) -> str:
    failure.GRACE_S = 0.2
    if mesh.rank == 1:
        time.sleep(1.2)
        return ""
    with pytest.raises(CommError) as caught:
        tell_all(mesh.experts, replace(mesh.watch, deadline_s=0.5), 0, "what everyone wants")
    return str(caught.value)


def test_who_says_nothing_is_named_at_the_deadline() -> None:
    ok, text = run_ranks_raw(2, late)[0]
    assert ok, text
    assert text == "rank 0 waited 0.5 s in what everyone wants: rank 1 did not arrive"
