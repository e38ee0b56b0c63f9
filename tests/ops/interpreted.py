"""Kernels without a GPU: what Triton's interpreter found, asked once for each group of kernels.

Workers of one run of the tests share what was found: whoever comes second reads the file of who came first.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import moeclipse

HERE = Path(__file__).parent


@cache
def _server() -> subprocess.Popen[str]:
    source = Path(moeclipse.__file__).parents[1]  # which is a copy where mutants are tested
    path = os.pathsep.join([str(source), str(HERE)])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, str(HERE / "interpreter_server.py")]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@cache
def _lines(*script: str) -> dict[str, float]:
    file = Path(os.environ["MOECLIPSE_TESTS_SHARED"]) / " ".join(script)
    with open(f"{file}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            server = _server()
            assert server.stdin is not None
            assert server.stdout is not None
            call = [f"{file}.output", f"{file}.errors", str(HERE / script[0]), *script[1:]]
            print(json.dumps(call), file=server.stdin, flush=True)
            code = server.stdout.readline().strip()
            assert code == "0", Path(f"{file}.errors").read_text()[-3000:]
            os.rename(f"{file}.output", file)
    pairs = (line.split("\t") for line in file.read_text().splitlines())
    return {name: float(value) for name, value in pairs}


def errors_of(group: str, *kinds: str) -> dict[str, float]:
    """Relative errors of the comparisons whose names begin with one of `kinds`; there is one of each."""
    pytest.importorskip("triton")
    found = {
        name: value
        for name, value in _lines("in_interpreter.py", group).items()
        if name.startswith(kinds or "")
    }
    for kind in kinds:
        assert any(name.startswith(kind) for name in found), f"{kind} was compared with nothing"
    return {name: value for name, value in found.items() if not name.startswith("ran ")}


def assert_equal_references(group: str, *kinds: str) -> None:
    bad = {
        name: value
        for name, value in errors_of(group, *kinds).items()
        if not value < (2e-3 if "64x32" in name else 1e-6)  # those are fp16
    }
    assert not bad


def assert_all_ran(module: ModuleType, *groups: str) -> None:
    """Every function of a file of kernels took part in these groups."""
    ran = {name for group in groups for name in _lines("in_interpreter.py", group)}
    assert not functions_of(module) - ran


def assert_exchange_ran(module: ModuleType | None = None, kind: str = "") -> None:
    """The kernels of an exchange gave the tables of their references, and all functions took part."""
    pytest.importorskip("triton")
    found = _lines("exchange_in_interpreter.py")
    assert not [name for name, wrong in found.items() if wrong]
    assert any(name.startswith(kind) for name in found)
    if module is not None:
        assert not functions_of(module) - set(found)


def assert_peers_ran(module: ModuleType | None = None, without: Sequence[str] = ()) -> None:
    """The kernels over peers' memory gave the right sums, and every function of `module` took part."""
    pytest.importorskip("triton")
    ran = set(_lines("peers_in_interpreter.py"))
    if module is not None:
        left_out = {f"ran {module.__name__}.{name}" for name in without}
        assert functions_of(module) - ran == left_out


def functions_of(module: ModuleType) -> set[str]:
    """As they are printed when they ran."""
    from triton import JITFunction

    found = [value for value in vars(module).values() if isinstance(value, JITFunction)]
    own = {value.fn.__name__ for value in found if value.fn.__module__ == module.__name__}
    assert own, "a file of kernels has some"
    return {f"ran {module.__name__}.{name}" for name in own}
