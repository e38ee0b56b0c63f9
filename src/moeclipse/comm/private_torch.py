"""Every private name of torch that this room uses. All are there in torch 2.11 to 2.13.

torch.distributed.distributed_c10d._get_default_store
                    failures are told through the store that a user's own `init_process_group` made, and
                    nothing public hands it out
torch.distributed._symmetric_memory
                    memory of a device that peers can read: documented under this name, as alpha
torch._C._distributed_c10d._detect_dma_connectivity
                    which devices NVLink joins: torch asks NVML itself and tells nobody
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _SymmetricMemory


def default_store() -> dist.Store:
    """What the default process group was started with."""
    return dist.distributed_c10d._get_default_store()


def symmetric_empty(num_bytes: int, device: torch.device) -> torch.Tensor:
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)


def symmetric_rendezvous(own: torch.Tensor, handle: dist.ProcessGroup) -> _SymmetricMemory:
    """Collective."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.rendezvous(own, handle)


def nvlinks_between_devices() -> tuple[tuple[int, ...], ...]:
    """Of each two devices that this process sees."""
    from torch._C import _distributed_c10d
    from torch._C._autograd import DeviceType

    found = _distributed_c10d._detect_dma_connectivity(DeviceType.CUDA, "nvlink")  # type: ignore[attr-defined]
    return tuple(tuple(row) for row in found.matrix)
