"""What all benches share: `--smoke`, `--json`, and where a bench without a GPU ends.

    parser = BenchParser(__doc__, smoke={"repeats": 1})
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()

Idea. The smallest size of a bench is a set of defaults: with `--smoke` the values of `smoke` take the place
of the usual ones, and whatever else is said on the command line still counts. It takes seconds and says
whether the bench starts, runs through and writes its figures; the figures themselves say nothing.

Contract. `given.smoke` is there for sizes that no option names. A bench of kernels runs on the CPU in its
smallest size alone, through their references; in any other size it ends with status 2 (`left_without_gpu`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


class BenchParser(argparse.ArgumentParser):
    """Of the bench whose docstring is `doc`; its first line is told to who asks for help."""

    def __init__(self, doc: str | None, *, smoke: Mapping[str, Any]) -> None:
        super().__init__(description=(doc or "").partition("\n")[0], allow_abbrev=False)
        self.smallest = dict(smoke)
        self.add_argument("--smoke", action="store_true", help="the smallest size, seconds: does it run?")
        self.add_argument("--json", type=Path, metavar="FILE", help="write what was measured here")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = sys.argv[1:] if args is None else list(args)
        if "--smoke" in words:
            unknown = self.smallest.keys() - {action.dest for action in self._actions}
            assert not unknown, f"no option is called {unknown}"
            self.set_defaults(**self.smallest)
        return super().parse_known_args(words, namespace)


FEW_TOKENS = {"data.batch_size": 2, "data.seq_len": 32, "optim.accumulate": 1}
"""Of a step of `--smoke`, for benches that train a preset."""


def write(file: Path | None, found: Any) -> None:
    """As JSON, where a file was asked for."""
    if file is not None:
        file.write_text(json.dumps(found, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """What figures were measured on."""
    found: dict[str, Any] = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_initialized():
        import triton

        found |= {"device": torch.cuda.get_device_name(), "triton": triton.__version__}
    return found


def left_without_gpu(file: str, given: argparse.Namespace, on_cpu: bool = True) -> bool:
    """Whether this bench ends here with status 2; says so. `on_cpu`: its smallest size runs without a GPU."""
    if torch.cuda.device_count() or (given.smoke and on_cpu):
        return False
    more = "; --smoke runs its smallest size on the CPU" if on_cpu else ""
    print(
        f"bench/{Path(file).name} measures a GPU, and this machine has no CUDA device{more}.", file=sys.stderr
    )
    return True


def device() -> str:
    return "cuda" if torch.cuda.device_count() else "cpu"


def synchronize() -> None:
    if torch.cuda.device_count():
        torch.cuda.synchronize()


class Clock:
    """Milliseconds between two calls: by the device's events, or by the host's clock where there is none."""

    def __init__(self) -> None:
        self.begun: Any = self._now()

    @staticmethod
    def _now() -> Any:
        if not torch.cuda.device_count():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self) -> float:
        ended = self._now()
        if isinstance(ended, float):
            return 1e3 * (ended - self.begun)
        ended.synchronize()
        return float(self.begun.elapsed_time(ended))


def allocated(peak: bool = False) -> int:
    """Bytes on the device; 0 where there is none."""
    if not torch.cuda.device_count():
        return 0
    return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()


def begin_peak() -> None:
    """The most that is allocated counts from now on."""
    if torch.cuda.device_count():
        torch.cuda.reset_peak_memory_stats()
