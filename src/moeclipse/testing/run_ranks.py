"""Run a function on several ranks of this machine and get back what each returns.

Ranks are forked (0.1 s for two; spawning takes seconds, and is for parents that use CUDA), joined by gloo
over a file, and watched: at the deadline every rank prints its stack and the test fails with all of them. The
deadline counts seconds in which the ranks stand still: on a busy machine they take as long as they need.

Hazard: no fork survives threads that a library has started (`core/forking`). So the environment says
`OMP_NUM_THREADS=1` before torch is loaded, what computes before ranks start does so in `run_alone`, and where
threads stand all the same, ranks are refused at once instead of waiting for ever.
"""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.start import Backend, RankPlace, device_settings, start, stop
from moeclipse.comm.watch.watchdog import Watchdog
from moeclipse.core.errors import CommError
from moeclipse.core.forking import refuse_behind_threads

START_S = 120.0
"""Until all ranks must have met: a short deadline of collectives is about collectives."""
LOOK_S = 0.5
"""How often it is asked whether ranks still compute."""
LATE_S = 4 * LOOK_S
"""Who looks later than this behind the last look was stopped, as ranks may have been: no more is counted."""
STILL = 0.1
"""Ranks that take, or wait for, less than this share of a core, all together, stand still."""
BUSY = 10
"""Ranks that compute without end are ended at so many deadlines."""
TOLD = re.compile(r"^\S*CommError: rank (\d+) failed.*$", re.MULTILINE)
PARENT = r"  File [^\n]* in _child\n(  File [^\n]*\n)*"


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    deadline_s: float = 60.0,
    collective_deadline_s: float = 120.0,
    device: str = "cpu",
    backend: Backend = "auto",
    before: Callable[[int], None] | None = None,
    mirrored: bool = False,
) -> list[Any]:
    """[function(mesh, *args) for each rank]; results are tensors and plain values. Raises any failure.

    `before(rank)` runs in each rank's process before it meets the others.
    """
    __tracebackhide__ = True  # pytest shows the rank's frames, not these
    outcomes = run_ranks_raw(
        num_ranks,
        function,
        *args,
        dp=dp,
        tp=tp,
        pp=pp,
        deadline_s=deadline_s,
        collective_deadline_s=collective_deadline_s,
        device=device,
        backend=backend,
        before=before,
        mirrored=mirrored,
    )
    if not all(well for well, _ in outcomes):
        raise AssertionError(_failures(outcomes))
    return [what for _, what in outcomes]


def run_alone(function: Callable[..., Any], *args: Any) -> Any:
    """function(mesh, *args) on one rank in a process of its own.

    Backward on a machine with a GPU starts threads that no later fork survives, so references, too, are
    computed outside the parent.
    """
    __tracebackhide__ = True
    return run_ranks(1, function, *args)[0]


def run_ranks_raw(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    deadline_s: float = 60.0,
    collective_deadline_s: float = 120.0,
    device: str = "cpu",
    backend: Backend = "auto",
    before: Callable[[int], None] | None = None,
    mirrored: bool = False,
) -> list[tuple[bool, Any]]:
    """(True, result) or (False, traceback) of each rank; a rank that was killed reports its signal."""
    __tracebackhide__ = True
    # CUDA that this process has begun to use does not survive a fork: then ranks start from nothing.
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_initialized() else "fork")
    if context.get_start_method() == "fork":
        refuse_behind_threads()
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[tuple[BaseProcess, Connection]] = []
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            axes = {"dp": dp, "tp": tp, "pp": pp, "mirrored": mirrored}
            place = (rank, num_ranks, axes, folder, collective_deadline_s, device, backend, before)
            process = context.Process(target=_child, args=(place, sender, function, args), daemon=True)
            process.start()
            sender.close()
            ranks.append((process, receiver))
        return _collect(ranks, Path(folder), deadline_s)


def _child(place: tuple[Any, ...], sender: Connection, function: Callable[..., Any], args: Any) -> None:
    rank, num_ranks, axes, folder, collective_deadline_s, device, backend, before = place
    stacks = open(Path(folder) / f"stack-{rank}", "w")  # noqa: SIM115  (open for the child's whole life)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    met = False
    try:
        if before is not None:
            before(rank)
        if device == "cuda":  # counted through NVML: the device itself is touched after the settings below
            device = f"cuda:{rank % torch.cuda.device_count()}"
        where = RankPlace(rank=rank, num_ranks=num_ranks, local_rank=rank, local_ranks=num_ranks)
        if backend == "nccl":
            os.environ |= device_settings(
                where, pp=axes["pp"], deadline_s=collective_deadline_s, backend=backend
            )
        watch = start(
            where,
            device=torch.device(device),
            deadline_s=collective_deadline_s,
            start_deadline_s=START_S,
            store=dist.FileStore(str(Path(folder) / "store"), num_ranks),
            backend=backend,
        )
        met = True
        ep = num_ranks // (axes["dp"] * axes["tp"] * axes["pp"])
        # Over NCCL a host can wait for ever; on CPU every wait has a deadline of its own.
        watchdog = Watchdog(watch, end=partial(_end, sender)) if backend == "nccl" else nullcontext()
        with watchdog:
            try:
                mesh = Mesh(**axes, ep=ep, rank=rank, device=torch.device(device), watch=watch)
                if num_ranks > 1:  # who leaves at once would break the connections of others
                    dist.all_reduce(torch.zeros(()))
                outcome = (True, function(mesh, *args))
            except BaseException as error:
                watch.publish(f"{type(error).__name__}: {error}")
                raise
            stop()
    except BaseException as error:
        own = (
            error.__traceback__.tb_next if error.__traceback__ else None
        )  # without the frame of this function
        outcome = (False, "".join(traceback.format_exception(type(error), error, own)))
    _leave(sender, outcome, met)


def _end(sender: Connection, error: CommError) -> None:
    _leave(sender, (False, f"{type(error).__name__}: {error}"))


def _leave(sender: Connection, outcome: tuple[bool, Any], met: bool = True) -> None:
    # By value: torch would otherwise pass tensors as file descriptors that die with this process.
    buffer = io.BytesIO()
    torch.save((*outcome, met), buffer)
    sender.send_bytes(buffer.getvalue())
    sender.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _collect(
    ranks: list[tuple[BaseProcess, Connection]], folder: Path, deadline_s: float
) -> list[tuple[bool, Any]]:
    __tracebackhide__ = True
    patience = _Patience(ranks, deadline_s)
    outcomes: dict[int, tuple[bool, Any]] = {}
    rank_of: dict[object, int] = {receiver: rank for rank, (_, receiver) in enumerate(ranks)}
    while waiting := [receiver for rank, (_, receiver) in enumerate(ranks) if rank not in outcomes]:
        for receiver in multiprocessing.connection.wait(waiting, LOOK_S):
            rank = rank_of[receiver]
            outcomes[rank], met = _received(rank, *ranks[rank])
            if not (outcomes[rank][0] or met):  # the others would wait for it as long as they may
                return _given_up(ranks, outcomes)
        if len(outcomes) < len(ranks) and patience.is_over():
            raise AssertionError(_stacks(ranks, outcomes, folder, deadline_s))
    for process, _ in ranks:
        process.join(max(1.0, patience.left_s))
        if process.is_alive():
            process.kill()
    return [outcomes[rank] for rank in range(len(ranks))]


def _received(rank: int, process: BaseProcess, receiver: Connection) -> tuple[tuple[bool, Any], bool]:
    """(its outcome, whether it had met the others)."""
    try:
        well, what, met = torch.load(io.BytesIO(receiver.recv_bytes()), weights_only=True)
    except EOFError:
        process.join(5)
        return (False, f"rank {rank} ended with exit code {process.exitcode} and no result"), True
    return (well, what), met


def _given_up(
    ranks: list[tuple[BaseProcess, Connection]], outcomes: dict[int, tuple[bool, Any]]
) -> list[tuple[bool, Any]]:
    """Those that still wait for a rank that never came are ended."""
    failed = next(rank for rank, (well, _) in outcomes.items() if not well)
    for rank, (process, _) in enumerate(ranks):
        process.kill()
        outcomes.setdefault(rank, (False, f"CommError: rank {failed} failed before it met the others"))
    return [outcomes[rank] for rank in range(len(ranks))]


class _Patience:
    """Counts seconds in which ranks stand still; those in which they compute only in the long run."""

    def __init__(self, ranks: list[tuple[BaseProcess, Connection]], deadline_s: float) -> None:
        self.ranks, self.left_s, self.busy_left_s = ranks, deadline_s, BUSY * deadline_s
        self.last, self.spent = time.monotonic(), 0.0

    def is_over(self) -> bool:
        now, spent = time.monotonic(), sum(_busy_seconds(process.pid) for process, _ in self.ranks)
        seen_s = min(now - self.last, LATE_S)
        self.busy_left_s -= seen_s
        if spent - self.spent < STILL * seen_s:
            self.left_s -= seen_s
        self.last, self.spent = now, spent
        return min(self.left_s, self.busy_left_s) <= 0


def _busy_seconds(pid: int | None) -> float:
    """In which it computed or waited for a core: among thirty busy processes it gets a thirtieth of one."""
    process = Path(f"/proc/{pid}")
    try:
        fields = (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0.0
    waited = 0
    for thread in process.glob("task/*/schedstat"):
        with suppress(OSError):
            waited += int(thread.read_text().split()[1])
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + 1e-9 * waited


def _failures(outcomes: list[tuple[bool, Any]]) -> str:
    """Who failed by itself first; of those that were told of it, one line."""
    failed = {rank: str(what) for rank, (well, what) in enumerate(outcomes) if not well}
    told = {
        rank: match[0]
        for rank, text in failed.items()
        if (match := TOLD.search(text)) and int(match[1]) != rank and int(match[1]) in failed
    }
    if len(told) == len(failed):  # they name each other
        told = {}
    first = [f"rank {rank}:\n{text}" for rank, text in failed.items() if rank not in told]
    return "\n".join(first + [f"rank {rank}: {line}" for rank, line in told.items()])


def _stacks(
    ranks: list[tuple[BaseProcess, Connection]],
    outcomes: dict[int, tuple[bool, Any]],
    folder: Path,
    deadline_s: float,
) -> str:
    """Where each rank stands, behind what those say that have failed."""
    for process, _ in ranks:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.5)
    report = [f"the ranks did not finish within {deadline_s:g} s"]
    report += [f"rank {rank}:\n{what}" for rank, (well, what) in outcomes.items() if not well]
    for rank, (process, _) in enumerate(ranks):
        stack = (folder / f"stack-{rank}").read_text() or "(ended)"
        # What called a forked rank is the parent's stack: pytest's, most of it.
        report.append(f"--- rank {rank}\n{re.sub(PARENT, '', stack)}")
        process.kill()
    return "\n".join(report)
