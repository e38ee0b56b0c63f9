"""The kernels that read peers' memory, on three ranks of this host, through Triton's interpreter.

Run by `interpreted.py` in a process of its own, because the interpreter must be chosen before Triton is
imported. It fails where a sum is wrong, and prints a line for each function of a kernel that ran.
"""

from __future__ import annotations

import time

import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.shared.host import PeerMemory
from moeclipse.ops.peer_reduce import (
    GATHER,
    ONE,
    SCATTER,
    TWO,
    AllReduceKernel,
    PeerSpace,
    all_reduce_rms_norm_kernel,
    rms_norm,
)
from moeclipse.testing.run_ranks import run_ranks

HEAD, AREA = 8192, 1 << 16
NUM_RANKS = 3


def inputs_of(length: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(length)
    return list(torch.randint(-8, 9, (NUM_RANKS, length), generator=source).float())


def total(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts).sum(0)


def prepare(mesh: Mesh) -> None:
    """Inline assembly is not interpreted; and one rank reads slowly."""
    import triton.language as tl

    from moeclipse.ops.triton import peer_reduce

    peer_reduce.poll = lambda flags: tl.load(flags, volatile=True)
    peer_reduce.clock = lambda lane: lane.to(tl.int64) * 0
    if mesh.rank == 1:  # nobody may leave, and overwrite its input, before a slow reader has read that
        quick = peer_reduce.input_of
        peer_reduce.input_of = lambda *given: (time.sleep(0.02), quick(*given))[1]


def sums(mesh: Mesh, kernel: AllReduceKernel, memory: PeerMemory, row: torch.Tensor) -> None:
    for length in (3, 5001):
        for kind in (ONE, TWO):
            for inputs in (None, row):
                xs = inputs_of(length)
                x = memory.view(mesh.rank, torch.float32, HEAD + 2 * AREA, length).copy_(xs[mesh.rank])
                out = torch.full((length,), 7.0)
                kernel(x, out, kind, inputs)
                x.fill_(99)  # in place: all peers have read it
                assert torch.equal(out, total(xs)), (length, kind, inputs)
    for kind in (ONE, TWO):  # an input that begins in the middle of a vector
        xs = [(kind + 2) * x for x in inputs_of(5001)]  # areas still hold what was there before
        odd, out = torch.zeros(5002)[1:].copy_(xs[mesh.rank]), torch.full((5001,), 7.0)
        assert odd.data_ptr() % 16
        kernel(odd, out, kind)
        assert torch.equal(out, total(xs)), ("odd", kind)
        kernel(odd, odd, kind)
        assert torch.equal(odd, total(xs)), ("odd, in place", kind)


def parts(mesh: Mesh, kernel: AllReduceKernel) -> None:
    xs, part = inputs_of(5001), 5001 // NUM_RANKS // 16 * 16
    bounds = [*(rank * part for rank in range(NUM_RANKS)), 5001]
    mine = torch.full((bounds[mesh.rank + 1] - bounds[mesh.rank],), 7.0)
    kernel(xs[mesh.rank], mine, SCATTER)
    assert torch.equal(mine, total(xs)[bounds[mesh.rank] : bounds[mesh.rank + 1]])
    whole = torch.full((5001,), 7.0)
    kernel(mine, whole, GATHER)
    assert torch.equal(whole, total(xs))


def norms(mesh: Mesh, space: PeerSpace) -> None:
    xs = [x.view(5, 100) for x in inputs_of(500)]
    normed, h = torch.empty(5, 100), torch.empty(5, 100)
    weight = torch.linspace(1, 2, 100)
    all_reduce_rms_norm_kernel(xs[mesh.rank], torch.ones(5, 100), weight, 1e-6, (normed, h), space)
    assert torch.equal(h, total(xs) + 1)
    assert torch.allclose(normed, rms_norm(h, weight, 1e-6))


def kernels(mesh: Mesh) -> tuple[list[int], int, list[str]]:
    """(rounds of each block, what rank 0's strange call was taken for, functions that ran)."""
    from triton.runtime.interpreter import InterpretedFunction

    prepare(mesh)
    memory = PeerMemory.open(mesh.world, mesh.watch, num_bytes=HEAD + 3 * AREA, num_words=1)
    addresses = [memory.view(peer, torch.uint8, 0, 8).data_ptr() for peer in range(NUM_RANKS)]
    row = torch.tensor([address + HEAD + 2 * AREA for address in addresses])
    space = PeerSpace(
        table=torch.tensor(addresses), counts=torch.zeros(4, dtype=torch.int32),
        status=torch.zeros(1, dtype=torch.int32), area_bytes=AREA, head_bytes=HEAD,
        limit_us=1 << 30, rank=mesh.rank, num_ranks=NUM_RANKS, max_blocks=4,
    )  # fmt: skip
    kernel = AllReduceKernel(space)
    sums(mesh, kernel, memory, row)
    parts(mesh, kernel)
    x = memory.view(mesh.rank, torch.float32, HEAD + 2 * AREA, 5001)
    out = torch.full((5001,), 7.0)
    kernel(x, out, TWO, torch.zeros(NUM_RANKS, dtype=torch.int64))
    assert out.eq(7).all(), "not registered: nothing happens"
    assert space.status.tolist() == [1000]
    norms(mesh, space)
    rounds = space.counts.tolist()
    space.status.zero_()
    mesh.barrier()
    kernel(x[:48], out[:48], ONE if mesh.rank else TWO, row, "x")  # rank 0 calls something else
    mesh.barrier()
    ran = [f"{function.__module__}.{function.__name__}" for function in InterpretedFunction.rewritten_fn]
    return rounds, space.status.item(), ran


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = run_ranks(NUM_RANKS, kernels)
    # 2 x (1 + 2) rounds, of inputs where they lie 2 x (2 + 2), 2 x (1 + 2), 1, 1 and 1
    assert [rounds for rounds, _, _ in found] == [[23] * 4] * NUM_RANKS
    first, *others = [status for _, status, _ in found]
    # Of two ranks whose calls differ at least the later one is told; codes are 101 + the peer.
    assert set(others) <= {0, 101}, found
    assert first in (0, 102, 103), found
    assert first or others == [101, 101], found
    for name in found[0][2]:
        print(f"ran {name}\t0")
