"""Reductions over the memory of peer GPUs, one Triton kernel per call.

The rounds are those of `rounds`, kept per block: what a block writes for round t goes to area t % 2 of its
rank's buffer, it posts t to the same block of all peers, waits for theirs, and reads. A rank writes area
t % 2 again in a later kernel, after one whose blocks saw their peers' kernels begin round t + 1, and those
begin only when the kernels before them have ended. So no barrier spans a grid, and none ends a call.

The kernel copies its input into the shared area itself, which saves a launch: a graph holds exactly one node
per all-reduce. Stage one of two writes to the shared area and not to the result, because peers can read the
area alone: a result would have to be shared anew in every call.

Tensors that callers share, and inputs that a graph captures, stay where they are. Larger ones are opened by
peers once (`shared/inputs`) and read there: the kernel gets a row of a table of addresses. Small ones are
copied all the same: that takes less time than the second round, without which a rank could overwrite its
input under a peer that still reads it.

Buffers come from torch's symmetric memory, or else from CUDA IPC. A peer that does not arrive ends the kernel
at the deadline; the next call on this rank raises and names it. What is called travels with every round, so
a peer that calls something else, or on another shared tensor, is named as well.

Hazard: a result after either is wrong until that error is raised: `check` raises it at once, after the stream
was synchronised. Kernels of all ranks must be able to run at the same time: several ranks on one
GPU need MPS, or each round costs a time slice of the driver.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from moeclipse.comm.failure import Watch
from moeclipse.comm.group import Group
from moeclipse.comm.reduce.plan import CudaPlan
from moeclipse.comm.reduce.reducer import Alone, PlanKey, Planned
from moeclipse.comm.shared.device import MAX_BLOCKS, CudaMemory
from moeclipse.comm.shared.inputs import SharedInputs
from moeclipse.core.errors import CommError
from moeclipse.ops.peer_reduce import (
    GATHER,
    ONE,
    SCATTER,
    TWO,
    AllReduceKernel,
    PeerSpace,
    all_reduce_rms_norm_kernel,
    one_size_for_each_tile,
)

HEAD_BYTES = 8192  # flags: 64 blocks x 16 words of 8 bytes
NOT_REGISTERED = 1000  # what a kernel reports whose input's addresses are not in the table yet
OTHER_CALL = 100  # the same for a peer that calls something else, and 1 + its rank
MAX_LENGTH = 1 << 30  # of one launch that needs no area
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NO_STEP_LEFT: Iterator[None] = iter(())


def overlap(x: torch.Tensor, out: torch.Tensor) -> bool:
    return x.data_ptr() < out.data_ptr() + out.nbytes and out.data_ptr() < x.data_ptr() + x.nbytes


class CudaReducer:
    """The reductions. All tensors are contiguous and on this device; one stream at a time."""

    dtypes, asynchronous = DTYPES, True
    arrived = True  # a stream waits by itself

    def __init__(
        self,
        memory: CudaMemory,
        group: Group,
        watch: Watch,
        area_bytes: int,
        in_place_from: int | None = None,
    ) -> None:
        """`in_place_from`: bytes from which inputs are read where they lie; None: never."""
        self._memory, self._watch, self._ranks = memory, watch, group.ranks
        self.index, self.num_ranks, self.area_bytes = group.index, group.size, area_bytes
        device = memory.own.device
        self._status = torch.zeros(1, dtype=torch.int32, pin_memory=True)  # kernels write, the host reads
        as_buffer: Any = self._status.numpy()
        self.seen = memoryview(as_buffer)  # not zero: a kernel gave up waiting
        self.label = ""
        self.device = device
        self._space = PeerSpace(
            table=memory.table,
            counts=torch.zeros(MAX_BLOCKS, dtype=torch.int32, device=device),
            status=self._status,
            area_bytes=area_bytes,
            head_bytes=HEAD_BYTES,
            limit_us=min(int(watch.deadline_s * 1e6), 2**31 - 1),
            rank=group.index,
            num_ranks=group.size,
            max_blocks=memory.max_blocks,
        )
        self.kernel = AllReduceKernel(self._space)
        self.inputs = SharedInputs(group, watch, device)
        self.in_place_from = in_place_from
        self.capturing = False  # a graph, whose inputs can be shared
        self._plans: dict[PlanKey, CudaPlan] = {}
        torch.cuda.synchronize(device)

    @classmethod
    def open(
        cls, group: Group, watch: Watch, device: torch.device, area_bytes: int, in_place_from: int | None
    ) -> CudaReducer:
        """Collective; NoPeerMemoryError where ranks cannot read each other's devices."""
        memory = CudaMemory.open(group, watch, device, HEAD_BYTES + 2 * area_bytes)
        return cls(memory, group, watch, area_bytes, in_place_from)

    def is_large(self, num_bytes: int) -> bool:
        """Enough to read it where it lies, if peers have it open."""
        return self.in_place_from is not None and num_bytes >= self.in_place_from

    def is_shared(self, x: torch.Tensor) -> bool:
        """Whether an eager reduction of `x` reads it where it lies."""
        found = self.is_large(x.nbytes) and self.inputs.find(x.data_ptr(), x.nbytes)
        return bool(found) and x.data_ptr() % 16 == 0 and x.is_contiguous()

    def share(self, x: torch.Tensor) -> None:
        try:
            self.inputs.share(x)
        finally:
            self._plans = {}  # they know where shared tensors lie

    def unshare(self, x: torch.Tensor) -> None:
        try:
            self.inputs.unshare(x)
        finally:
            self._plans = {}

    def plan(
        self,
        key: PlanKey,
        x: torch.Tensor,
        out: torch.Tensor,
        two_stages: bool,
        chunk_bytes: int,
        alone: Alone,
    ) -> Planned | None:
        """For a call that was a single aligned launch. Launches are in order on a stream by themselves."""
        del two_stages, chunk_bytes, alone
        last = self.kernel.last
        if last is None or (x.data_ptr() | out.data_ptr()) % 16 or self.capturing:
            return None
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = CudaPlan(self, x.nbytes)
        plan.keep(last, x.data_ptr(), out.data_ptr())
        return plan.call

    def check(self, label: str = "") -> None:
        """Raise if a kernel gave up waiting."""
        late = int(self.seen[0])
        if late:
            mine, name = self._ranks[self.index], self.label or label
            if late == NOT_REGISTERED:
                raise CommError(
                    f"rank {mine} replayed a graph with {name} before its inputs were shared; "
                    "leave the `with all_reduce.capture():` block first"
                )
            if late > OTHER_CALL:
                peer = self._ranks[late - OTHER_CALL - 1]
                raise CommError(
                    f"ranks {mine} and {peer} made different calls, in {name} or before; "
                    "all ranks must make the same calls, on tensors that they shared together"
                )
            raise self._watch.verdict(
                f"rank {mine} waited {self._watch.deadline_s:g} s in {name}: "
                f"rank {self._ranks[late - 1]} did not arrive"
            )
        self.label = label

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)
        self.check()

    def all_reduce(
        self, x: torch.Tensor, out: torch.Tensor, two_stages: bool, chunk_bytes: int, label: str
    ) -> Iterator[None]:
        del chunk_bytes  # of the CPU
        self.check(label)
        self.kernel.last = None
        area = self.area_bytes // x.dtype.itemsize
        aligned = x.data_ptr() % 16 == 0
        captured = self.capturing and self.is_large(x.nbytes) and x.numel() <= area and aligned
        there = captured or (not self.capturing and self.is_shared(x))
        # In one stage a rank writes its sums while peers still read its input; in two, nobody reads what it
        # writes early. The bits are the same.
        kind = TWO if two_stages or (there and overlap(x, out)) else ONE
        if captured:
            self.kernel(x, out, kind, self.inputs.add(x), ("captured", self.inputs.num_captured))
            return NO_STEP_LEFT
        x, out = x.view(-1), out.view(-1)
        chunk = MAX_LENGTH if there and kind == ONE else area
        for first in range(0, x.numel(), chunk):
            piece = slice(first, min(first + chunk, x.numel()))
            self._launch(x[piece], out[piece], kind, there)
        if x.numel() > chunk:
            self.kernel.last = None  # one of several launches
        return NO_STEP_LEFT

    def _launch(self, x: torch.Tensor, out: torch.Tensor, kind: int, there: bool) -> None:
        found = self.inputs.find(x.data_ptr(), x.nbytes) if there else None
        if found is None:
            self.kernel(x, out, kind)
        else:
            share, offset = found
            self.kernel(x, out, kind, self.inputs.row(share, offset), ("shared", share.number, offset))

    def can_part(self, bounds: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether these are the parts that kernels make: equal ones that begin on whole vectors."""
        part, length = bounds[1], bounds[-1]
        equal = all(bound == rank * part for rank, bound in enumerate(bounds[:-1]))
        right = part > 0 and part == length // self.num_ranks // 16 * 16
        return equal and right and length * dtype.itemsize <= self.area_bytes

    def reduce_scatter(
        self, x: torch.Tensor, bounds: Sequence[int], out: torch.Tensor, label: str
    ) -> Iterator[None]:
        del bounds
        self.check(label)
        self.kernel(x, out, SCATTER)
        return NO_STEP_LEFT

    def all_gather(
        self, shard: torch.Tensor, bounds: Sequence[int], out: torch.Tensor, label: str
    ) -> Iterator[None]:
        del bounds
        self.check(label)
        self.kernel(shard, out, GATHER)
        return NO_STEP_LEFT

    @contextmanager
    def capture(self, dtypes: Sequence[torch.dtype]) -> Iterator[None]:
        """Collective at both ends: kernels are compiled first, inputs are shared last."""
        self._begin_capture(dtypes)
        try:
            yield
        finally:
            self.capturing = False
        self.inputs.register()

    def _begin_capture(self, dtypes: Sequence[torch.dtype]) -> None:
        """Collective. Compile what a capture may need, and find out whether inputs can be shared."""
        shares = one_size_for_each_tile(self._space.max_blocks)
        kinds = {ONE: shares, TWO: [share * self.num_ranks for share in shares]}
        sizes = [(kind, n) for kind, all_n in kinds.items() for n in all_n if n <= self.area_bytes]
        self._compile(dtypes, sizes, in_place=False)
        if self.in_place_from is not None:
            try:
                self._compile(dtypes, sizes, in_place=True)
            except CommError:  # every rank gets this error, so all of them copy instead
                self.inputs.forget()
                return
            self.capturing = True

    def _compile(self, dtypes: Sequence[torch.dtype], sizes: list[tuple[int, int]], in_place: bool) -> None:
        """Call everything once, in all tiles."""
        device = self._space.table.device
        calls = [
            (kind, torch.ones(n // t.itemsize, dtype=t, device=device)) for t in dtypes for kind, n in sizes
        ]
        rows = [self.inputs.add(x) if in_place else None for _, x in calls]
        if in_place:
            self.inputs.register()
        for (kind, x), row in zip(calls, rows, strict=True):
            self.kernel(x, torch.empty_like(x), kind, row)
        torch.cuda.synchronize(device)

    def all_reduce_rms_norm(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor,
        weight_D: torch.Tensor,
        eps: float,
        two_stages: bool,
        label: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        del two_stages  # rows are whole, and the sums are small: one stage
        self.check(label)
        normed, h = torch.empty_like(x_TD), torch.empty_like(x_TD)
        rows = self.area_bytes // (x_TD.shape[1] * x_TD.dtype.itemsize)
        for start in range(0, len(x_TD), rows):
            piece = slice(start, start + rows)
            out = normed[piece], h[piece]
            all_reduce_rms_norm_kernel(x_TD[piece], residual_TD[piece], weight_D, eps, out, self._space)
        return normed, h

    def close(self) -> None:
        self._plans = {}
        torch.cuda.synchronize(self._space.table.device)
        self.inputs.close()
