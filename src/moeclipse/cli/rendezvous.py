"""What torch's elastic agent needs from us to start ranks on one machine: a meeting point and files.

The meeting point is a TCPStore on a socket bound to 127.0.0.1, new for every attempt, so that a restarted
rank cannot read the address of its dead predecessor. The files are one folder per attempt and rank, where a
failing rank leaves its error; asking for the next attempt's folder is also the moment at which a restart can
be announced, or refused when the same error would only come again.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from moeclipse.cli.failures import Failure, read_failures, root_cause
from moeclipse.train.incidents import kept_by_launcher

BACKEND = "moeclipse-loopback"
BAD_INPUT = 2  # exit status of errors that a restart cannot mend


class NotRestarted(Exception):
    """A failure that would only come again."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class LoopbackRendezvous(RendezvousHandler):
    """One agent, alone, with a store that only this machine can reach."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
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


def register() -> None:
    """Make the rendezvous known to the agent; a second call changes nothing."""
    rendezvous_handler_registry.register(BACKEND, LoopbackRendezvous)


class RankFiles(DefaultLogsSpecs):
    """Error files per attempt; announces restarts, and refuses those that cannot help."""

    def __init__(self, folder: str, restarts: int) -> None:
        super().__init__(log_dir=folder)
        self.newest: Path | None = None
        self._restarts = restarts
        self.asked: Callable[[], int] = lambda: 0
        """The signal by which the run was asked to leave, or 0."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        attempt = int(envs[0].get("TORCHELASTIC_RESTART_COUNT", "0"))
        if attempt > 0:
            written = read_failures(self.newest)
            failure = root_cause(written, {}) if written else None
            if self.asked():
                raise SignalException("asked to leave", signal.Signals(self.asked()))
            if failure is not None and failure.code == BAD_INPUT:
                raise NotRestarted(failure)
            cause = failure.text if failure else "a rank was killed"
            if failure is None:
                kept_by_launcher(self.newest, None, cause)
            print(f"restart {attempt} of {self._restarts}: {cause}", file=sys.stderr, flush=True)
        destination = super().reify(envs)
        self.newest = Path(envs[0]["TORCHELASTIC_ERROR_FILE"]).parent.parent
        return destination


def free_loopback_socket() -> socket.socket:
    """A listening socket that only this machine can reach."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    return listener
