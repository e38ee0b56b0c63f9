"""Examples run as their first lines say."""

from __future__ import annotations

import re
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
    # Ranks run unbuffered: a text and its end of line are two writes, between which another rank may write.
    return sorted(line for line in re.split(r"\n|(?=rank \d+:? )", done.stdout) if line)


@pytest.mark.parametrize("dense", ["ddp", pytest.param("fsdp2", marks=pytest.mark.full)])
def test_a_loop_of_ones_own_learns_alike_on_all_ranks(dense: str) -> None:
    lines = torchrun("ddp_loop.py", "--dense", dense, ranks=2)
    ranks = [[line.partition(" step ")[2] for line in lines if line.startswith(f"rank {r}")] for r in (0, 1)]
    assert ranks[0] == ranks[1], "losses and norms, to the last digit"
    first, last = (float(line.split()[2]) for line in sorted(ranks[0], key=lambda text: int(text.split()[0])))
    assert last < 0.6 * first


def alone(example: str, *flags: str) -> list[str]:
    command = [sys.executable, str(EXAMPLES / example), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith(("step", "loaded"))]


def test_a_plain_loop_learns_and_is_loaded_again() -> None:
    first, last, loaded = alone("plain_loop.py", "--steps", "40")
    assert float(last.split()[-1]) < 0.3 * float(first.split()[-1])
    assert loaded == "loaded again: True"


@pytest.mark.full
def test_a_checkpoint_of_two_ranks_goes_on_with_four(tmp_path: Path) -> None:
    whole = torchrun("fsdp2_checkpoint.py", "--folder", str(tmp_path / "whole"), "--steps", "6", ranks=2)
    folder = ("--folder", str(tmp_path / "parts"))
    parts = torchrun("fsdp2_checkpoint.py", *folder, "--steps", "3", ranks=2)
    parts += torchrun("fsdp2_checkpoint.py", *folder, "--steps", "6", ranks=4)
    for one, other in zip(sorted(parts), whole, strict=True):
        assert float(one.split()[-1]) == pytest.approx(float(other.split()[-1]), abs=3e-5)


@pytest.mark.full
def test_a_trainer_of_two_ranks_has_the_losses_of_one() -> None:
    one = alone("hf_trainer.py", "--steps", "4")
    two = [line for line in torchrun("hf_trainer.py", "--steps", "4", ranks=2) if line.startswith("step")]
    losses = [[float(line.split()[-1]) for line in sorted(lines)] for lines in (one, two)]
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], abs=3e-4)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.full
def test_lightning_learns_alike_on_all_ranks() -> None:
    lines = [line for line in torchrun("lightning_loop.py", ranks=2) if line.startswith("rank")]
    found = [[line.partition(" step ")[2] for line in lines if line.startswith(f"rank {r}")] for r in (0, 1)]
    assert found[0] == found[1]
    first, last = (
        float(line.split()[-1]) for line in sorted(found[0], key=lambda text: int(text.split()[0]))
    )
    assert last < 0.6 * first


def test_examples_are_short_and_each_has_a_test() -> None:
    here = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        assert path.name in here
        assert len(path.read_text().splitlines()) <= 80 or path.name == "tensor_parallel_inference.py"


@pytest.mark.peer_memory
def test_tensor_parallel_inference_continues_as_one_rank_does() -> None:
    lines = torchrun("tensor_parallel_inference.py", "--tokens", "8", ranks=2)
    assert [line.partition(" tokens")[0] for line in lines] == ["rank 0: 32", "rank 1: 32"]
    assert all(line.endswith("as one rank: True (ranks share memory)") for line in lines)
