"""Buffers on devices, with host tensors in their place: who may share, and which way is taken.

That peers see each other's memory is shown on a device (`tests/gpu/test_peer_all_reduce.py`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.shared import device as module
from moeclipse.comm.shared.device import CudaMemory, devices_of
from moeclipse.comm.shared.host import NoPeerMemoryError
from moeclipse.testing.run_ranks import run_ranks

CPU = torch.device("cpu")
SIZE = 64


def facts(**change: Any) -> dict[str, Any]:
    known = {"host": "a", "device": 0, "access": [0, 1], "number": 2, "uuid": "x", "processors": 132}
    return known | change


def test_ranks_of_a_device_must_fit_on_it_together() -> None:
    def blocks(*uuids: str, processors: int = 132) -> int:
        return module._blocks_that_fit([facts(uuid=uuid, processors=processors) for uuid in uuids])

    assert blocks("x", "y") == 64, "the most"
    assert blocks("x", "x", "x") == 44
    assert blocks("x", "y", "y", "y", "y") == 33, "the fullest device counts"
    assert blocks("x", "x", processors=1) == 1


def test_hosts_and_devices_that_do_not_reach_each_other_are_named() -> None:
    group: Any = SimpleNamespace(ranks=(3, 5))
    module._refuse(group, [facts(), facts(device=1)])
    with pytest.raises(NoPeerMemoryError, match="ranks 3 and 5 are on different hosts"):
        module._refuse(group, [facts(), facts(host="b")])
    far = [facts(access=[0]), facts(device=1)]
    with pytest.raises(
        NoPeerMemoryError, match="device 0 of rank 3 has no peer access to device 1 of rank 5"
    ):
        module._refuse(group, far)
    # Ranks that see one device each number them alike: then opening is the test.
    module._refuse(group, [facts(access=[0], number=1), facts(device=1, number=2)])


def test_what_a_rank_tells_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(uuid="GPU-1", multi_processor_count=78)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda _, peer: peer == 0)
    told = module._facts(torch.device("cuda"))
    assert (told["device"], told["access"], told["number"]) == (2, [0, 2], 3)
    assert (told["uuid"], told["processors"]) == ("GPU-1", 78)
    assert module._facts(torch.device("cuda", 1))["device"] == 1


def named(mesh: Mesh, uuids: list[str]) -> list[str]:
    properties = SimpleNamespace(uuid=uuids[mesh.rank])
    torch.cuda.get_device_properties = lambda _: properties  # type: ignore[assignment]
    return devices_of(mesh.world, mesh.watch, CPU)


def test_every_rank_knows_the_devices_of_all() -> None:
    assert run_ranks(3, named, ["x", "y", "x"]) == [["x", "y", "x"]] * 3


def opened(mesh: Mesh, failing: dict[str, int]) -> tuple[str, int, int]:
    """(where the memory came from or why not, blocks, what the own buffer holds)."""
    module._facts = lambda _: facts()

    def way(name: str) -> Any:
        def open_one(*_: Any) -> CudaMemory:
            if failing.get(name) == mesh.rank:
                raise RuntimeError(f"no {name} here\nand a long story")
            own = torch.full((SIZE,), mesh.rank, dtype=torch.uint8)
            return CudaMemory(own, [own, own], None, name)

        open_one.__name__ = f"_open_{name}"
        return open_one

    module._open_symmetric, module._open_ipc = way("symmetric"), way("ipc")
    try:
        memory = CudaMemory.open(mesh.world, mesh.watch, CPU, SIZE)
    except NoPeerMemoryError as error:
        return str(error), 0, 0
    assert memory.table.tolist() == [memory.own.data_ptr()] * 2
    return memory.source, memory.max_blocks, int(memory.own[0])


def test_a_way_is_taken_by_all_ranks_or_by_none() -> None:
    assert run_ranks(2, opened, {}) == [("symmetric", 64, 0), ("symmetric", 64, 1)]
    assert run_ranks(2, opened, {"symmetric": 1}) == [("ipc", 64, 0), ("ipc", 64, 1)]
    first, second = run_ranks(2, opened, {"symmetric": 1, "ipc": 0})
    assert first == second
    assert first[0].startswith(
        "no rank can read its peers' device memory (rank 1, symmetric: no symmetric here; rank 0, ipc: no ipc"
    )


class FakeDriver:
    """Allocations begin at multiples of 1000; a handle names the rank that it is of."""

    def __init__(self, rank: int) -> None:
        self.rank, self.open, self.closed = rank, list[bytes](), list[int]()

    def allocation_of(self, address: int) -> int:
        return address - 16

    def ipc_handle(self, _allocation: int) -> bytes:
        return bytes([40 + self.rank, 0])

    def open_ipc(self, handle: bytes) -> int:
        self.open.append(handle)
        return 1000 * handle[0]

    def close_ipc(self, address: int) -> None:
        self.closed.append(address)


def over_ipc(mesh: Mesh) -> tuple[list[int], list[int], list[int]]:
    """(what the buffers hold: of peers, their addresses; closed before and after the memory is let go)."""
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    driver = FakeDriver(mesh.rank)
    module.cuda_driver = lambda: driver  # type: ignore[assignment, return-value]
    module._bytes_at = lambda address, *_: torch.full((SIZE,), address, dtype=torch.int64)
    memory: CudaMemory | None = module._open_ipc(mesh.world, mesh.watch, CPU, SIZE, "test")
    assert memory is not None
    assert memory.source == "CUDA IPC"
    found, before = [int(buffer[0]) for buffer in memory.buffers], list(driver.closed)
    memory = None
    return found, before, driver.closed


def test_buffers_over_ipc() -> None:
    first, second = run_ranks(2, over_ipc)
    assert first == ([0, 41016], [], [41000]), "the own one, and the peer's where it lies in its allocation"
    assert second == ([40016, 0], [], [40000])


def test_memory_of_another_is_described_to_torch() -> None:
    place = module._Place(4096, 12).__cuda_array_interface__
    assert place == {"shape": (12,), "typestr": "|u1", "data": (4096, False), "version": 3}


def symmetric(mesh: Mesh) -> list[int]:
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    module.symmetric_empty = lambda num_bytes, _: torch.full((num_bytes,), 9, dtype=torch.uint8)

    def rendezvous(own: torch.Tensor, _handle: Any) -> Any:
        assert own.eq(0).all(), "flags must be zero before any peer can write them"
        return SimpleNamespace(
            get_buffer=lambda rank, sizes, dtype: torch.full(sizes, rank, dtype=dtype) if rank else own
        )

    module.symmetric_rendezvous = rendezvous
    memory = module._open_symmetric(mesh.world, mesh.watch, CPU, SIZE, "test")
    assert memory.source == "symmetric memory"
    return [int(buffer[0]) for buffer in memory.buffers]


def test_buffers_of_symmetric_memory() -> None:
    assert run_ranks(2, symmetric) == [[0, 1]] * 2
