"""The tool that counts what tests of a module's name cover: what an import is, and whose lines count."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from coverage_by_name import EXEMPT, Covered, file_for, imported, modules

ROOT = Path(__file__).parent.parent


def test_imports_are_seen_in_every_form() -> None:
    text = """
import moeclipse.core.toml
from moeclipse.moe.exchange import dispatch as d
def late():
    from moeclipse.comm.mesh import Mesh
from .sibling import name
"""
    found = imported(ast.parse(text))
    assert {"moeclipse.core.toml", "moeclipse.moe.exchange.dispatch", "moeclipse.comm.mesh"} <= found
    assert "moeclipse.comm" not in found


def test_modules_and_their_tests() -> None:
    assert file_for("comm/async_ops/record.py") == ROOT / "tests" / "comm" / "async_ops" / "test_record.py"
    names = modules()
    assert "comm/async_ops/record.py" in names
    assert not {name for name in names if name in EXEMPT or "__init__" in name}


def test_a_fault_counts_as_nothing() -> None:
    assert Covered("moe/layer.py", lines=10, missing=2, where="3-4").share == 0.8
    assert str(Covered("moe/layer.py", lines=10, missing=3, where="3-5")).endswith("not run: 3-5")
    assert Covered("moe/layer.py", lines=10, fault="its test fails").share == 0.0


@pytest.mark.full
def test_lines_that_only_forked_ranks_run_count() -> None:
    """Those of the backward of tensor/vocab, and of a rank's own life in testing/run_ranks."""
    command = [sys.executable, "tests/coverage_by_name.py", "tensor/vocab", "testing/run_ranks"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 modules (100.0%)" in done.stdout
