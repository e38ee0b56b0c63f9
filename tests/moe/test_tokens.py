"""The global microbatch as one rank sees it: where its tokens begin, and who shares them out."""

from __future__ import annotations

from dataclasses import replace

import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.moe.tokens import Tokens
from moeclipse.testing.run_ranks import run_ranks

SIZES = [5, 0, 9, 4]


def asked(mesh: Mesh) -> list[list[int]]:
    """(first, total, ranks) over all ranks and over those with different data; then what others told."""
    local = SIZES[mesh.rank]
    every, data = Tokens.of(mesh, local, step=3), Tokens.of(mesh, local, group=mesh.data)
    assert every.group == mesh.stage
    assert (every.step, every.microbatch) == (3, 0)
    assert Tokens(mesh=mesh, first=0, total=local).group == mesh.stage, "left out: all ranks of the stage"
    assert replace(every, microbatch=4).total == every.total, "a copy knows what was asked for"
    told = data.gather(torch.tensor([mesh.rank]), "test").get().flatten().tolist()
    return [[every.first, every.total], [data.first, data.total], told]


def test_parts_follow_each_other_in_rank_order() -> None:
    assert run_ranks(4, asked, tp=2) == [
        [[0, 18], [0, 14], [0, 2]],
        [[5, 18], [0, 4], [1, 3]],
        [[5, 18], [5, 14], [0, 2]],
        [[14, 18], [0, 4], [1, 3]],
    ]


def test_alone_nobody_is_asked() -> None:
    tokens = Tokens.of(Mesh.single(), 7, microbatch=2)
    assert (tokens.first, tokens.total, tokens.microbatch) == (0, 7, 2)
    assert tokens.gather(torch.tensor([3, 4]), "test").get().tolist() == [[3, 4]]
