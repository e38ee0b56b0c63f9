"""Rows by copy engines between ranks that share one GPU: right, in stream order, missing ranks named."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest
import torch

from moeclipse.comm.async_ops.lane import InFlight
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.reduce.collectives import collectives
from moeclipse.comm.transports.copy_engines import PinnedTransport, pinned
from moeclipse.core.errors import CommError
from moeclipse.moe.config import GateConfig
from moeclipse.moe.layer import MoE
from moeclipse.moe.tokens import Tokens
from moeclipse.ops.random import fill_normal
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_ranks

HAS_GPU = torch.cuda.device_count() > 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]


def opened(mesh: Mesh, **options: Any) -> PinnedTransport:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0)
    transport = pinned(mesh, mesh.experts, **options)
    assert isinstance(transport, PinnedTransport)
    return transport


def filled(values: list[int], counts: list[int]) -> torch.Tensor:
    parts = zip(values, counts, strict=True)
    return torch.cat([torch.full((count, 7), float(value), device="cuda") for value, count in parts])


def storm(mesh: Mesh, options: dict[str, Any]) -> str:
    """Values say where rows come from and go to; several exchanges under way, got in any order."""
    P, lots, own = mesh.num_ranks, random.Random(1), random.Random(mesh.rank)
    transport = opened(mesh, **options)
    for turn in range(30):
        results: list[tuple[InFlight[torch.Tensor], torch.Tensor]] = []
        for k in range(lots.choice([1, 2, 4])):
            counts = [[lots.choice([0, 0, 1, 70, 3000]) for _ in range(P)] for _ in range(P)]
            send, receive = counts[mesh.rank], [row[mesh.rank] for row in counts]
            dtype = lots.choice([torch.float32, torch.bfloat16])
            mark = 10 * (turn % 5) + k

            send_marks = [mark + mesh.rank * 3 + p for p in range(P)]
            rows = filled(send_marks, send).to(dtype)
            expected = filled([mark + p * 3 + mesh.rank for p in range(P)], receive)
            if own.random() < 0.1:
                time.sleep(own.random() * 0.003)
            results.append((transport.all_to_all(rows, send, receive, f"turn {turn}"), expected))
            del rows  # its memory may be used again once the exchange has been waited for
        own.shuffle(results)
        for got, expected in results:
            assert torch.equal(got.get().float(), expected)
    torch.cuda.synchronize()
    transport.check()
    mesh.barrier()
    return transport.kind


@pytest.mark.parametrize("through", ["host", "device"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_rows_arrive_where_they_belong(num_ranks: int, through: str) -> None:
    options = {"through": through, "slot_bytes": 20000, "slots": 3}
    kinds = run_ranks(num_ranks, storm, options, device="cuda:0", deadline_s=100)
    assert len(set(kinds)) == 1
    print(kinds[0])


def test_threads_wait_where_the_driver_cannot() -> None:
    options = {"slot_bytes": 20000, "driver": False}
    assert run_ranks(2, storm, options, device="cuda:0", deadline_s=100) == ["ThreadStream"] * 2


def layer(mesh: Mesh, exchange: dict[str, Any]) -> dict[str, torch.Tensor]:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0)
    P, dtype = mesh.num_ranks, torch.float64
    gate = GateConfig(top_k=3, z_loss=0.1)
    moe = MoE(64, 48, 8, gate=gate, mesh=mesh, exchange=exchange, seed=3, init_std=0.2, dtype=dtype)
    x = fill_normal(torch.empty(100, 64, dtype=dtype), 1, 1.0)
    mine = slice(mesh.rank * 100 // P, (mesh.rank + 1) * 100 // P)
    x = x[mine].cuda().requires_grad_()
    y, report = moe.run(x, Tokens(mesh=mesh, first=mine.start, total=100, step=2))
    (y.square().sum() + report.aux_loss).backward()
    mesh.barrier()
    return {"y": y.detach().cpu(), "dx": x.grad.cpu(), "up": moe.experts.up.grad.cpu()}


@pytest.mark.parametrize("wire", ["pinned", "peer"])
def test_a_layer_equals_one_process(wire: str) -> None:
    (alone,) = run_ranks(1, layer, {}, device="cuda:0", deadline_s=60)
    for schedule in ("blocking", "smart"):
        ranks = run_ranks(4, layer, {"transport": wire, "schedule": schedule}, device="cuda:0", deadline_s=90)
        for key, expected in alone.items():
            assert difference(torch.cat([rank[key] for rank in ranks]), expected) <= 1e-12, (schedule, key)


def late(mesh: Mesh) -> str:
    transport = opened(mesh)
    rows = torch.ones(4, 3, device="cuda")
    transport.all_to_all(rows, [2, 2], [2, 2], "warm up").get()
    torch.cuda.synchronize()
    if mesh.rank == 1:
        time.sleep(4)
        return ""
    transport.all_to_all(rows, [2, 2], [2, 2], "dispatch of layer 3").get().tolist()
    with pytest.raises(CommError) as caught:
        transport.check()
    return str(caught.value)


def test_a_missing_rank_is_named_at_the_deadline() -> None:
    text = run_ranks(2, late, device="cuda:0", collective_deadline_s=1.0, deadline_s=60)[0]
    assert text == "rank 0 waited 1 s in dispatch of layer 3: rank 1 did not arrive"


def sums(mesh: Mesh) -> int:
    """The collectives of tensor-parallel layers, on the lane's stream beside compute."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0)
    P, wire = mesh.num_ranks, collectives(mesh, mesh.world, mesh.grads, "on")
    total = P * (P + 1) // 2
    for turn in range(20):
        x = torch.full((1000 + turn,), 1.0 + mesh.rank, device="cuda", dtype=torch.bfloat16)
        summed = wire.all_reduce(x, "sum")
        bounds = [0, *[300 * (k + 1) for k in range(P - 1)], 1200]
        part = wire.reduce_scatter(torch.full((1200,), 1.0 + mesh.rank, device="cuda"), bounds, "scatter")
        gathered = wire.gather(torch.full((5,), float(mesh.rank), device="cuda"), "gather")
        assert (summed.get() == total).all()
        assert (part.get() == total).all()
        assert gathered.get()[:, 0].tolist() == list(range(P))
    wide = wire.all_reduce(torch.ones(3, device="cuda", dtype=torch.float64), "not over peer memory")
    assert wide.get().tolist() == [float(P)] * 3
    mesh.barrier()
    return 1


def test_collectives_on_a_lane() -> None:
    assert run_ranks(3, sums, device="cuda:0", deadline_s=60) == [1, 1, 1]
