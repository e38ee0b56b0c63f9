"""How the GPUs of a host are joined: by NVLink, over the bus with peer access, or through the host's memory.

It decides how a large tensor is summed over peer memory: two stages read less and meet twice, and pay only
where all pairs have NVLink.

Contract: what a process sees is what it may answer for. A device that is hidden from it
(CUDA_VISIBLE_DEVICES) is joined to nothing, as far as it knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import torch

from moeclipse.comm.private_torch import nvlinks_between_devices

HowJoined = Literal["nvlink", "peer access", "nothing"]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Of the devices that this process sees, by their ids."""

    uuids: tuple[str, ...]
    nvlinks: tuple[tuple[int, ...], ...]
    """Links between each two devices."""
    access: tuple[tuple[bool, ...], ...]
    """Whether the first can read the second's memory."""

    def joined(self, one: str, other: str) -> HowJoined:
        if one not in self.uuids or other not in self.uuids:
            return "nothing"
        a, b = self.uuids.index(one), self.uuids.index(other)
        if not (self.access[a][b] and self.access[b][a]):
            return "nothing"
        return "nvlink" if self.nvlinks[a][b] else "peer access"

    def linked(self, uuids: Sequence[str]) -> bool:
        """Whether each two of these devices have NVLink."""
        return all(self.joined(a, b) == "nvlink" for a, b in combinations(sorted(set(uuids)), 2))


def topology_here() -> Topology:
    count = torch.cuda.device_count()
    return Topology(
        uuids=tuple(str(torch.cuda.get_device_properties(i).uuid) for i in range(count)),
        nvlinks=nvlinks_between_devices() if count > 1 else ((0,),) * count,
        access=tuple(
            tuple(a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count))
            for a in range(count)
        ),
    )
