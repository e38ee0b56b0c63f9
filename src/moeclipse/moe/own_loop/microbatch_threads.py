"""Microbatches that take turns: each runs until it has something to wait for, then lets another go on.

    turns.run(jobs)      all jobs, two in flight, in threads of which one runs at any time
    turns.switch()       inside a job: let the next one go on, and come back when it is this one's turn

Idea. A model of somebody else's is one call that cannot be cut. A thread can stop in the middle of it, and a
thread has its own autocast, grad mode and hooks, as a microbatch must. Nothing runs at the same time: whose
turn it is follows from the number of switches alone, so all ranks launch their transfers in one order.

What a job finds when it comes back is what it left: torch's random numbers (checkpointing restores them, and
must find those of its own microbatch), the last reports of the layers, and the losses of its forward. The
first job goes on with the numbers of the process; each other one has a seed drawn from them.

Hazard. Saved-tensor hooks and function modes that are entered around `run` belong to the caller's thread and
do not reach the jobs.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol, TypeVar

import torch

from moeclipse.moe.losses import UnreadLosses

WIDTH = 2
"""Microbatches in flight: one computes while the other's rows travel."""


Result = TypeVar("Result")


class Reporting(Protocol):
    last: Any
    unread: UnreadLosses


class Stopped(BaseException):
    """Unwinds a job because another one failed."""


class Turns:
    def __init__(self, layers: Sequence[Reporting], device: torch.device) -> None:
        self.layers, self.device = layers, device
        self.baton: torch.Tensor | None = None
        """What orders the backward passes of the jobs (`moe/exchange/dispatch_interleaved`)."""
        self.reports: dict[int, list[Any]] = {}
        self._threads: dict[int, int] = {}
        self._gate = threading.Condition()
        self._live: list[int] = []
        self._now: int | None = None
        self._kept: dict[int, list[torch.Tensor]] = {}
        self._unread: dict[int, list[UnreadLosses]] = {}
        self._failed: BaseException | None = None

    def run(self, jobs: Sequence[Callable[[], Result]]) -> list[Result]:
        """What each job returns; the first error of any of them."""
        if len(jobs) == 1:
            results = [jobs[0]()]
            self.reports[0] = self._lasts()
            return results
        self._results: list[Any] = [None] * len(jobs)
        self._waiting = list(range(len(jobs)))
        begun, settings = self._numbers(), thread_settings(self.device)
        for number in self._waiting:
            self.reports[number] = self._lasts()
            self._unread[number] = [UnreadLosses() for _ in self.layers]
            self._kept[number] = begun if number == 0 else self._seeded()
        self._set_numbers(begun)
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._job, number, job, settings),
                name=f"microbatch {number}",
                daemon=True,
            )
            for number, job in enumerate(jobs)
        ]
        with self._gate:
            self._live = [self._waiting.pop(0) for _ in range(min(WIDTH, len(jobs)))]
            self._begin(self._live[0])
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for layer in self.layers:
            layer.unread = UnreadLosses()
        if self._failed is not None:
            raise self._failed
        self._set_numbers(self._kept[0])
        return self._results

    def switch(self) -> None:
        """Nothing, where this thread runs no job, or no other job is left."""
        me = self._threads.get(threading.get_ident())
        if me is None or len(self._live) == 1:
            return
        with self._gate:
            self._leave(me)
            self._begin(self._live[(self._live.index(me) + 1) % len(self._live)])
            self._wait(me)

    @property
    def taken(self) -> bool:
        """Whether this thread runs a job."""
        return threading.get_ident() in self._threads

    def _job(
        self, number: int, job: Callable[[], object], settings: Callable[[], AbstractContextManager[object]]
    ) -> None:
        try:
            with self._gate:
                self._wait(number)
                self._threads[threading.get_ident()] = number
            with settings():
                self._results[number] = job()
            with self._gate:
                self._end(number)
        except Stopped:
            pass
        except BaseException as error:
            with self._gate:
                self._failed = self._failed or error
                self._gate.notify_all()

    def _wait(self, me: int) -> None:
        self._gate.wait_for(lambda: self._now == me or self._failed is not None)
        if self._failed is not None:
            raise Stopped

    def _begin(self, number: int) -> None:
        for layer, last, unread in zip(self.layers, self.reports[number], self._unread[number], strict=True):
            layer.last, layer.unread = last, unread
        self._set_numbers(self._kept[number])
        self._now = number
        self._gate.notify_all()

    def _leave(self, number: int) -> None:
        self.reports[number], self._kept[number] = self._lasts(), self._numbers()

    def _end(self, number: int) -> None:
        """The next job that has not begun takes this one's place; the other one in flight goes on first."""
        self._leave(number)
        place = self._live.index(number)
        self._live[place : place + 1] = [self._waiting.pop(0)] if self._waiting else []
        if self._live:
            after = place + 1 if len(self._live) == WIDTH else place
            self._begin(self._live[after % len(self._live)])

    def _lasts(self) -> list[object]:
        return [layer.last for layer in self.layers]

    # random numbers

    def _numbers(self) -> list[torch.Tensor]:
        found = [torch.get_rng_state()]
        if self.device.type == "cuda":
            found.append(torch.cuda.get_rng_state(self.device))
        return found

    def _set_numbers(self, numbers: list[torch.Tensor]) -> None:
        torch.set_rng_state(numbers[0])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(numbers[1], self.device)

    def _seeded(self) -> list[torch.Tensor]:
        """The beginning of a job's own; the process goes on behind the seed."""
        seed = int(torch.randint(2**62, ()))
        found = [torch.Generator().manual_seed(seed).get_state()]
        if self.device.type == "cuda":
            found.append(torch.Generator(self.device).manual_seed(seed).get_state())
        return found


def thread_settings(device: torch.device) -> Callable[[], object]:
    """What the caller's thread has set, to be entered by another one."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    kinds = {"cpu", device.type}
    autocast = {
        kind: (
            torch.get_autocast_dtype(kind),
            torch.is_autocast_enabled(kind),
            torch.is_autocast_cache_enabled(),
        )
        for kind in kinds
    }
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextmanager
    def entered() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad and not inference))
            if stream is not None:
                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(torch.cuda.stream(stream))
            for kind, (dtype, enabled, cache) in autocast.items():
                if enabled:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
            yield

    return entered
