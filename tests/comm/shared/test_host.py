"""Shared buffers: who may open them, what is left of them, and how waiting for a peer ends."""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_files import left_over

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.shared import host, signals
from moeclipse.comm.shared.host import NoPeerMemoryError, PeerMemory
from moeclipse.core.errors import CommError
from moeclipse.testing.run_ranks import run_ranks, run_ranks_raw

pytestmark = pytest.mark.peer_memory


def opened(mesh: Mesh, **options: Any) -> PeerMemory:
    return PeerMemory.open(mesh.world, mesh.watch, **({"num_bytes": 10000, "num_words": 4} | options))


def shown(mesh: Mesh) -> tuple[list[list[int]], list[str]]:
    with opened(mesh) as memory:
        memory.view(mesh.rank, torch.int32, 400, 3).copy_(torch.arange(3) + 10 * mesh.rank)
        memory.signals.post(mesh.rank, 1)
        for peer in range(mesh.num_ranks):
            memory.signals.wait(peer, 1, peer, "test")
        names = left_over()  # while all ranks still use it
        return [memory.view(peer, torch.int32, 400, 3).tolist() for peer in range(mesh.num_ranks)], names


def test_every_rank_reads_every_buffer_and_no_name_is_left() -> None:
    for values, names in run_ranks(3, shown):
        assert values == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]
        assert names == []


def modes(mesh: Mesh) -> list[int]:
    seen: list[int] = []
    create = host._create

    def watched(path: Path, *rest: Any) -> int:
        descriptor = create(path, *rest)
        status = os.fstat(descriptor)
        seen.append(stat.S_IMODE(status.st_mode))
        with pytest.raises(FileExistsError):
            create(path, *rest)
        return descriptor

    host._create = watched
    opened(mesh).close()
    return seen


def test_the_segment_is_private_and_created_exclusively() -> None:
    assert run_ranks(2, modes) == [[0o600], []]


def refusal(mesh: Mesh, case: str, folder: str) -> str:
    options: dict[str, Any] = {}
    if case == "space":
        options["num_bytes"] = 1 << 50
    if mesh.rank == 1:
        if case == "host":
            host.host_id = lambda: "another"
        if case == "machine":
            host.unordered_reason = lambda: "this machine is a toaster"
        if case == "folder":
            options["folder"] = Path(folder)
        if case == "missing":
            options["folder"] = Path(folder) / "nowhere"
        if case == "full":

            def full(*_: Any) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            os.posix_fallocate = full
        if case == "sizes":
            options["num_bytes"] = 20000
    with pytest.raises(CommError) as caught:
        opened(mesh, **options)
    assert isinstance(caught.value, NoPeerMemoryError) == (case != "sizes")
    return str(caught.value)


REFUSALS = {
    "space": "MiB are free; make it larger (in Docker: --shm-size=1g or --ipc=host), or use smaller buffers",
    "host": "ranks 0 and 1 are on different hosts; peer memory works within one host",
    "machine": "rank 1: this machine is a toaster; use torch.distributed",
    "folder": "is not shared with the other ranks; run the containers with --ipc=host",
    "missing": "nowhere cannot be used: No such file or directory; use torch.distributed",
    "full": "rank 1: No space left on device: peer memory needs",
    "sizes": "rank 1 asks for 20000 bytes and 4 words, rank 0 for 10000 and 4; ask for the same everywhere",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_all_ranks_get_the_same_clear_error(case: str, tmp_path: Path) -> None:
    texts = run_ranks(3, refusal, case, str(tmp_path))
    assert REFUSALS[case] in texts[0]
    assert len(set(texts)) == 1
    assert left_over() == []
    assert list(tmp_path.iterdir()) == []


def bounds(mesh: Mesh) -> None:
    memory = opened(mesh)
    kept = memory.view(mesh.rank, torch.uint8, 9990, 10).fill_(7)
    with pytest.raises(CommError, match="bytes 9992 to 10008 are outside of a buffer of 10000 bytes"):
        memory.view(0, torch.float32, 9992, 4)
    memory.close()
    memory.close()
    with pytest.raises(CommError, match="this peer memory is closed; open a new one"):
        memory.view(0, torch.float32, 0, 4)
    assert kept.tolist() == [7] * 10, "a view outlives the memory it came from"


def test_views_stay_inside_and_end_with_the_memory() -> None:
    run_ranks(2, bounds)


def mapped(mesh: Mesh) -> list[int]:
    """Segments that this process has mapped or open and handles of its peers: before, during and after.

    Only ours: the threads of torch.distributed open and close sockets at times of their own.
    """

    def target(file: Path) -> str:
        try:
            return os.readlink(file)
        except FileNotFoundError:  # closed since it was listed
            return ""

    def count() -> int:
        files = [target(file) for file in Path("/proc/self/fd").iterdir()]
        ours = sum("moeclipse-" in name or "pidfd" in name for name in files)
        return Path("/proc/self/maps").read_text().count("moeclipse-") + ours

    first = count()
    memories = [opened(mesh) for _ in range(5)]
    during = count()
    for memory in memories:
        memory.close()
    return [first, during, count()]


def test_closing_unmaps() -> None:
    for before, during, after in run_ranks(2, mapped):
        assert during >= before + 10
        assert after == before


def ping_pong(mesh: Mesh, spin: int) -> int:
    """Payload after payload in one place: whoever saw the number must see the payload that came before it."""
    with opened(mesh, spin=spin) as memory:
        mine, theirs = (memory.view(p, torch.int64, 0, 500) for p in (mesh.rank, 1 - mesh.rank))
        for number in range(1, 400):
            if mesh.rank == number % 2:
                mine.fill_(number)
                memory.signals.post(mesh.rank, number)
            else:
                memory.signals.wait(1 - mesh.rank, number, 1 - mesh.rank, "test")
                assert (theirs == number).all()
                if number % 97 == 0:
                    time.sleep(0.002)
    return number


@pytest.mark.parametrize("spin", [0, 50, 5000])
def test_a_payload_is_seen_with_its_number(spin: int) -> None:
    assert run_ranks(2, ping_pong, spin) == [399, 399]


def waits(mesh: Mesh, how: str, folder: Path) -> str:
    with opened(mesh) as memory:
        if mesh.rank == 1:
            if how == "dies":
                os._exit(3)
            if how == "fails":
                mesh.watch.publish("ValueError: the disk of rank 1 is full")
            until = time.monotonic() + 600
            while not (folder / "told").exists() and time.monotonic() < until:
                time.sleep(0.01)
            return ""
        begun = time.monotonic()
        with pytest.raises(CommError) as caught:
            memory.signals.wait(1, 1, 1, "all-reduce, layer 3")
        (folder / "told").touch()
        return f"{caught.value} | {time.monotonic() - begun:.3f}"


@pytest.mark.parametrize(
    ("how", "text", "deadline_s", "within_s"),
    [
        ("late", "rank 0 waited 1 s in all-reduce, layer 3: rank 1 did not arrive", 1.0, 50.0),
        ("dies", "rank 0 lost rank 1 in all-reduce, layer 3: its process", 300.0, 150.0),
        ("fails", "rank 1 failed: ValueError: the disk of rank 1 is full", 300.0, 50.0),
    ],
)
def test_waiting_ends_and_names_the_rank(
    tmp_path: Path, how: str, text: str, deadline_s: float, within_s: float
) -> None:
    outcomes = run_ranks_raw(2, waits, how, tmp_path, collective_deadline_s=deadline_s)
    ok, message = outcomes[0]
    assert ok, message
    found, seconds = message.split(" | ")
    assert found.startswith(text)
    assert float(seconds) < within_s


def brief(mesh: Mesh) -> bool:
    with opened(mesh) as memory:
        came = memory.signals.soon(3, 1, 0.01)  # nobody ever posts it
        mesh.barrier()
        return came


def test_a_short_wait_gives_up_without_an_error() -> None:
    assert run_ranks(2, brief) == [False, False]


def woken(mesh: Mesh) -> None:
    signals.NAP_S = (3600.0, 3600.0)  # who is not woken sleeps on
    with opened(mesh, spin=0) as memory:
        if mesh.rank == 1:
            time.sleep(0.2)
            memory.signals.post(1, 1)
        memory.signals.wait(1, 1, 1, "test")


def test_a_post_wakes_a_sleeper() -> None:
    run_ranks(2, woken)
