"""Every rank's tokens to every rank, and the ranks' sums back to whom a token belongs: sizes that all know.

    wire = TokenGather.of(mesh, group, "auto")       # collective; made once, kept by the mesh
    all_PTD = wire.gather(x_TD, "gather of tokens, layer 3")
    y_TD = wire.sum_back(partial_PTD, "sum of outputs, layer 3")

Idea. What is sent does not depend on what is in it, so the host need not know it: both calls follow the
current stream and can be captured in a CUDA graph. Among GPUs that map each other's memory each is one kernel
of ours (`comm/reduce/on_device`), which waits for its peers on the device; elsewhere torch.distributed's.

Contract. All ranks bring tensors of one shape. Sums are taken in rank order, in fp32 for narrower types where
our kernel takes them. Tensors are new ones. On CPU the call waits.

Hazard. A peer that does not come ends our kernel at the deadline, and what it leaves is wrong until `check`
raises: whoever replays a graph asks it before anybody uses the step's result.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

from moeclipse.comm.async_ops import exchange
from moeclipse.comm.async_ops.lane import Lane, gather
from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.reduce.on_device import DTYPES, CudaReducer
from moeclipse.comm.reduce.plain import obstacle_of
from moeclipse.comm.reduce.reducer import run_out
from moeclipse.comm.reduce.table import MAX_RANKS
from moeclipse.comm.shared.host import NoPeerMemoryError
from moeclipse.core.errors import ConfigError

PART = 16
"""Elements of which a rank's part is a multiple in our kernel."""
PAGE = 1 << 20
AS_FLOATS = {4: torch.float32, 2: torch.bfloat16}
"""What bits of that many bytes travel as: copied, never computed with."""


class TokenGather:
    """Of one group on one lane."""

    def __init__(self, mesh: Mesh, group: Group, lane: Lane, wire: str) -> None:
        self.mesh, self.group, self.lane, self.wire = mesh, group, lane, wire
        self._peers: CudaReducer | None = None
        self._asked = wire == "direct" or mesh.device.type != "cuda"
        self._room = 0

    @classmethod
    def of(cls, mesh: Mesh, group: Group, wire: str) -> TokenGather:
        """`wire`: as `moe.transport` says; "auto": memory that ranks map, where they can."""
        return mesh.once(f"token gather {group.name} {wire}", lambda: cls(mesh, group, mesh.a2a, wire))

    def gather(self, mine: torch.Tensor, label: str) -> torch.Tensor:
        """[P x T, ...] from everybody's [T, ...]."""
        whole = (self.group.size * len(mine), *mine.shape[1:])
        if self.group.size == 1 or not mine.numel():
            return mine.new_empty(whole) if self.group.size > 1 else mine
        short = -mine.numel() % PART
        peers = self._peers_for(mine, self.group.size * (mine.numel() + short) * mine.itemsize)
        if peers is None:
            return gather(self.lane, self.group, mine, label).get().view(whole)
        bits = mine.contiguous().view(-1)
        bits = bits if bits.dtype in DTYPES else bits.view(AS_FLOATS[bits.itemsize])
        bits = pad(bits, (0, short)) if short else bits
        bounds = [rank * bits.numel() for rank in range(self.group.size + 1)]
        out = bits.new_empty(bounds[-1])

        def start() -> None:
            run_out(peers.all_gather(bits, bounds, out, label))

        found = self.lane.launch(self.group, label, start, out, bits, on_stream=True).get()
        found = found.view(self.group.size, -1)[:, : mine.numel()] if short else found
        return found.reshape(-1).view(mine.dtype).view(whole)

    def sum_back(self, parts: torch.Tensor, label: str) -> torch.Tensor:
        """[T, ...], the sum over ranks of this rank's part of [P x T, ...]."""
        size = self.group.size
        mine = (len(parts) // size, *parts.shape[1:])
        if size == 1 or not parts.numel():
            return parts.new_empty(mine) if size > 1 else parts
        flat = parts.contiguous().view(-1)
        bounds = [rank * (flat.numel() // size) for rank in range(size + 1)]
        peers = self._peers_for(parts, parts.nbytes) if parts.dtype in DTYPES else None
        if peers is None:
            return exchange.reduce_scatter(self.lane, self.group, flat, bounds, label).get().view(mine)
        out = flat.new_empty(bounds[1])

        def start() -> None:
            run_out(peers.reduce_scatter(flat, bounds, out, label))

        return self.lane.launch(self.group, label, start, out, flat, on_stream=True).get().view(mine)

    def _peers_for(self, x: torch.Tensor, num_bytes: int) -> CudaReducer | None:
        """Memory that all ranks map, with room for so many bytes; None: it goes by torch.distributed.

        Depends on what all ranks have in common. Larger memory is opened outside of captures, at the first
        call that needs it: all ranks make that together.
        """
        part = num_bytes // self.group.size // x.itemsize
        if self._asked or part % PART or x.itemsize not in AS_FLOATS:
            return None
        if num_bytes > self._room:
            if self.lane.recorder.capturing:
                raise RuntimeError("memory that ranks share cannot be opened while a graph is captured")
            self._open(num_bytes)
        return self._peers

    def _open(self, num_bytes: int) -> None:
        room = math.ceil(num_bytes / PAGE) * PAGE
        if self._peers is not None:
            self._peers.close()
        obstacle = obstacle_of(self.group.size, MAX_RANKS, self.mesh.device.type)
        try:
            if not obstacle:
                self._peers = CudaReducer.open(self.group, self.mesh.watch, self.mesh.device, room, None)
                self._room = room
        except NoPeerMemoryError as error:
            obstacle = str(error)
        if not obstacle:
            return
        self._asked, self._peers, self._room = True, None, 0
        if self.wire == "peer":
            raise ConfigError(
                f'moe.transport = "peer" does not work between ranks {self.group.ranks}: {obstacle}; '
                'use "auto" or "direct"'
            )

    def check(self) -> None:
        """Raise where a kernel of ours gave up waiting; asks the host's memory, not the device."""
        if self._peers is not None:
            self._peers.check()
