"""All-reduces over peer memory that several tests open, and sums that are exact."""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.reduce.all_reduce import PeerAllReduce
from moeclipse.comm.reduce.table import Algorithm
from moeclipse.ops.peer_reduce import sum_ranks_reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SIZES = (1, 2, 3, 7, 403, 1000, 4097, 65537, 300001)


def opened(mesh: Mesh, **options: Any) -> PeerAllReduce:
    return PeerAllReduce.open(mesh.world, mesh.watch, **({"choice": Algorithm()} | options))


def integers(mesh: Mesh, length: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Every rank's input, on every rank: small integers, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randint(-8, 9, (mesh.num_ranks, length), generator=generator).to(dtype))


def exact(mesh: Mesh, sizes: tuple[int, ...], area_bytes: int) -> int:
    """In and out of place, one and two stages, input overwritten right after the call, stragglers."""
    lots, checked = random.Random(mesh.rank), 0
    with opened(mesh, area_bytes=area_bytes) as reduce:
        for length in sizes:
            whole = integers(mesh, length, torch.float64, length)
            for dtype in DTYPES:
                xs = [x.to(dtype) for x in whole]
                expected = sum_ranks_reference(xs)
                for stages in (1, 2):
                    x = xs[mesh.rank].clone()
                    if lots.random() < 0.05:
                        time.sleep(lots.random() * 0.003)
                    y = reduce.all_reduce(x, stages=stages)
                    x.fill_(99)
                    z = xs[mesh.rank].clone()
                    assert reduce.all_reduce(z, out=z, stages=stages) is z
                    assert torch.equal(y, expected), (length, dtype, stages)
                    assert torch.equal(z, expected), (length, dtype, stages)
                    checked += 1
    return checked
