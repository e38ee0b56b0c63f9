"""Host-device copies that overlap compute: one lane for each direction.

    came = lane.copy(TO_DEVICE, "fetch of states, bucket 7", buffer, held)      # launched; nobody waits
    ...                                                                         # compute
    came.get()                                                                  # from here on it may be used
    left = lane.copy(TO_HOST, "store of states, bucket 7", held, buffer)
    lane.copy(TO_DEVICE, "fetch of states, bucket 9", buffer, other, after=left)

On CUDA a lane is a stream, order comes from events, and the host waits for nothing. On CPU it is a thread
that copies, and takes as long as a wire of the given rate would: the same order, the same parity, times to
compare a prediction with.

Contract: a copy to the host begins behind what the current stream holds at launch; one to the device begins
behind `after` alone, because the buffer it fills was last read by that copy, or if asked, behind what the
current stream holds, too. Whoever owns the memory keeps it
until `close`. What a copy raises in its thread is raised by `get`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import torch

from moeclipse.comm.async_ops.ledger import HOST_GROUP
from moeclipse.comm.async_ops.record import Recorder
from moeclipse.schedule.kinds import TO_DEVICE, TO_HOST


class Copy:
    """One that is under way; what follows `get` may use what it brought."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.event: torch.cuda.Event | None = None
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def get(self) -> None:
        with self._recorder.waiting():
            if self.event is not None:
                torch.cuda.current_stream().wait_event(self.event)
            else:
                self.ended.wait()
        self._raise()

    def finish(self) -> None:
        """The host itself waits: behind this it may read what came."""
        if self.event is not None:
            self.event.synchronize()
        else:
            self.ended.wait()
        self._raise()

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error


class HostLane:
    def __init__(self, device: torch.device, recorder: Recorder, rate: float = 0.0) -> None:
        """`rate`: bytes per second each way, on CPU; 0: as fast as memory is."""
        self.recorder, self.rate = recorder, rate
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._queues: dict[str, queue.SimpleQueue[Callable[[], None] | None]] = {}
        self._threads: list[threading.Thread] = []
        for lane in (TO_DEVICE, TO_HOST):
            if device.type == "cuda":
                self._streams[lane] = torch.cuda.Stream(device, priority=-1)
            else:
                self._queues[lane] = queue.SimpleQueue()
                thread = threading.Thread(target=self._work, args=(lane,), name=lane, daemon=True)
                self._threads.append(thread)
                thread.start()

    def copy(
        self,
        lane: str,
        label: str,
        into: torch.Tensor,
        source: torch.Tensor,
        after: Copy | None = None,
        *,
        behind_compute: bool = False,
    ) -> Copy:
        """The bytes of `source` to `into`, alike in shape; `behind_compute`: what runs may read `into`."""
        assert into.nbytes == source.nbytes, f"{label}: {source.nbytes} bytes into {into.nbytes}"
        found = Copy(self.recorder)
        if lane in self._streams:
            if lane == TO_HOST or behind_compute:
                self._streams[lane].wait_stream(torch.cuda.current_stream())
            self._on_stream(lane, label, into, source, after, found)
            return found
        stamps = self.recorder.launch(lane, HOST_GROUP, label, outlives=True)

        def run() -> None:
            if after is not None:
                after.ended.wait()
            begun = time.perf_counter_ns()
            stamps.begun = begun
            try:
                if after is not None:
                    after._raise()
                into.copy_(source)
                if self.rate:
                    time.sleep(max(source.nbytes / self.rate - 1e-9 * (time.perf_counter_ns() - begun), 0.0))
            except BaseException as error:
                found.error = error
            stamps.done = time.perf_counter_ns()
            found.ended.set()

        self._queues[lane].put(run)
        return found

    def _on_stream(
        self, lane: str, label: str, into: torch.Tensor, source: torch.Tensor, after: Copy | None, found: Copy
    ) -> None:
        stream = self._streams[lane]
        if after is not None and after.event is not None:
            stream.wait_event(after.event)
        with torch.cuda.stream(stream):
            stamps = self.recorder.launch(lane, HOST_GROUP, label, outlives=True)
            into.copy_(source, non_blocking=True)
            stamps.done = self.recorder.stamp()
            found.event = torch.cuda.Event()
            found.event.record()

    def _work(self, lane: str) -> None:
        while (job := self._queues[lane].get()) is not None:
            job()

    def close(self) -> None:
        """When nothing is under way any more."""
        for stream in self._streams.values():
            stream.synchronize()
        for waiting in self._queues.values():
            waiting.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
