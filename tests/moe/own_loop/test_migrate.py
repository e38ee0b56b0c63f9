"""Experts between ranks: every transfer arrives as it was packed, and one that is not expected is named."""

from __future__ import annotations

import pytest
import torch

from moeclipse.balance.ownership import ExpertTransfer, Owner
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CommError
from moeclipse.moe.own_loop import migrate
from moeclipse.moe.own_loop.migrate import CANARY, exchange_experts, header, words
from moeclipse.testing.run_ranks import run_ranks

TRANSFERS = [
    ExpertTransfer(expert=expert, source=source, target=target, state=state)
    for expert, source, target, state in (
        *((5, 2, 0, False), (5, 2, 1, True), (0, 0, 1, False)),
        *((7, 1, 0, False), (3, 0, 1, True), (1, 2, 2, False)),
    )
]
"""Two from one rank to another, one to several, and one that stays; rank 2 gets nothing from others."""


def length(transfer: ExpertTransfer) -> int:
    return 8 * (1 + transfer.expert) * (3 if transfer.state else 1)


def content(transfer: ExpertTransfer) -> torch.Tensor:
    return (torch.arange(length(transfer)) + 10 * transfer.expert + transfer.state).to(torch.uint8)


def exchanged(mesh: Mesh) -> list[int]:
    packed: list[ExpertTransfer] = []

    def pack(transfer: ExpertTransfer) -> torch.Tensor:
        packed.append(transfer)
        return content(transfer)

    to = {"group": mesh.experts, "lane": mesh.a2a, "layer": 4, "updates": 9}
    found = exchange_experts(TRANSFERS, pack, length, **to)
    assert set(packed) == {transfer for transfer in TRANSFERS if transfer.source == mesh.rank}
    assert set(found) == {transfer for transfer in TRANSFERS if transfer.target == mesh.rank}
    for transfer, arrived in found.items():
        assert torch.equal(arrived, content(transfer)), transfer
    assert exchange_experts([], pack, length, **to) == {}
    return sorted(transfer.expert for transfer in found)


def test_every_expert_arrives_where_it_is_wanted() -> None:
    assert run_ranks(3, exchanged) == [[5, 7], [0, 3, 5], [1]]


def confused(mesh: Mesh) -> str:
    """Rank 2 thinks that it is one update further."""
    to = {"group": mesh.experts, "lane": mesh.a2a, "layer": 4, "updates": 9 + (mesh.rank == 2)}
    (moved,) = TRANSFERS[:1]
    if mesh.rank == moved.target:
        with pytest.raises(CommError) as told:
            exchange_experts([moved], content, length, **to)
        return str(told.value)
    assert exchange_experts([moved], content, length, **to) == {}
    return ""


def test_what_is_not_waited_for_is_named_with_its_sender() -> None:
    text = run_ranks(3, confused)[0]
    assert "rank 2 sent the weights of expert 5, layer 4, after 10 updates, 48 bytes" in text
    assert "rank 0 waits for the weights of expert 5, layer 4, after 9 updates" in text
    assert "no weight was changed here" in text


def test_labels_in_words() -> None:
    label = header(TRANSFERS[1], layer=2, updates=3, length=144)
    assert len(label) * 8 == migrate.HEADER
    assert label[0] == CANARY
    assert words(label) == "the optimizer state of expert 5, layer 2, after 3 updates, 144 bytes"
    assert words([0, *label[1:]]) == "bytes that hold no expert"
    old, new = (
        Owner(expert=5, members=(0,), rank=0, copy=0),
        Owner(expert=5, members=(0, 1, 2), rank=1, copy=0, part=1, parts=3),
    )
    part = ExpertTransfer(expert=5, source=0, target=1, state=True, owners=(old, new))
    told = "the optimizer state (from part 0 of 1, for part 1 of 3) of expert 5, layer 2, after 3 updates"
    assert words(header(part, layer=2, updates=3, length=144)) == f"{told}, 144 bytes"
