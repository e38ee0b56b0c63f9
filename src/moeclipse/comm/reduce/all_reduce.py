"""All-reduce of tensors that are small enough for latency to count, over memory that ranks share.

    reduce = PeerAllReduce.open(mesh.world, mesh.watch, mesh.device)
    y = reduce.all_reduce(x)                  # out of place; all_reduce(x, out=x) in place
    reduce.share(x)                           # collective: from now on peers read x where it lies (CUDA)
    reduce.close()                            # or: with PeerAllReduce.open(...) as reduce

Contract: the result is the sum over ranks in rank order, accumulated in fp32 (fp64 for fp64) and rounded
once; all ranks hold the same bits, in every run. `x` may be overwritten as soon as the call returns. Any
length, alignment and stride; 2 to 8 ranks. `should_use(x)` says whether peer memory applies and why not;
where it does not, the same call goes through torch.distributed, whose order of addition is its own. The
answer depends on what all ranks have in common (group, dtype, size), so all ranks choose alike.

`begin_*` do the same without waiting, on the CPU: the input is shown to the peers at once, `get` of what they
return reads theirs. One such call is open at a time, and the next call of any kind completes it first.

Hazard: like every collective, all ranks make the same calls in the same order, on tensors that they shared
together or on tensors that none of them shared; a device tells who does not with the next call, or `check`.
One call at a time: a second thread gets an error, not a wrong sum. After an error the object is of no more
use, because peers may be one step ahead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from moeclipse.comm.failure import Watch
from moeclipse.comm.group import Group
from moeclipse.comm.reduce.begun import BegunReduction
from moeclipse.comm.reduce.flat import flat_of, is_plain, same_kind, shaped
from moeclipse.comm.reduce.on_device import CudaReducer, overlap
from moeclipse.comm.reduce.on_host import CpuReducer
from moeclipse.comm.reduce.plain import all_reduce_plain, obstacle_of
from moeclipse.comm.reduce.reducer import PlanKey, Planned, Reducer, run_out
from moeclipse.comm.reduce.table import DEFAULT_FILE, MAX_RANKS, Algorithm, choose_algorithm
from moeclipse.comm.shared.host import FOLDER, NoPeerMemoryError, Use
from moeclipse.core.errors import CommError, ConfigError
from moeclipse.ops.peer_reduce import add_residual, checked_bounds, rms_norm

AREA_BYTES = {"cpu": 2 << 20, "cuda": 16 << 20}  # two of these per rank
MAX_PLANS = 64  # lengths whose views are kept
T = TypeVar("T")


class PeerAllReduce:
    def __init__(
        self,
        group: Group,
        watch: Watch,
        device: torch.device,
        reducer: Reducer | None,
        algorithm: Algorithm,
        obstacle: str = "",
    ) -> None:
        self.group, self.algorithm, self.device = group, algorithm, device
        self._watch, self._reducer, self.obstacle = watch, reducer, obstacle
        self._busy = threading.Lock()
        self._broken: str | None = None
        self._open: BegunReduction | None = None
        self._plans: dict[PlanKey, Planned] = {}
        self._capturing = False

    @classmethod
    def open(
        cls,
        group: Group,
        watch: Watch,
        device: torch.device | str = "cpu",
        *,
        choice: Algorithm | None = None,
        table: Path = DEFAULT_FILE,
        area_bytes: int | None = None,
        spin: int | None = None,
        folder: Path = FOLDER,
    ) -> PeerAllReduce:
        """Collective. Where ranks cannot share memory the object still works, through torch.distributed."""
        device = torch.device(device)
        area_bytes = area_bytes if area_bytes is not None else AREA_BYTES.get(device.type, 4096)
        if area_bytes <= 0 or area_bytes % 4096:
            raise ConfigError(f"area_bytes ({area_bytes}) must be a positive multiple of 4096")
        if group.size == 1:
            return cls(group, watch, device, None, Algorithm(), "the group has one rank")
        chosen = choose_algorithm(group, watch, device, table, choice)
        obstacle = obstacle_of(group.size, MAX_RANKS, device.type)
        if obstacle:
            return cls(group, watch, device, None, chosen, obstacle)
        reducer: Reducer
        try:
            if device.type == "cuda":
                reducer = CudaReducer.open(group, watch, device, area_bytes, chosen.in_place_from)
            else:
                reducer = CpuReducer.open(group, watch, area_bytes, spin, folder)
        except NoPeerMemoryError as error:
            return cls(group, watch, device, None, chosen, str(error))
        return cls(group, watch, device, reducer, chosen)

    def should_use(self, x: torch.Tensor) -> Use:
        """Whether `x` goes over peer memory. Ask it for the reason; the calls below ask it themselves."""
        if self._reducer is None:
            return Use(False, self.obstacle)
        if x.device.type != self.device.type or self.device.index not in (None, x.device.index):
            return Use(False, f"the tensor is on {x.device}, this all-reduce on {self.device}")
        dtypes = self._reducer.dtypes
        if x.dtype not in dtypes:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            return Use(False, f"{str(x.dtype).removeprefix('torch.')} is not one of {names}")
        if x.layout != torch.strided:
            return Use(False, f"the tensor is {x.layout}, not dense")
        if self.algorithm.max_bytes is not None and x.nbytes > self.algorithm.max_bytes:
            return Use(
                False, f"{x.nbytes} bytes are more than {self.algorithm.max_bytes}, the most in the table"
            )
        there = self._reducer.is_shared(x)
        return Use(True, "peers read it where it lies" if there else "ranks share memory")

    def is_shared(self, x: torch.Tensor) -> bool:
        """Whether reductions read `x` where it lies: all of it was shared, and it is large enough to pay."""
        return self._reducer is not None and self._reducer.is_shared(x)

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Collective: open `x` to all peers, which share one of the same size; the same tensor back.

        Reductions of it, and of contiguous parts of it that begin on 16 bytes (the same on all ranks), then
        copy nothing. It is kept alive until `unshare` or `close`. Where nothing would be gained, as on the
        CPU, nothing happens. Not used by training, whose tensors come and go; an example is
        examples/tensor_parallel_inference.py.
        """
        if self._reducer is not None:
            self._change_inputs(self._reducer.share, x)
        return x

    def unshare(self, x: torch.Tensor) -> torch.Tensor:
        """Collective: the opposite. Graphs that read it must not be replayed any more."""
        if self._reducer is not None:
            self._change_inputs(self._reducer.unshare, x)
        return x

    def _change_inputs(self, change: Callable[[torch.Tensor], None], x: torch.Tensor) -> None:
        self._enter()
        try:
            change(x)
        finally:
            self._busy.release()
            self._plans = {}  # they know where shared tensors lie

    def num_stages(self, x: torch.Tensor) -> int:
        """1 or 2, as the table says for the size of `x`."""
        shared = self._reducer is not None and self._reducer.is_shared(x)
        return self.algorithm.num_stages(x.nbytes, not self._capturing and not shared)

    def all_reduce(
        self,
        x: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        label: str = "all-reduce",
        stages: int | None = None,
    ) -> torch.Tensor:
        """The sum over ranks, in `out` or in a new tensor; `stages` overrides the table."""
        plan = self._plans.get((x.dtype, x.numel(), stages))
        if plan is not None:
            made = plan(x, out, label)
            if made is not None:
                return made
        x = x.detach()
        same_kind(x, out)
        if not self.should_use(x):
            return self._fall_back(x, out, label)
        two = (stages or self.num_stages(x)) == 2
        flat = x.contiguous().view(-1)
        into = flat_of(out, x)
        if flat.data_ptr() != into.data_ptr() and overlap(flat, into):
            raise ConfigError("out begins within the input; give the input itself, or memory apart from it")
        if flat.numel():
            self._run(lambda r: run_out(r.all_reduce(flat, into, two, self.algorithm.chunk_bytes, label)))
            self._keep_plan(flat, into, two, stages)
        return shaped(into, out, x)

    def _keep_plan(self, x: torch.Tensor, out: torch.Tensor, two: bool, stages: int | None) -> None:
        """The next call for this length finds everything looked up: that is most of a small one's time."""
        key = (x.dtype, x.numel(), stages)
        if key not in self._plans and len(self._plans) >= MAX_PLANS:
            return
        assert self._reducer is not None
        plan = self._reducer.plan(key, x, out, two, self.algorithm.chunk_bytes, self._alone)
        if plan is not None:
            self._plans[key] = plan

    def _alone(self, plan: Callable[[torch.Tensor, torch.Tensor, str], None]) -> Planned:
        return partial(self._planned, plan)

    def _planned(
        self,
        plan: Callable[[torch.Tensor, torch.Tensor, str], None],
        x: torch.Tensor,
        out: torch.Tensor | None,
        label: str,
    ) -> torch.Tensor | None:
        if self._open is not None or self._broken is not None or not is_plain(x, out):
            return None
        into = torch.empty_like(x) if out is None else out
        self._enter()
        try:
            plan(x, into, label)
        except BaseException as error:
            self._break(error)
            raise
        finally:
            self._busy.release()
        return into

    def begin_all_reduce(self, x: torch.Tensor, *, label: str = "all-reduce") -> BegunReduction:
        """The sum over ranks, in a new tensor. For tensors that `should_use` is true of, on the CPU."""
        x = x.detach()
        flat, out = x.contiguous().view(-1), x.new_empty(x.shape)
        two = self.num_stages(x) == 2
        chunk = self.algorithm.chunk_bytes
        return self._begin(lambda r: r.all_reduce(flat, out.view(-1), two, chunk, label), out, x.numel())

    def begin_reduce_scatter(
        self, flat: torch.Tensor, bounds: Sequence[int], *, label: str = "reduce-scatter"
    ) -> BegunReduction:
        """This rank's part of the sum over ranks of a flat tensor; as `begin_all_reduce`."""
        bounds = checked_bounds(bounds, flat.numel(), self.group.size)
        out = flat.new_empty(bounds[self.group.index + 1] - bounds[self.group.index])
        return self._begin(lambda r: r.reduce_scatter(flat.detach(), bounds, out, label), out, flat.numel())

    def begin_all_gather(
        self, flat: torch.Tensor, bounds: Sequence[int], *, label: str = "all-gather"
    ) -> BegunReduction:
        """All ranks' shards of a flat tensor, in place; as `begin_all_reduce`."""
        bounds = checked_bounds(bounds, flat.numel(), self.group.size)
        shard = flat.detach()[bounds[self.group.index] : bounds[self.group.index + 1]]
        return self._begin(lambda r: r.all_gather(shard, bounds, flat.detach(), label), flat, flat.numel())

    def reduce_scatter(
        self, x: torch.Tensor, bounds: Sequence[int] | None = None, *, label: str = "reduce-scatter"
    ) -> torch.Tensor:
        """This rank's part of the sum, flat. Without bounds parts are equal, and the last has the rest."""
        flat = x.detach().contiguous().view(-1)
        bounds = checked_bounds(bounds, flat.numel(), self.group.size)
        mine = slice(bounds[self.group.index], bounds[self.group.index + 1])
        if not self._can_part(flat, bounds):
            return self.all_reduce(flat, label=label)[mine].clone()
        out = flat.new_empty(mine.stop - mine.start)
        self._run(lambda r: run_out(r.reduce_scatter(flat, bounds, out, label)))
        return out

    def all_gather(
        self, shard: torch.Tensor, bounds: Sequence[int], *, label: str = "all-gather"
    ) -> torch.Tensor:
        """All ranks' shards, flat, at their bounds: the way back from `reduce_scatter`."""
        flat = shard.detach().contiguous().view(-1)
        bounds = checked_bounds(bounds, bounds[-1], self.group.size)
        mine = slice(bounds[self.group.index], bounds[self.group.index + 1])
        if flat.numel() != mine.stop - mine.start:
            raise ConfigError(
                f"rank {self.group.ranks[self.group.index]} has a shard of {flat.numel()} elements, "
                f"but bounds {mine.start} to {mine.stop} ask for {mine.stop - mine.start}"
            )
        out = flat.new_empty(bounds[-1])  # what all ranks have in common, so all of them decide alike
        if not self._can_part(out, bounds):
            out.zero_()[mine] = flat
            return self.all_reduce(out, out=out, label=label)
        self._run(lambda r: run_out(r.all_gather(flat, bounds, out, label)))
        return out

    def _can_part(self, x: torch.Tensor, bounds: Sequence[int]) -> bool:
        """Whether `x` goes over peer memory in these parts."""
        if self._reducer is None or not self.should_use(x):
            return False
        return self._reducer.can_part(bounds, x.dtype)

    def all_reduce_rms_norm(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor,
        weight_D: torch.Tensor,
        *,
        eps: float = 1e-6,
        label: str = "all-reduce with norm",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(normed, h): h = residual + sum over ranks of x, normed = h / rms(h) * weight.

        Forward only, and so not used by training; an example is examples/tensor_parallel_inference.py.
        """
        if x_TD.shape != residual_TD.shape or weight_D.shape != x_TD.shape[-1:]:
            raise ConfigError(
                f"x {tuple(x_TD.shape)}, residual {tuple(residual_TD.shape)} and weight "
                f"{tuple(weight_D.shape)} do not fit: expected [..., D], [..., D] and [D]"
            )
        D = x_TD.shape[-1]
        x, residual = (t.detach().contiguous().view(-1, D) for t in (x_TD, residual_TD))
        if not self.should_use(x) or D * x.dtype.itemsize > AREA_BYTES[x.device.type]:
            h = add_residual([self._fall_back(x, None, label)], residual)
            normed = rms_norm(h, weight_D.detach(), eps)
        else:
            two = self.num_stages(x) == 2
            normed, h = self._run(
                lambda r: r.all_reduce_rms_norm(x, residual, weight_D.detach(), eps, two, label)
            )
        return normed.view_as(x_TD), h.view_as(x_TD)

    @contextmanager
    def capture(self, *dtypes: torch.dtype) -> Iterator[None]:
        """Around `torch.cuda.graph`; collective: it compiles the kernels for these dtypes, or for all.

        Not used by training, which captures nothing; an example is examples/tensor_parallel_inference.py.
        Larger inputs are read where they are: their addresses are exchanged when the block ends, and a graph
        that is replayed before is an error. All ranks replay equally often.
        """
        reducer = self._reducer
        if reducer is None:
            raise ConfigError(f"capture() is for CUDA graphs over peer memory: {self.obstacle}")
        with reducer.capture(dtypes or reducer.dtypes):
            self._capturing = True
            try:
                yield
            finally:
                self._capturing = False

    def check(self) -> None:
        """On a device: wait for what was launched and raise if a peer did not arrive in time."""
        if self._reducer is not None and self._reducer.asynchronous:
            self._run(lambda r: r.settle())

    def close(self) -> None:
        """Let go of the memory; may be called twice. Peers that still wait get an error at their deadline."""
        self._plans = {}  # they hold views
        if self._reducer is not None:
            self._reducer.close()
        self._broken = "it was closed"

    def __enter__(self) -> PeerAllReduce:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(
        self, call: Callable[[Reducer], Iterator[None]], out: torch.Tensor, length: int
    ) -> BegunReduction:
        if self._reducer is None or self._reducer.asynchronous:
            raise ConfigError("begin_* is for peer memory on the CPU; on a device every call is asynchronous")

        def complete() -> None:
            self._run(lambda _: None)

        def begin(reducer: Reducer) -> BegunReduction:
            begun = BegunReduction(call(reducer) if length else None, out, complete, lambda: reducer.arrived)
            self._open = begun if begun.advance() else None
            return begun

        return self._run(begin)

    def _run(self, call: Callable[[Reducer], T]) -> T:
        """Complete what is open, then make the call."""
        assert self._reducer is not None
        self._enter()
        try:
            if self._open is not None:
                while self._open.advance():
                    pass
                self._open = None
            return call(self._reducer)
        except BaseException as error:
            self._break(error)
            raise
        finally:
            self._busy.release()

    def _enter(self) -> None:
        if self._broken is not None:
            raise CommError(f"this all-reduce cannot be used any more: {self._broken}; open a new one")
        if not self._busy.acquire(blocking=False):
            raise CommError("two threads use one PeerAllReduce at once; open one for each")

    def _break(self, error: BaseException) -> None:
        self._broken, self._plans = str(error) or type(error).__name__, {}

    def _fall_back(self, x: torch.Tensor, out: torch.Tensor | None, label: str) -> torch.Tensor:
        if self._capturing:
            raise ConfigError(f"{label} cannot be captured: {self.should_use(x).why}")
        return all_reduce_plain(self.group, self._watch, x, out, label)
