"""Buffers on devices that other ranks of this host can read and write.

They come from torch's symmetric memory, or else from CUDA IPC.
"""

from __future__ import annotations

import weakref
from typing import TypedDict

import torch

from moeclipse.comm.failure import Watch
from moeclipse.comm.gather_json import tell_all
from moeclipse.comm.group import Group, host_id
from moeclipse.comm.private_torch import symmetric_empty, symmetric_rendezvous
from moeclipse.comm.shared.host import NoPeerMemoryError
from moeclipse.ops.cuda_driver import CudaDriver, cuda_driver

MAX_BLOCKS = 64  # of a kernel that waits for its peers


class CudaMemory:
    """A buffer of each rank, all of them readable from this device through `table`, their addresses."""

    def __init__(self, own: torch.Tensor, buffers: list[torch.Tensor], keep: object, source: str) -> None:
        self.own, self.buffers, self._keep, self.source = own, buffers, keep, source
        self.max_blocks = MAX_BLOCKS
        addresses = [buffer.data_ptr() for buffer in buffers]
        self.table = torch.tensor(addresses, dtype=torch.int64, device=own.device)

    @classmethod
    def open(cls, group: Group, watch: Watch, device: torch.device, num_bytes: int) -> CudaMemory:
        """Collective. Symmetric memory where all ranks can have it, else CUDA IPC, else NoPeerMemoryError."""
        label = f"opening of peer memory on {device.type}, group {group.name}"
        facts = tell_all(group, watch, _facts(device), label)
        _refuse(group, facts)
        problems = []
        for open_one in (_open_symmetric, _open_ipc):
            memory, problem = None, None
            try:
                memory = open_one(group, watch, device, num_bytes, label)
            except RuntimeError as error:
                problem = f"{open_one.__name__.removeprefix('_open_')}: {str(error).splitlines()[0]}"
            found = tell_all(group, watch, problem, label)
            if not any(found):
                assert memory is not None
                memory.max_blocks = _blocks_that_fit(facts)
                return memory
            first = next(peer for peer, text in enumerate(found) if text)
            problems.append(f"rank {group.ranks[first]}, {found[first]}")
        raise NoPeerMemoryError(
            f"no rank can read its peers' device memory ({'; '.join(problems)}); "
            "if PYTORCH_ALLOC_CONF asks for expandable_segments, leave them out, or use torch.distributed"
        )


class DeviceFacts(TypedDict):
    host: str
    device: int
    access: list[int]
    """Devices that this one reads."""
    number: int
    """Of the devices that this rank sees."""
    uuid: str
    processors: int


def _blocks_that_fit(facts: list[DeviceFacts]) -> int:
    """Blocks that wait hold their processors. All ranks that share a device must fit on it together, or those
    that run wait for ever for those that do not."""
    sharing = max(sum(other["uuid"] == fact["uuid"] for other in facts) for fact in facts)
    return max(1, min(MAX_BLOCKS, min(int(fact["processors"]) for fact in facts) // sharing))


def devices_of(group: Group, watch: Watch, device: torch.device) -> list[str]:
    """Collective. The ids of the ranks' devices; ranks that share one have the same."""
    mine = str(torch.cuda.get_device_properties(device).uuid)
    return tell_all(group, watch, mine, f"opening of all-reduce, group {group.name}")


def _facts(device: torch.device) -> DeviceFacts:
    index = device.index if device.index is not None else torch.cuda.current_device()
    number = torch.cuda.device_count()
    access = [i for i in range(number) if i == index or torch.cuda.can_device_access_peer(index, i)]
    properties = torch.cuda.get_device_properties(index)
    return {
        "host": host_id(),
        "device": index,
        "access": access,
        "number": number,
        "uuid": str(properties.uuid),
        "processors": properties.multi_processor_count,
    }


def _refuse(group: Group, facts: list[DeviceFacts]) -> None:
    for rank, fact in zip(group.ranks, facts, strict=True):
        if fact["host"] != facts[0]["host"]:
            raise NoPeerMemoryError(
                f"ranks {group.ranks[0]} and {rank} are on different hosts; "
                "peer memory works within one host, torch.distributed between hosts"
            )
        access = fact["access"]
        for other, theirs in zip(group.ranks, facts, strict=True):
            # Ranks that see different sets of devices number them differently: then opening is the test.
            if theirs["number"] == fact["number"] and theirs["device"] not in access:
                raise NoPeerMemoryError(
                    f"device {fact['device']} of rank {rank} has no peer access to device {theirs['device']} "
                    f"of rank {other}; use torch.distributed"
                )


def _open_symmetric(
    group: Group, _watch: Watch, device: torch.device, num_bytes: int, _label: str
) -> CudaMemory:
    own = symmetric_empty(num_bytes, device)
    own.zero_()  # flags must be zero before any peer can write them
    torch.cuda.synchronize(device)
    assert group.handle is not None
    handle = symmetric_rendezvous(own, group.handle)
    buffers = [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(group.size)]
    return CudaMemory(own, buffers, handle, "symmetric memory")


def _open_ipc(group: Group, watch: Watch, device: torch.device, num_bytes: int, label: str) -> CudaMemory:
    """By the driver's own calls: torch counts who has what it shares open, and complains when one that was
    killed never gave its part back."""
    driver = cuda_driver()
    own = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    allocation = driver.allocation_of(own.data_ptr())
    name = (driver.ipc_handle(allocation).hex(), own.data_ptr() - allocation)
    buffers: list[torch.Tensor] = []
    opened: list[int] = []
    for peer, (handle, offset) in enumerate(tell_all(group, watch, name, label)):
        if peer == group.index:
            buffers.append(own)
        else:
            opened.append(driver.open_ipc(bytes.fromhex(handle)))
            buffers.append(_bytes_at(opened[-1] + offset, num_bytes, device))
    memory = CudaMemory(own, buffers, None, "CUDA IPC")
    # Not at the end of the process, which gives everything back, and after which the driver takes no calls.
    weakref.finalize(memory, _close_all, driver, opened).atexit = False
    return memory


def _close_all(driver: CudaDriver, opened: list[int]) -> None:
    for address in opened:
        driver.close_ipc(address)


class _Place:
    """Memory of a device as others describe theirs to torch."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _bytes_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Does not keep what lies there alive."""
    return torch.as_tensor(_Place(address, num_bytes), device=device)
