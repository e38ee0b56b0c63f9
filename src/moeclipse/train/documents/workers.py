"""Processes that tokenise: documents go there as bytes, tokens come back, in the order of the documents.

Each worker is a fresh Python (`serve`) at the two ends of a pipe, so nothing of this process is forked and a
script needs no guard around its main part. A frame is its length and its bytes; batches and tokens are JSON
heads with raw bytes behind them.

Contract. `Workers.map` yields results in the order of the batches, has a few batches in flight for each
worker and no more, and raises the DataError of the first batch that has one. Leaving it ends all workers.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any, Literal, Protocol

import numpy as np

from moeclipse.core.errors import DataError
from moeclipse.core.outside import parse_json
from moeclipse.train.documents.formats import RawBatch
from moeclipse.train.documents.tokenizer import DocumentEncoder, Encoded, Recipe

AHEAD = 2
"""Batches in flight for each worker."""
ORDER: Literal["little"] = "little"
PROGRAM = "from moeclipse.train.documents.workers import serve; serve()"


class Encoder(Protocol):
    """Who makes tokens of batches, in their order."""

    def __enter__(self) -> Encoder: ...
    def __exit__(self, *_: object) -> None: ...
    def map(self, batches: Iterable[RawBatch]) -> Iterator[tuple[RawBatch, Encoded]]: ...


class Here:
    """In this process, without threads."""

    def __init__(self, recipe: Recipe, paths: Sequence[str]) -> None:
        self.encoder, self.paths = DocumentEncoder(recipe), paths

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to end."""

    def map(self, batches: Iterable[RawBatch]) -> Iterator[tuple[RawBatch, Encoded]]:
        for batch in batches:
            yield batch, self.encoder.encode(batch, self.paths[batch.file])


class Workers:
    """So many processes; use it in a `with`."""

    def __init__(self, recipe: Recipe, paths: Sequence[str], count: int) -> None:
        self.count = count
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._all: list[subprocess.Popen[bytes]] = []
        head = json.dumps([recipe.to_json(), list(paths)]).encode()
        path = [part for part in sys.path if part]
        program = f"import sys; sys.path[:] = {path!r}; {PROGRAM}"
        for _ in range(count):
            worker = subprocess.Popen(
                [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            self._all.append(worker)
            self._idle.put(worker)
            assert worker.stdin is not None
            write_frame(worker.stdin, head)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._all:
            worker.terminate()
        for worker in self._all:
            worker.communicate()

    def map(self, batches: Iterable[RawBatch]) -> Iterator[tuple[RawBatch, Encoded]]:
        waiting: deque[tuple[RawBatch, Future[Encoded]]] = deque()
        with ThreadPoolExecutor(self.count) as threads:
            try:
                for batch in batches:
                    waiting.append((batch, threads.submit(self._ask, batch)))
                    while len(waiting) >= AHEAD * self.count:
                        asked, answer = waiting.popleft()
                        yield asked, answer.result()
                while waiting:
                    asked, answer = waiting.popleft()
                    yield asked, answer.result()
            finally:
                for _, answer in waiting:
                    answer.cancel()

    def _ask(self, batch: RawBatch) -> Encoded:
        worker = self._idle.get()
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            write_frame(worker.stdin, packed(batch))
            reply = read_frame(worker.stdout)
        except OSError as error:
            raise DataError(f"a process that tokenises has died: {error}; is there enough memory?") from error
        finally:
            self._idle.put(worker)
        if reply is None:
            raise DataError("a process that tokenises has died; is there enough memory?")
        head, body = taken_apart(reply)
        if "error" in head:
            raise DataError(head["error"])
        cut = 8 * head["documents"]
        end = cut + 4 * head["tokens"]
        return Encoded(
            lengths=np.frombuffer(body[:cut], dtype=np.int64),
            tokens=np.frombuffer(body[cut:end], dtype=np.uint32),
            counted=np.frombuffer(body[end:], dtype=np.uint8),
        )


def serve() -> None:
    """A worker's whole life: recipe first, then batches until the pipe ends."""
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # there is a worker for each core
    source, target = sys.stdin.buffer, sys.stdout.buffer
    first = read_frame(source)
    if first is None:
        return
    recipe, paths = parse_json(bytes(first))
    encoder = DocumentEncoder(Recipe.from_json(recipe), many=True)
    with suppress(BrokenPipeError, KeyboardInterrupt):
        while (frame := read_frame(source)) is not None:
            try:
                batch = unpacked(frame)
                made = encoder.encode(batch, paths[batch.file])
            except DataError as error:
                write_frame(target, framed({"error": str(error)}))
                continue
            head = {"documents": len(made.lengths), "tokens": len(made.tokens)}
            write_frame(target, framed(head, made.lengths, made.tokens, made.counted))


def packed(batch: RawBatch) -> bytes:
    head = {name: value for name, value in vars(batch).items() if name != "raw"}
    return framed(head | {"sizes": [len(one) for one in batch.raw]}, *batch.raw)


def unpacked(frame: memoryview) -> RawBatch:
    head, body = taken_apart(frame)
    raw, first = [], 0
    for size in head.pop("sizes"):
        raw.append(bytes(body[first : first + size]))
        first += size
    return RawBatch(raw=raw, **head)


def framed(head: Mapping[str, object], *parts: bytes | np.ndarray) -> bytes:
    """The size of a JSON head, the head, and raw bytes."""
    text = json.dumps(head).encode()
    return b"".join([len(text).to_bytes(8, ORDER), text, *(bytes(part) for part in parts)])


def taken_apart(frame: memoryview) -> tuple[dict[str, Any], memoryview]:
    end = 8 + int.from_bytes(frame[:8], ORDER)
    return parse_json(bytes(frame[8:end])), frame[end:]


def write_frame(file: IO[bytes], data: bytes) -> None:
    file.write(len(data).to_bytes(8, ORDER))
    file.write(data)
    file.flush()


def read_frame(file: IO[bytes]) -> memoryview | None:
    """None where the other end is gone."""
    size = file.read(8)
    if len(size) < 8:
        return None
    data = file.read(int.from_bytes(size, ORDER))
    return memoryview(data) if len(data) == int.from_bytes(size, ORDER) else None
