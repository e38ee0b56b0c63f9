"""Kernels become machine code on machines without a GPU, too: experts, the optimizer, frozen matrices.

Triton's interpreter runs a kernel as Python: what the compiler would refuse, it lets pass.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moeclipse.ops.architecture import ARCHITECTURES
from moeclipse.ops.tuning import TABLES


def lines(script: str, *words: str) -> list[list[str]]:
    pytest.importorskip("triton")
    command = [sys.executable, str(Path(__file__).with_name(script)), *words]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-2000:]
    return [line.split("\t") for line in run.stdout.splitlines()]


@pytest.mark.full
def test_every_form_of_adam_compiles() -> None:
    sizes = [int(line[2]) for line in lines("compiled_adam.py")]
    assert len(sizes) == 10
    assert min(sizes) > 1000


SPILLED = 64
"""Bytes of a thread that may lie in memory: some addresses of what is written behind the last product."""


def check_limits(name: str, found: list[list[str]]) -> None:
    """Shared memory as the model says and the device has; registers, and nearly none of them in memory."""
    limits = ARCHITECTURES[name]
    for _, kernel, *numbers in found:
        shared, predicted, registers, spilled = map(int, numbers)
        assert shared <= predicted <= limits.shared, kernel
        assert registers <= limits.registers, kernel
        assert spilled <= SPILLED, f"{kernel} spills {spilled}"


def test_the_kernels_that_work_most_compile_without_the_copy_engine() -> None:
    found = lines("compiled_forms.py", "--short", "sm_89")
    assert [kernel for _, kernel, *_ in found] == ["up", "down", "wgrad_x, add"]
    check_limits("sm_89", found)


ALL_RANKS = ("sm_89", "sm_90")
"""One of each form, pointers and descriptors, is compiled with adapters of every rank. Elsewhere those of the
least and of the greatest rank say enough: what a rank takes grows with it."""
ANOTHER_S = ("sm_86",)
"""It has the tiles, the instructions and the memory of sm_89."""


@pytest.mark.full
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_kernel_compiles_for_every_architecture(name: str) -> None:
    how = "--short" if name in ANOTHER_S else "" if name in ALL_RANKS else "--few"
    found = lines("compiled_forms.py", name, how)
    assert len(found) == {"--short": 3, "": 35, "--few": 25}[how]
    check_limits(name, found)


def test_which_kernels_stand_for_others() -> None:
    other, one = (ARCHITECTURES[name] for name in (*ANOTHER_S, "sm_89"))
    assert TABLES[other.table] == TABLES[one.table]
    assert (other.form, other.shared, other.registers) == (one.form, one.shared, one.registers)
    assert {ARCHITECTURES[name].form for name in ALL_RANKS} == {"pointer", "descriptor"}


@pytest.mark.full
def test_what_decodes_frozen_matrices_writes_16_bytes_and_rounds_as_the_references() -> None:
    found = {kernel: tuple(map(int, counts)) for kernel, *counts in lines("compiled_quantised.py")}
    assert set(found) == {"nf4", "mxfp4", "fp8"}
    assert all(wide and not (narrow or inexact) for wide, narrow, inexact in found.values()), found
