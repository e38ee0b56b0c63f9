"""Torch's elastic agent, and what it needs from us to start ranks on one machine: a meeting point and files.

The meeting point is a TCPStore on a socket bound to 127.0.0.1, new for every attempt, so that a restarted
rank cannot read the address of its dead predecessor. The files are one folder per attempt and rank, where a
failing rank leaves its error; asking for the next attempt's folder is also the moment at which a restart can
be announced, or refused when the same error would only come again. Who was killed leaves no word: how it
ended, the agent has seen, and says in time for that.

Where the number of ranks may change (`cli/seats`), the agent starts fewer once one is lost for good, and more
when ranks have left to make room.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from moeclipse.cli.failures import Failure, read_failures, root_cause
from moeclipse.cli.seats import Seats, culprit
from moeclipse.core.errors import Preempted
from moeclipse.core.shown import say
from moeclipse.core.steps import nth
from moeclipse.train.run.incidents import kept_by_launcher, step_of, told_by_launcher

BACKEND = "moeclipse-loopback"
BAD_INPUT = 2  # exit status of errors that a restart cannot mend
RECURS = 3
"""Equal faults in one step, one after the other, that show that restarts do not help."""


class NotRestarted(Exception):
    """A failure that would only come again."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class LoopbackRendezvous(RendezvousHandler):
    """One agent, alone, with a store that only this machine can reach."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._closed = False
        self.waiting = 0
        """For the agent: 1 makes it start all ranks again, which counts as no failure."""
        self._store: dist.Store | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        self.waiting = 0
        listener = free_loopback_socket()
        host, port = listener.getsockname()
        self._store = dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(minutes=10),
            master_listen_fd=listener.detach(),
        )
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(host, port))

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def num_nodes_waiting(self) -> int:
        return self.waiting

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def shutdown(self) -> bool:
        self._closed, self._store = True, None
        return True


class RankFiles(DefaultLogsSpecs):
    """Error files per attempt; announces restarts, and refuses those that cannot help."""

    def __init__(self, folder: str, restarts: int) -> None:
        super().__init__(log_dir=folder)
        self.newest: Path | None = None
        self._restarts = restarts
        self.asked: Callable[[], int] = lambda: 0
        """The signal by which the run was asked to leave, or 0."""
        self.codes: dict[int, int] = {}
        """Exit statuses of the ranks that made the newest attempt fail."""
        self.changed = ""
        """Why the next attempt has another number of ranks: then it is no restart."""
        self._restarted = 0
        self._met: list[tuple[int, int, int | None]] = []
        """Rank, exit status and step of each fault."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        attempt = int(envs[0].get("TORCHELASTIC_RESTART_COUNT", "0"))
        if attempt > 0:
            if self.asked():
                raise SignalException("asked to leave", signal.Signals(self.asked()))
            say(self.changed or self._restart(), error=True)
            self.changed = ""
        destination = super().reify(envs)
        self.newest, self.codes = Path(envs[0]["TORCHELASTIC_ERROR_FILE"]).parent.parent, {}
        return destination

    def _restart(self) -> str:
        """Why the newest attempt failed; raises where another one would fail of it, too."""
        failure, _ = self.failure()
        if failure.code == BAD_INPUT:
            raise NotRestarted(failure)
        step, recurs = self.meets(failure)
        if recurs and step is not None:
            again = f"in step {nth(step)} for the {RECURS}rd time in a row: a restart does not help"
            text = f"{failure.text}; {again}"
            raise NotRestarted(replace(failure, text=text))
        self._met.append((failure.rank, failure.code, step))
        self._restarted += 1
        return f"restart {self._restarted} of {self._restarts}: {failure.text}"

    def failure(self) -> tuple[Failure, list[Failure]]:
        """Of the newest attempt, and all that its ranks wrote; who was killed gets its record now."""
        assert self.newest is not None
        written = read_failures(self.newest)
        failure = root_cause(written, self.codes)
        if failure not in written and failure.code != BAD_INPUT:
            kept_by_launcher(self.newest, failure.rank, failure.text)
        return failure, written

    def meets(self, failure: Failure) -> tuple[int | None, bool]:
        """The step of a failure, and whether the ones before were the same."""
        assert self.newest is not None
        step = step_of(self.newest)
        met = [*self._met, (failure.rank, failure.code, step)]
        return step, step is not None and met[-RECURS:] == [met[-1]] * RECURS

    def begin_anew(self, changed: str) -> None:
        """With other ranks: what was met before says nothing about them."""
        self.changed = changed
        self._met.clear()


class Agent(LocalElasticAgent):
    """Starts, watches and restarts ranks, and says how those ended that it saw fail."""

    def __init__(
        self,
        run_id: str,
        command: Sequence[str],
        files: RankFiles,
        *,
        num_ranks: int,
        restarts: int,
        seats: Seats | None = None,
    ) -> None:
        """`seats`: where the number of ranks may change."""
        program, *words = command
        self._meeting = LoopbackRendezvous(run_id)
        spec = WorkerSpec(
            role="default",
            local_world_size=num_ranks,
            entrypoint=program,
            args=tuple(words),
            rdzv_handler=self._meeting,
            max_restarts=restarts,
            local_addr="127.0.0.1",
        )
        super().__init__(spec, files)
        self._files, self._seats = files, seats

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # A decorator of torch hides what it takes.
        monitor = cast(Callable[[WorkerGroup], RunResult], super()._monitor_workers)
        result = monitor(worker_group)
        if result.is_failed():
            self._files.codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
        if self._seats is None or self._files.asked():
            return result
        if result.is_failed():
            self._shrink(worker_group.spec, self._seats)
        elif result.state == WorkerState.SUCCEEDED and self._seats.room.exists() and self._have_left():
            self._grow(worker_group.spec, self._seats)
            return RunResult(state=WorkerState.HEALTHY)
        elif result.state == WorkerState.HEALTHY:
            self._seats.look()
        return result

    def _have_left(self) -> bool:
        return any(failure.code == Preempted.code for failure in read_failures(self._files.newest))

    def _shrink(self, spec: WorkerSpec, seats: Seats) -> None:
        """Where a rank is lost for good, the attempt that follows has fewer, and takes no restart."""
        failure, written = self._files.failure()
        if failure.code == BAD_INPUT:
            return
        of, step_met = seats.num_ranks, self._files.meets(failure)
        given_up = seats.lose(
            culprit(failure, written, of),
            began=step_met[0] is not None,
            last=self._remaining_restarts == 0,
            recurs=step_met[1],
        )
        if given_up is None:
            return
        seat, why = given_up
        self._remaining_restarts += 1
        spec.max_restarts += 1  # attempts are counted from here: no two have one number
        spec.local_world_size = seats.num_ranks
        text = f"going on with {seats.num_ranks} of {of} ranks: {failure.text}; {why}"
        self._tell("shrink", text, seats, seat=seat, step=step_met[0])

    def _grow(self, spec: WorkerSpec, seats: Seats) -> None:
        of, new = seats.num_ranks, seats.take_back()
        spec.max_restarts += 1
        spec.local_world_size = seats.num_ranks
        self._meeting.waiting = 1
        named = " and ".join(f"seat {seat}" for seat in new)
        text = f"going on with {seats.num_ranks} ranks instead of {of}: {named} can be taken again"
        step = step_of(self._files.newest) if self._files.newest is not None else None
        self._tell("grow", text, seats, seat=new[0], step=step)

    def _tell(self, kind: str, text: str, seats: Seats, **more: int | None) -> None:
        self._files.begin_anew(text)
        assert self._files.newest is not None
        told_by_launcher(self._files.newest, {"kind": kind, "what": text, "ranks": seats.num_ranks, **more})


def free_loopback_socket() -> socket.socket:
    """A listening socket that only this machine can reach."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    return listener
