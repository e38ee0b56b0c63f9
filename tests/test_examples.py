"""Examples run as their first lines say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def torchrun(example: str, *flags: str, ranks: int) -> list[str]:
    """What the ranks print, in their order; the example itself checks that it is right."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *start, str(EXAMPLES / example), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


@pytest.mark.parametrize("dense", ["ddp", pytest.param("fsdp2", marks=pytest.mark.full)])
def test_a_loop_of_ones_own_learns_alike_on_all_ranks(dense: str) -> None:
    lines = torchrun("ddp_loop.py", "--dense", dense, ranks=2)
    ranks = [[line.partition(" step ")[2] for line in lines if line.startswith(f"rank {r}")] for r in (0, 1)]
    assert ranks[0] == ranks[1], "losses and norms, to the last digit"
    first, last = (float(line.split()[2]) for line in sorted(ranks[0], key=lambda text: int(text.split()[0])))
    assert last < 0.6 * first


@pytest.mark.peer_memory
def test_tensor_parallel_inference_continues_as_one_rank_does() -> None:
    lines = torchrun("tensor_parallel_inference.py", "--tokens", "8", ranks=2)
    assert [line.partition(" tokens")[0] for line in lines] == ["rank 0: 32", "rank 1: 32"]
    assert all(line.endswith("as one rank: True (ranks share memory)") for line in lines)
