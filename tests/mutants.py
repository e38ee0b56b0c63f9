"""Changes that must not pass unnoticed: each is made in a copy of the source, and its test must fail there.

    python tests/mutants.py              all of them, in about a minute
    python tests/mutants.py lane         those with "lane" in their file or their test

`docs/testing.md` says of each what would go wrong for a user. A mutant that survives means that its test has
become weaker; a mutant whose `old` text is gone must follow the code.

Python and torch are imported once: every mutant runs in a fork of this process, with the copy of the source
first on the path. So nothing of the package may be imported here.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path

import hypothesis  # noqa: F401  (imported once, for all forks)
import numpy  # noqa: F401
import pytest
import torch  # noqa: F401

ROOT = Path(__file__).parent.parent
PATIENCE_S = 120
TESTS_FAILED = 1
"""What pytest returns when tests have run and failed; other numbers say that nothing was tested."""


@dataclass(frozen=True)
class Mutant:
    file: str
    """Below src/moeclipse."""
    old: str
    """Stands exactly once in the file."""
    new: str
    test: str
    """Below tests; it must fail with the change, and passes without."""

    @property
    def source(self) -> str:
        return (ROOT / "src" / "moeclipse" / self.file).read_text()

    @property
    def changed(self) -> str:
        return self.source.replace(self.old, self.new)


MUTANTS: tuple[Mutant, ...] = ()


def run(folder: str, test: str) -> None:
    """In a fork: pytest on one test, with the copy of the source."""
    os.chdir(ROOT)
    os.environ["PYTHONPATH"] = folder  # for processes that the test starts
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = f"{folder}/hypothesis"
    sys.path.insert(0, folder)
    with open(f"{folder}/output", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", f"tests/{test}"])
    import moeclipse

    assert str(moeclipse.__file__).startswith(folder), "the test did not run on the copy"
    sys.stdout.flush()
    os._exit(code)


def is_noticed(mutant: Mutant) -> tuple[Mutant, bool, str]:
    """(the mutant, whether its test fails with it, what pytest said)"""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src" / "moeclipse", f"{folder}/moeclipse")
        file = Path(folder) / "moeclipse" / mutant.file
        file.write_text(mutant.changed)
        shutil.rmtree(file.parent / "__pycache__", ignore_errors=True)
        process = multiprocessing.get_context("fork").Process(target=run, args=(folder, mutant.test))
        process.start()
        process.join(PATIENCE_S)
        if process.is_alive():
            process.kill()
            return mutant, False, f"no answer within {PATIENCE_S} s"
        said = Path(folder, "output").read_text()
    return mutant, process.exitcode == TESTS_FAILED, said


def main(words: list[str]) -> int:
    wanted = [m for m in MUTANTS if all(word in f"{m.file} {m.test}" for word in words)]
    began, survivors = time.monotonic(), 0
    with ThreadPool(os.cpu_count() or 1) as pool:
        for mutant, noticed, said in pool.imap(is_noticed, wanted):
            print(f"{'noticed' if noticed else 'SURVIVED'}  {mutant.file}  {mutant.test}", flush=True)
            if not noticed:
                survivors += 1
                print(f"{mutant.old}\n    became\n{mutant.new}\n{said}", flush=True)
    print(f"{len(wanted)} mutants, {survivors} survived, {time.monotonic() - began:.0f} s")
    return 1 if survivors or not wanted else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
