"""FIFOs that copy bytes and wait for other ranks' words without occupying a processor of the device.

`copy_engines` speaks to its streams in four words:

    wait(word, value)    nothing behind it happens before another rank wrote at least `value`
    copy(to, source)     bytes, by a copy engine
    write(word, value)   what stands before it is visible to whoever sees the value
    mark()               a place in the FIFO that others can be ordered behind

* `DriverStream` puts all of them into a CUDA stream: the driver's stream memory operations poll and write a
  word in registered host memory. No kernel spins and no thread takes part.
* `ThreadStream` is a thread that does them one after the other. It serves ranks on the CPU, and devices whose
  driver refuses stream memory operations.

Order of memory: a thread waits and posts through `Signals`, which has the fences; a copy that it launches
comes behind all that the host has seen, as every launch does. The driver writes a word behind a fence of the
device (cuStreamWriteValue32 without NO_MEMORY_BARRIER) that covers the copies before it. The host takes no
part there: it looks at words only to name who is late.

Hazard: an operation of a DriverStream that waits cannot time out. `copy_engines` watches from outside and
lets it go by writing the word itself. Rows are wrong then, so that store needs no order.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from ctypes import memmove
from typing import Protocol

import torch

from moeclipse.comm.shared.signals import LINE, Signals
from moeclipse.core.errors import CommError
from moeclipse.ops.cuda_driver import cuda_driver

PORTABLE_AND_MAPPED = 3
PROBE_S = 2.0


class Mark(Protocol):
    def wait(self) -> None:
        """Let what follows on this rank use what stood before the mark."""

    def done(self) -> bool: ...


class Stream(Protocol):
    def begin(self) -> None:
        """What is put in from here on comes after everything that the current stream holds."""

    def wait(self, word: int, value: int, peer: int, label: str) -> None: ...
    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None: ...
    def write(self, word: int, value: int) -> None: ...
    def mark(self) -> Mark: ...
    def close(self) -> None: ...


class Driver:
    """What `DriverStream` asks of the CUDA driver, for one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._calls = calls = cuda_driver()
        self.copy, self.wait, self.write = calls.copy, calls.wait, calls.write

    def register(self, address: int, num_bytes: int) -> int:
        """Lock host memory for the device; returns its address there."""
        runtime = torch.cuda.cudart()
        assert runtime is not None
        code = runtime.cudaHostRegister(address, num_bytes, PORTABLE_AND_MAPPED)
        if int(code):
            raise CommError(f"CUDA cannot register {num_bytes / 2**20:.0f} MiB of shared memory: {code}")
        return self._calls.device_address(address)

    def probe(self, address: int) -> str | None:
        """Why stream memory operations do not work on this word; None where they do."""
        try:
            stream = torch.cuda.Stream(self.device)
            self.write(stream.cuda_stream, address, 1)
            self.wait(stream.cuda_stream, address, 1)
            ended = torch.cuda.Event()
            ended.record(stream)
            until = time.monotonic() + PROBE_S
            while not ended.query():
                if time.monotonic() > until:
                    return f"a written word was not seen within {PROBE_S:g} s"
            return None
        except (CommError, RuntimeError) as error:
            return str(error).splitlines()[0]


class EventMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def done(self) -> bool:
        return bool(self._event.query())


class DriverStream:
    def __init__(self, driver: Driver, words: int) -> None:
        """`words` is the device's address of the first word."""
        self._driver, self._words = driver, words
        self.stream = torch.cuda.Stream(driver.device)

    def begin(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())

    def wait(self, word: int, value: int, peer: int, label: str) -> None:
        del peer, label  # nobody can be named here: `copy_engines` watches from outside
        self._driver.wait(self.stream.cuda_stream, self._words + word * LINE, value)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self._driver.copy(self.stream.cuda_stream, to.data_ptr(), source.data_ptr(), to.nbytes)

    def write(self, word: int, value: int) -> None:
        self._driver.write(self.stream.cuda_stream, self._words + word * LINE, value)

    def mark(self) -> EventMark:
        event = torch.cuda.Event()
        event.record(self.stream)
        return EventMark(event)

    def close(self) -> None:
        pass


class ThreadMark:
    def __init__(self, owner: ThreadStream) -> None:
        self._owner, self._reached = owner, threading.Event()

    def reach(self) -> None:
        self._reached.set()

    def wait(self) -> None:
        self._reached.wait()
        if self._owner.failure is not None:
            raise self._owner.failure

    def done(self) -> bool:
        return self._reached.is_set()


class ThreadStream:
    """Runs what it is given in order. After a failure it runs nothing more, but reaches its marks."""

    def __init__(self, name: str, signals: Signals, device: torch.device) -> None:
        self._signals, self._device = signals, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._work: queue.SimpleQueue[Callable[[], None] | ThreadMark | None] = queue.SimpleQueue()
        self.failure: Exception | None = None
        threading.Thread(target=self._run, name=f"moeclipse-{name}", daemon=True).start()

    def begin(self) -> None:
        if self._stream is not None:
            event, stream = torch.cuda.Event(), self._stream
            event.record()
            self._work.put(lambda: stream.wait_event(event))

    def wait(self, word: int, value: int, peer: int, label: str) -> None:
        self._work.put(lambda: self._signals.wait(word, value, peer, label))

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        if self._stream is None:
            target, origin, count = to.data_ptr(), source.data_ptr(), to.nbytes
            self._work.put(lambda: _move(target, origin, count))
            return
        inference = torch.is_inference_mode_enabled()
        self._work.put(lambda: self._copy_on_device(to, source, inference))

    def write(self, word: int, value: int) -> None:
        self._work.put(lambda: self._signals.post(word, value))

    def mark(self) -> ThreadMark:
        mark = ThreadMark(self)
        self._work.put(mark)
        return mark

    def close(self) -> None:
        self._work.put(None)

    def _copy_on_device(self, to: torch.Tensor, source: torch.Tensor, inference: bool) -> None:
        assert self._stream is not None
        with torch.inference_mode(inference), torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
        self._stream.synchronize()

    def _run(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self._device)
        while (item := self._work.get()) is not None:
            if isinstance(item, ThreadMark):
                item.reach()
            elif self.failure is None:
                try:
                    item()
                except Exception as error:
                    self.failure = error


def _move(target: int, origin: int, count: int) -> None:
    memmove(target, origin, count)  # lets other threads of this process run
