"""A test bed for checkpoints: forked ranks joined by pipes, and disks that fail on command."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from io import FileIO
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from moeclipse.core.errors import CheckpointError
from moeclipse.train.checkpoints.checkpoint import Piece, Ranks, save
from moeclipse.train.checkpoints.disk import DISK, Disk

DEADLINE_S = 600


class PipeRanks:
    """Rank 0 collects from all others and tells everyone; a peer that died raises EOFError or OSError."""

    def __init__(self, rank: int, num_ranks: int, pipes: list[Connection]) -> None:
        self.rank, self.num_ranks, self.pipes = rank, num_ranks, pipes

    def gather_objects(self, obj: Any) -> list[Any]:
        if self.rank:
            self.pipes[0].send_bytes(json.dumps(obj).encode())
            return json.loads(self.pipes[0].recv_bytes())
        everyone = [obj, *(json.loads(pipe.recv_bytes()) for pipe in self.pipes)]
        data = json.dumps(everyone).encode()
        for pipe in self.pipes:
            pipe.send_bytes(data)
        return json.loads(data)


def fork_ranks(num_ranks: int, work: Callable[[Ranks], Any]) -> list[dict[str, Any]]:
    """Runs `work` in one forked process per rank; {"result"}, {"error"} or {"signal"} of each."""
    pairs = [Pipe() for _ in range(num_ranks - 1)]
    reports, children = [], []
    for rank in range(num_ranks):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            for number, (top, bottom) in enumerate(pairs, start=1):
                if rank != 0:
                    top.close()
                if rank != number:
                    bottom.close()
            pipes = [top for top, _ in pairs] if rank == 0 else [pairs[rank - 1][1]]
            _child(PipeRanks(rank, num_ranks, pipes), work, writer)
        os.close(writer)
        reports.append(reader)
        children.append(child)
    for top, bottom in pairs:
        top.close()
        bottom.close()
    return [_collect(child, reader) for child, reader in zip(children, reports, strict=True)]


def _child(ranks: PipeRanks, work: Callable[[Ranks], Any], writer: int) -> None:
    signal.alarm(DEADLINE_S)  # a hang ends as {"signal": SIGALRM}
    try:
        report = {"result": work(ranks)}
    except CheckpointError as error:
        report = {"error": str(error)}
    except (EOFError, OSError) as error:
        report = {"error": f"peer: {error!r}"}
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    with os.fdopen(writer, "wb") as file:
        file.write(json.dumps(report).encode())
    os._exit(0)


def _collect(child: int, reader: int) -> dict[str, Any]:
    with os.fdopen(reader, "rb") as file:
        report = file.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return {"signal": os.WTERMSIG(status)}
    assert status == 0, "a rank failed; its traceback stands above"
    return json.loads(report)


class CountingDisk(Disk):
    """Counts operations and calls `at` on the n-th one; a write that is hit has written half of its bytes."""

    def __init__(self, n: int = -1) -> None:
        self.n, self.count = n, 0
        self.log: list[tuple[str, str]] = []

    def at(self) -> None:
        """What happens at operation n."""

    def tick(self, name: str, path: object = "") -> bool:
        self.count += 1
        self.log.append((name, str(path)))
        return self.count - 1 == self.n

    def make_folder(self, path: Path) -> None:
        if self.tick("make_folder", path):
            self.at()
        super().make_folder(path)

    def create(self, path: Path) -> FileIO:
        if self.tick("create", path):
            self.at()
        return super().create(path)

    def write(self, file: FileIO, data: memoryview) -> None:
        if self.tick("write", file.name):
            super().write(file, data[: len(data) // 2])
            self.at()
            data = data[len(data) // 2 :]
        super().write(file, data)

    def fsync(self, file: FileIO) -> None:
        if self.tick("fsync", file.name):
            self.at()
        super().fsync(file)

    def fsync_folder(self, path: Path) -> None:
        if self.tick("fsync_folder", path):
            self.at()
        super().fsync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        if self.tick("rename", f"{source} -> {target}"):
            self.at()
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        if self.tick("unlink", path):
            self.at()
        super().unlink(path)

    def remove_folder(self, path: Path) -> None:
        if self.tick("remove_folder", path):
            self.at()
        super().remove_folder(path)


class KillingDisk(CountingDisk):
    def at(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class FailingDisk(CountingDisk):
    """Fails at operation n, and at writes after it too when the disk is full."""

    def __init__(self, n: int, code: int = errno.ENOSPC) -> None:
        super().__init__(n)
        self.code = code

    def at(self) -> None:
        raise OSError(self.code, os.strerror(self.code))


def tensors_at(step: int) -> dict[str, torch.Tensor]:
    """A model's worth of tensors of all kinds, different at every step."""
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(5, 7, generator=generator)
    return {
        "layers.0.weight": weight,
        "layers.0.weight.half": weight.to(torch.bfloat16),
        "optim.second": weight.to(torch.float64).reshape(7, 5) ** 2,
        "counts": torch.tensor([step, 2, 3]),
        "mask": weight[0] > 0,
        "step": torch.tensor(float(step)),
    }


def pieces_of(tensors: dict[str, torch.Tensor], rank: int = 0, num_ranks: int = 1) -> list[Piece]:
    """A rank's even share of every tensor."""
    pieces = []
    for name, tensor in tensors.items():
        flat, total = tensor.reshape(-1), tensor.numel()
        start, stop = rank * total // num_ranks, (rank + 1) * total // num_ranks
        pieces.append(Piece(name=name, shape=tuple(tensor.shape), start=start, data=flat[start:stop]))
    return pieces


def save_step(folder: Path, step: int, ranks: Ranks, keep: int = 2, disk: Disk = DISK) -> str:
    pieces = pieces_of(tensors_at(step), ranks.rank, ranks.num_ranks)
    return save(folder, step, pieces, {"step": step}, ranks, keep=keep, disk=disk).name


def whole(name: str, tensor: torch.Tensor) -> Piece:
    return Piece(name=name, shape=tuple(tensor.shape), start=0, data=tensor)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every bit."""
    return a.dtype == b.dtype and torch.equal(
        a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
    )


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []
