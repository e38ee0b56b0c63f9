"""A process with Triton's interpreter that runs scripts in forks of itself; started by `interpreted.py`.

Whether kernels are interpreted must be said before Triton is imported, so they need a process of their own;
torch and the kernels are imported once in it, for all scripts. A line of its input is JSON: where a script's
output goes, where its errors go, and its words; the answer is its exit status.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback

import torch

import moeclipse.ops.expert_mlp  # noqa: F401  (what takes long to import)


def run(output: str, errors: str, words: list[str]) -> None:
    code = 1
    try:
        for number, path in ((1, output), (2, errors)):
            with open(path, "w") as file:
                os.dup2(file.fileno(), number)
        sys.argv = words
        torch.set_num_threads(1)
        runpy.run_path(words[0], run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    for line in sys.stdin:
        output, errors, *words = json.loads(line)
        child = os.fork()
        if child == 0:
            run(output, errors, words)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
