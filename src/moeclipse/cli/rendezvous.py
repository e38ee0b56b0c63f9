"""Torch's elastic agent, and what it needs from us to start ranks on one machine: a meeting point and files.

The meeting point is a TCPStore on a socket bound to 127.0.0.1, new for every attempt, so that a restarted
rank cannot read the address of its dead predecessor. The files are one folder per attempt and rank, where a
failing rank leaves its error; asking for the next attempt's folder is also the moment at which a restart can
be announced, or refused when the same error would only come again. Who was killed leaves no word: how it
ended, the agent has seen, and says in time for that.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from moeclipse.cli.failures import Failure, read_failures, root_cause
from moeclipse.train.run.incidents import kept_by_launcher, step_of

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
        self._store: dist.Store | None = None

    def next_rendezvous(self) -> RendezvousInfo:
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
        return 0

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
        self._met: list[tuple[int, int, int | None]] = []
        """Rank, exit status and step of each fault."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        attempt = int(envs[0].get("TORCHELASTIC_RESTART_COUNT", "0"))
        if attempt > 0:
            if self.asked():
                raise SignalException("asked to leave", signal.Signals(self.asked()))
            failure = self._judge()
            print(f"restart {attempt} of {self._restarts}: {failure.text}", file=sys.stderr, flush=True)
        destination = super().reify(envs)
        self.newest, self.codes = Path(envs[0]["TORCHELASTIC_ERROR_FILE"]).parent.parent, {}
        return destination

    def _judge(self) -> Failure:
        """Why the newest attempt failed; raises where another one would fail of it, too."""
        assert self.newest is not None
        written = read_failures(self.newest)
        failure = root_cause(written, self.codes)
        if failure.code == BAD_INPUT:
            raise NotRestarted(failure)
        if failure not in written:
            kept_by_launcher(self.newest, failure.rank, failure.text)
        step = step_of(self.newest)
        self._met.append((failure.rank, failure.code, step))
        if step is not None and self._met[-RECURS:] == [self._met[-1]] * RECURS:
            text = f"{failure.text}; in step {step} for the {RECURS}rd time in a row: a restart does not help"
            raise NotRestarted(replace(failure, text=text))
        return failure


class Agent(LocalElasticAgent):
    """Starts, watches and restarts ranks, and says how those ended that it saw fail."""

    def __init__(
        self, run_id: str, command: Sequence[str], files: RankFiles, *, num_ranks: int, restarts: int
    ) -> None:
        program, *words = command
        spec = WorkerSpec(
            role="default",
            local_world_size=num_ranks,
            entrypoint=program,
            args=tuple(words),
            rdzv_handler=LoopbackRendezvous(run_id),
            max_restarts=restarts,
            local_addr="127.0.0.1",
        )
        super().__init__(spec, files)
        self._files = files

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            self._files.codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
        return result


def free_loopback_socket() -> socket.socket:
    """A listening socket that only this machine can reach."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    return listener
