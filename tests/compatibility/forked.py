"""Run what a page shows in a fork: it may start threads, which no later fork of the tests survives."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable


def exit_status(shown: Callable[[], object]) -> int:
    """0 where `shown` returns nothing, 0 or None; what it returns, or 1 with its traceback, otherwise."""

    def run() -> None:
        try:
            code = shown() or 0
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(str(code)))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(120)
    if process.exitcode is None:
        process.kill()
    return -1 if process.exitcode is None else process.exitcode
