"""The kernels' logic without a GPU: Triton's interpreter, small sizes, against the references beside them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HAS_TRITON = importlib.util.find_spec("triton") is not None


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    script = Path(__file__).with_name("in_interpreter.py")
    source = Path(__file__).parents[2] / "src"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(source)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: float(value) for name, value in (line.split("\t") for line in done.stdout.splitlines())}


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton (the interpreter is enough)")
def test_kernels_equal_their_references(errors: dict[str, float]) -> None:
    bad = {name: value for name, value in errors.items() if not value < (2e-3 if "64x32" in name else 1e-6)}
    assert not bad


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton (the interpreter is enough)")
@pytest.mark.parametrize(
    "what", ["grouping", "h ", "y ", "dh ", "dscore", "dx ", "wgrad", "combine", "gate", "group sum"]
)
def test_every_kernel_was_compared(errors: dict[str, float], what: str) -> None:
    assert any(name.startswith(what) for name in errors)
