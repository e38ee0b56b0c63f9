"""How many lines of each module the test file of its own name covers, by itself.

    make coverage                          every module, in some minutes
    make coverage ARGS="moe comm/async_ops"   those whose path begins so

`tests/moe/exchange/test_dispatch.py` is the test file of `moe/exchange/dispatch.py`. Whoever changes a module
looks there, so the file must notice most of what can break, without help of tests that merely pass through.
Each runs in a fork of this process, in which Python and torch are imported once and nothing of the package
is. What forked ranks and other processes of a test run counts, unless they are killed.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "moeclipse"
TESTS = ROOT / "tests"
LINES_COVERED = 0.8
"""A module is tested by name when its test file covers this share of its lines."""
MODULES_TESTED = 0.9
"""The share of modules that must be."""
PATIENCE_S = 600

NO_CODE = {"__init__.py", "__main__.py"}
VERSION_0_1 = "an import path of version 0.1, tested in tests/compatibility"
EXEMPT = {
    "comm/all_reduce.py": VERSION_0_1,
    "comm/pinned.py": VERSION_0_1,
    "comm/wire.py": VERSION_0_1,
    "comm/wires/open.py": VERSION_0_1,
    "moe/adapters.py": VERSION_0_1,
    "train/corpus.py": VERSION_0_1,
    "train/trainer.py": VERSION_0_1,
    "ops/triton/wgrad_gluon.py": "Gluon has no interpreter, tested in tests/ops on a GPU",
}


def modules() -> list[str]:
    """Every module that must have a test file, as `moe/exchange/dispatch.py`."""
    names = (path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if path.name not in NO_CODE)
    return sorted(name for name in names if name not in EXEMPT)


def file_for(module: str) -> Path:
    path = Path(module)
    return TESTS / path.parent / f"test_{path.name}"


def imports_its_module(module: str) -> bool:
    """Whether the module has a test file, and that imports it."""
    wanted = "moeclipse." + module.removesuffix(".py").replace("/", ".")
    file = file_for(module)
    return file.exists() and wanted in imported(ast.parse(file.read_text()))


def imported(tree: ast.Module) -> set[str]:
    """Modules that a file imports, by their whole path; a name from a package may be a module, too."""

    def each() -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    return set(each())


@dataclass(frozen=True)
class Covered:
    module: str
    lines: int = 0
    missing: int = 0
    where: str = ""
    """Lines that were not run."""
    fault: str = ""
    """Why nothing of it counts."""

    @property
    def share(self) -> float:
        return 0.0 if self.fault else 1 - self.missing / max(1, self.lines)

    def __str__(self) -> str:
        why = self.fault or (f"not run: {self.where}" if self.share < LINES_COVERED else "")
        return f"{self.share:7.1%} {self.lines:5}  {self.module:40} {why}".rstrip()


def settings(module: str, folder: str) -> str:
    return f"""\
[run]
branch = false
data_file = {folder}/data
include = {SOURCE / module}
parallel = true
patch =
    subprocess
    fork
    _exit
"""


def run(module: str, folder: str) -> None:
    """In a fork: the test file, with lines of its module counted."""
    import coverage
    import pytest

    code = 1
    try:
        os.chdir(ROOT)
        os.environ["PYTHONPATH"] = str(ROOT / "src")  # for processes that the test starts
        sys.path.insert(0, str(ROOT / "src"))
        with open(f"{folder}/output", "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        counted = coverage.Coverage(config_file=f"{folder}/settings", messages=False)
        counted.start()
        chosen = ["-m", "not full and not gpu", str(file_for(module))]
        code = int(pytest.main(["-q", "-p", "no:cacheprovider", *chosen]))
        counted.stop()
        counted.save()
    finally:
        os._exit(code)


def drop_torn(folder: str) -> None:
    """Data of ranks that were killed while they wrote it down."""
    import coverage

    for file in Path(folder).glob("data.*"):
        try:
            coverage.CoverageData(str(file)).read()
        except coverage.CoverageException:
            file.unlink(missing_ok=True)


def cover(module: str) -> Covered:
    import coverage

    file = file_for(module)
    name = file.relative_to(ROOT).as_posix()
    if not file.exists():
        return Covered(module, fault=f"{name} is not there")
    if not imports_its_module(module):
        return Covered(module, fault=f"{name} does not import it")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "settings").write_text(settings(module, folder))
        process = multiprocessing.get_context("fork").Process(target=run, args=(module, folder))
        process.start()
        process.join(PATIENCE_S)
        if process.is_alive():
            process.kill()
            return Covered(module, fault=f"{name} did not end within {PATIENCE_S} s")
        if process.exitcode:
            print(Path(folder, "output").read_text(), flush=True)
            return Covered(module, fault=f"{name} fails")
        drop_torn(folder)
        counted = coverage.Coverage(config_file=f"{folder}/settings", messages=False)
        counted.combine([folder])
        _, lines, _, missing, where = counted.analysis2(str(SOURCE / module))
    return Covered(module, len(lines), len(missing), where)


def main(words: Sequence[str]) -> int:
    import hypothesis  # noqa: F401  (imported once, for all forks)
    import numpy  # noqa: F401
    import torch  # noqa: F401

    began, rows = time.monotonic(), []
    for module in modules():
        if not words or module.startswith(tuple(words)):
            rows.append(cover(module))
            print(f"{module} {rows[-1].share:.0%}", file=sys.stderr, flush=True)
    tested = sum(row.share >= LINES_COVERED for row in rows)
    share = tested / max(1, len(rows))
    print("  share lines  module")
    print(*sorted(rows, key=lambda row: (row.share, row.module)), sep="\n")
    print(
        f"{tested} of {len(rows)} modules ({share:.1%}) have a test file of their name that covers "
        f"{LINES_COVERED:.0%} of their lines; {MODULES_TESTED:.0%} must; {time.monotonic() - began:.0f} s"
    )
    return 0 if rows and share >= MODULES_TESTED else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
