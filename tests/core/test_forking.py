"""A process forks ranks as long as they can compute, and is told why it may not any more."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moeclipse.core import forking
from moeclipse.core.errors import CommError
from moeclipse.core.forking import ONE_THREAD, library_threads, refuse_behind_threads

TESTS = Path(__file__).parent.parent

BEHIND_WORK = """
import _thread, threading, time
import numpy, torch
from moeclipse.core.errors import CommError
from moeclipse.core.forking import library_threads
from moeclipse.testing.run_ranks import run_ranks

def product(mesh):
    return float((torch.ones(600, 600) @ torch.ones(600, 600)).sum())

_thread.start_new_thread(lambda: time.sleep(60), ())
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
numpy.ones((600, 600)) @ numpy.ones((600, 600))
assert run_ranks(2, product, deadline_s=20) == [600.0**3] * 2, "Python's threads and numpy's are no reason"
torch.set_num_threads(2)
torch.ones(600, 600) @ torch.ones(600, 600)
begun = time.monotonic()
try:
    run_ranks(2, product, deadline_s=20)
except CommError as error:
    print(error)
print(round(time.monotonic() - begun))
"""


def in_a_fresh_process(program: str) -> str:
    """What it prints, in an environment that does not bound threads."""
    environment = {name: value for name, value in os.environ.items() if name not in ONE_THREAD}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=TESTS, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_ranks_behind_work_in_threads_are_refused_at_once_with_the_reason() -> None:
    said = in_a_fresh_process(BEHIND_WORK).splitlines()
    assert re.match(
        r"a library has started (a thread|\d+ threads) in this process \(python[\d.]*\), and a forked",
        said[0],
    )
    assert "set OMP_NUM_THREADS=1 in the environment before torch is loaded" in said[0]
    assert int(said[1]) < 10, "at once, not at the deadline"


# On Arm the first product starts a team of threads in spite of set_num_threads(1), unless the environment
# said otherwise before torch was loaded; a rank's product then waited for ever.
BEHIND_A_TEST = """
import conftest
import torch
import torch.nn.functional as F
from moeclipse.core.forking import library_threads
from moeclipse.testing.run_ranks import run_ranks

def product(mesh):
    return float(F.linear(torch.ones(32, 32), torch.ones(32, 32)).sum())

assert product(None) == 32.0**3
assert not library_threads(), library_threads()
assert run_ranks(2, product, deadline_s=20) == [32.0**3] * 2
"""


def test_a_test_may_compute_before_another_one_starts_ranks() -> None:
    in_a_fresh_process(BEHIND_A_TEST)


def test_the_tests_own_process_is_bounded() -> None:
    assert {name: os.environ.get(name) for name in ONE_THREAD} == ONE_THREAD


def test_a_forked_process_may_fork() -> None:
    child = os.fork()
    if child == 0:
        os._exit(len(library_threads()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_threads_of_libraries_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in (("1", "gloo_loop"), ("2", "gloo_loop"), ("3", "pt_autograd_0")):
        (tmp_path / number).mkdir()
        (tmp_path / number / "comm").write_text(name + "\n")
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "comm").write_text("jemalloc_bg_thd\n")  # pyarrow's; it is no reason
    (tmp_path / "6").mkdir()
    (tmp_path / "6" / "comm").write_text("cuda00004000011\n")  # nor is the driver's
    (tmp_path / "4").mkdir()  # it ends while it is looked at
    assert library_threads(tmp_path) == ["gloo_loop", "gloo_loop", "pt_autograd_0"]
    assert library_threads(tmp_path / "nowhere") == []
    monkeypatch.setattr(forking, "library_threads", lambda: library_threads(tmp_path))
    with pytest.raises(CommError, match=r"3 threads in this process \(gloo_loop, pt_autograd_0\)"):
        refuse_behind_threads()
