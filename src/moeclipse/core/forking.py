"""Whether this process may fork: a child has none of its parent's threads, but all that they left behind.

A forked child has one thread. OpenMP's team is gone there while its book-keeping says that it waits, so the
next product that is shared out among the team waits for ever: no error, no CPU time, a deadline much later.
`torch.set_num_threads(1)` does not prevent that everywhere: on Arm an fp32 product of 32 x 32 starts as many
threads as OMP_NUM_THREADS, or else the machine, said when torch was loaded.

Contract. `refuse_behind_threads` raises where a library has started threads here. Threads of Python are known
and no reason: their locks are made anew in a child. Nor are those of libraries that end their threads before
a fork and start them anew (numpy's OpenBLAS does): a fork that does nothing shows which are left.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from moeclipse.core.errors import CommError

TASKS = Path("/proc/self/task")
ONE_THREAD = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
}
"""The environment of a process that computes and forks, from before torch is loaded."""
SURVIVES = ("jemalloc_bg_thd", "cuda0")
"""Threads that a child does well without: an allocator's, which stops for forks, and those of the CUDA
driver, which a child that uses a device starts anew (who has used one already must spawn)."""


def library_threads(tasks: Path = TASKS) -> list[str]:
    """Names of the threads of this process that Python does not know, as the kernel has them."""
    # In a forked process Python's main thread still has the number of its parent's; the kernel calls it pid.
    known = {thread.native_id for thread in threading.enumerate()} | {os.getpid()}
    names = [_name(task) for task in tasks.iterdir() if int(task.name) not in known] if tasks.is_dir() else []
    # Some start Python threads without the module `threading` (execnet does), which therefore has no id for
    # them; like all threads that nobody named they are called what the process is called.
    unnamed = len(sys._current_frames()) - threading.active_count()
    process = _name(tasks / str(os.getpid()))
    for _ in range(min(unnamed, names.count(process))):
        names.remove(process)
    return sorted(name for name in names if name and not name.startswith(SURVIVES))


def refuse_behind_threads() -> None:
    """Before a fork whose child will compute."""
    if not library_threads():
        return
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    if names := library_threads():
        count = "a thread" if len(names) == 1 else f"{len(names)} threads"
        raise CommError(
            f"a library has started {count} in this process ({', '.join(sorted(set(names)))}), and a forked "
            "rank that computes would wait for them for ever: set OMP_NUM_THREADS=1 in the environment "
            "before torch is loaded, and let what must compute before ranks start run in a process of its "
            "own (run_alone)"
        )


def _name(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except OSError:  # it has ended since
        return ""
