"""Kernels become machine code on machines without a GPU, too: the optimizer, adapters, frozen matrices.

Triton's interpreter runs a kernel as Python: what the compiler would refuse, it lets pass.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moeclipse.ops.tuning import SHARED_MEMORY


def lines(script: str) -> list[list[str]]:
    pytest.importorskip("triton")
    command = [sys.executable, str(Path(__file__).with_name(script))]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-2000:]
    return [line.split("\t") for line in run.stdout.splitlines()]


@pytest.mark.full
def test_every_form_of_adam_compiles() -> None:
    sizes = [int(line[2]) for line in lines("compiled_adam.py")]
    assert len(sizes) == 10
    assert min(sizes) > 1000


@pytest.mark.full
def test_products_with_adapters_of_every_rank_fit_into_shared_memory() -> None:
    found = {(kernel, rank): int(shared) for kernel, rank, shared, _ in lines("compiled_experts.py")}
    assert len(found) == 6 * 4
    assert not {which: shared for which, shared in found.items() if shared > SHARED_MEMORY}


@pytest.mark.full
def test_what_decodes_frozen_matrices_writes_16_bytes_and_rounds_as_the_references() -> None:
    found = {kernel: tuple(map(int, counts)) for kernel, *counts in lines("compiled_quantised.py")}
    assert set(found) == {"nf4", "mxfp4", "fp8"}
    assert all(wide and not (narrow or inexact) for wide, narrow, inexact in found.values()), found
