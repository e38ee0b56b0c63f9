"""The optimizer's kernel in every form of its state becomes machine code, on machines without a GPU, too.

Triton's interpreter runs a kernel as Python: what the compiler would refuse, it lets pass.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.full
def test_every_form_of_adam_compiles() -> None:
    pytest.importorskip("triton")
    script = Path(__file__).with_name("compiled_adam.py")
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-2000:]
    sizes = [int(line.split("\t")[2]) for line in run.stdout.splitlines()]
    assert len(sizes) == 10
    assert min(sizes) > 1000
