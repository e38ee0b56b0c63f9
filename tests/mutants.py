"""Changes that must not pass unnoticed: each is made in a copy of the source, and its test must fail there.

    .venv/bin/python tests/mutants.py           all of them, in some minutes
    .venv/bin/python tests/mutants.py lane      those with "lane" in their file or their test

`tests/mutants_of/` lists them by room, and `docs/list_mutants.py` prints of each what would go wrong for a
user. A mutant that survives means that its test has become weaker; a mutant whose `old` text is gone must
follow the code.

Python and torch are imported once: every mutant runs in a fork of this process, with the copy of the source
first on the path. So nothing of the package may be imported here.

Hazard: a process whose torch has started threads of OpenMP cannot be forked, on Arm its forks hang. So one
thread is asked for before torch is imported.
"""

from __future__ import annotations

import os

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import multiprocessing  # noqa: E402
import shutil  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from multiprocessing.pool import ThreadPool  # noqa: E402
from pathlib import Path  # noqa: E402

import hypothesis  # noqa: E402
import numpy  # noqa: E402, F401  (imported once, for all forks)
import pytest  # noqa: E402
import torch  # noqa: E402

from mutants_of import MUTANTS  # noqa: E402
from mutants_of.mutant import ROOT, Mutant  # noqa: E402

PATIENCE_S = 600
"""A test that takes a minute alone takes several beside other work; one that hangs counts as not noticed."""
TESTS_FAILED, NOT_TESTED = 1, 99
"""pytest returns the first when tests have run and failed; the second says that the copy was not tested."""
PHASES = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
PROFILE = "mutants"
"""That a case fails is all there is to know: nobody waits for the smallest one. Replays draw alike."""
hypothesis.settings.register_profile(PROFILE, deadline=None, phases=PHASES, derandomize=True)
# As conftest does in every fork: what torch imports for it takes two seconds.
torch._C._set_deterministic_algorithms(True)  # as tests/conftest.py


def run(folder: str, test: str) -> None:
    """In a fork: pytest on one test as the short suite runs it, with the copy of the source."""
    code = NOT_TESTED
    try:
        os.chdir(ROOT)
        os.environ["PYTHONPATH"] = folder  # for processes that the test starts
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = f"{folder}/hypothesis"
        sys.path.insert(0, folder)
        with open(f"{folder}/output", "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin", "-m", "not full"]
        found = pytest.main([*options, f"--hypothesis-profile={PROFILE}", f"tests/{test}"])
        here = str(getattr(sys.modules.get("moeclipse"), "__file__", "nowhere"))
        code = int(found) if here.startswith(folder) else NOT_TESTED
        print("NOT_TESTED" if code == NOT_TESTED else f"tested {here}", flush=True)
    finally:
        os._exit(code)


def is_noticed(mutant: Mutant) -> tuple[Mutant, bool, str]:
    """(the mutant, whether its test fails with it, what pytest said)"""
    with tempfile.TemporaryDirectory() as folder:
        # Links: compiled files of all others serve as they are.
        shutil.copytree(ROOT / "src" / "moeclipse", f"{folder}/moeclipse", copy_function=os.symlink)
        file = Path(folder) / "moeclipse" / mutant.file
        for stale in (file, *(file.parent / "__pycache__").glob(f"{file.stem}.*")):
            stale.unlink()
        file.write_text(mutant.changed)
        process = multiprocessing.get_context("fork").Process(target=run, args=(folder, mutant.test))
        process.start()
        process.join(PATIENCE_S)
        if process.is_alive():
            process.kill()
            return mutant, False, f"no answer within {PATIENCE_S} s"
        said = Path(folder, "output").read_text()
    return mutant, process.exitcode == TESTS_FAILED, said


def timed(mutant: Mutant) -> tuple[Mutant, bool, str, float]:
    began = time.monotonic()
    return *is_noticed(mutant), time.monotonic() - began


def main(words: list[str]) -> int:
    wanted = [m for m in MUTANTS if all(word in f"{m.file} {m.test}" for word in words)]
    began, survivors = time.monotonic(), list[str]()
    with ThreadPool(os.cpu_count() or 1) as pool:
        for mutant, noticed, said, seconds in pool.imap(timed, wanted):
            print(
                f"{'noticed' if noticed else 'SURVIVED'}  {seconds:5.1f} s  {mutant.file}  {mutant.test}",
                flush=True,
            )
            if not noticed:
                survivors.append(f"{mutant.file}  {mutant.test}")
                print(f"{mutant.old}\n    became\n{mutant.new}\n{said}", flush=True)
    print(
        f"{len(wanted)} mutants, {len(survivors)} survived, {time.monotonic() - began:.0f} s",
        *survivors,
        sep="\n",
    )
    return 1 if survivors or not wanted else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
