"""The op and the program: one step of training as a list of ops per rank, in host launch order.

Two levels share one type (`kinds`). Actions (F, B, I, W, PAIR, SELF) speak of whole stages; layer ops
(ATTN_F, DISPATCH_B, MLP_W, ...) and the exchange of one MoE layer (S_F, C_F, R_F, ...) speak of what a lane
executes. A generator yields actions, a template expands them, `lower` adds SEND and RECV.

Contract: `deps` are positions in the same rank's list and always point backward; whatever crosses
ranks goes through `comm = (group, seq)`, where `seq` counts the ops of one rank on one group and a
point-to-point group is named "source>destination".
Hazard: a lane is a FIFO, so an op without deps still waits for everything before it on its lane.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import COMPUTE, Kind
from moeclipse.schedule.shape import ExchangeShape, PipelineShape, StagePlacement

Ints = npt.NDArray[np.int64]
ACTIONS = (kinds.F, kinds.B, kinds.I, kinds.W)
"""Plain actions, in the order of their numbers in columns."""


class Op(NamedTuple):
    """One entry of a rank's list; most fields stay at their default. Always built by keyword.

    A named tuple, because it is made twice as fast as a frozen dataclass and a step may hold a million.
    """

    kind: Kind
    lane: str = COMPUTE
    stage: int | None = None
    layer: int | None = None
    """Position inside the stage."""
    microbatch: int | None = None
    step: int | None = None
    """Step of the pair-wise group exchange."""
    chunk: int | None = None
    """This slice of the rows, of `chunks`."""
    chunks: int = 1
    expert: int | None = None
    parts: tuple[Op, ...] = ()
    """PAIR: its F and its B; SELF: the one action it overlaps with itself."""
    deps: tuple[int, ...] = ()
    comm: tuple[str, int] | None = None
    peers: tuple[int, ...] = ()
    """Members of the group that must have launched before this op can run; empty: all of them."""
    alloc: float = 0.0
    """Taken when the op starts ..."""
    free: float = 0.0
    """... and given back when it ends."""

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))})"
        text = "" if self.stage is None else str(self.stage)
        if self.layer is not None:
            text += f".{self.layer}"
        text += self.kind.name
        if self.microbatch is not None:
            text += str(self.microbatch)
        if self.step is not None:
            text += f"@{self.step}"
        if self.chunk is not None:
            text += f"#{self.chunk}/{self.chunks}"
        if self.expert is not None:
            text += f"~{self.expert}"
        return text

    @property
    def leaves(self) -> tuple[Op, ...]:
        """The plain actions inside: two for a PAIR, one otherwise."""
        return self.parts or (self,)


@dataclass(frozen=True, kw_only=True, eq=False)
class ActionColumns(Sequence[tuple[Op, ...]]):
    """The lists of all ranks as numbers, where every op is a plain action: for programs of millions of them.

    A rank's ops are made when somebody looks at them; verifier and simulator read the columns.
    """

    begin: Ints
    """First action of each rank, and the end."""
    kind: npt.NDArray[np.int8]
    """Position in `ACTIONS`."""
    stage: npt.NDArray[np.int32]
    microbatch: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.begin) - 1

    @overload
    def __getitem__(self, rank: int) -> tuple[Op, ...]: ...
    @overload
    def __getitem__(self, rank: slice) -> tuple[tuple[Op, ...], ...]: ...
    def __getitem__(self, rank: int | slice) -> tuple[Op, ...] | tuple[tuple[Op, ...], ...]:
        if isinstance(rank, slice):
            return tuple(self[each] for each in range(*rank.indices(len(self))))
        if not -len(self) <= rank < len(self):
            raise IndexError(f"rank {rank} of {len(self)}")
        part = slice(*self.begin[rank % len(self) :][:2].tolist())
        makers = (forward, backward, input_grad, weight_grad)
        columns = (self.kind[part].tolist(), self.stage[part].tolist(), self.microbatch[part].tolist())
        return tuple(makers[kind](stage, m) for kind, stage, m in zip(*columns, strict=True))

    @property
    def sizes(self) -> list[int]:
        sizes: list[int] = np.diff(self.begin).tolist()
        return sizes


@dataclass(frozen=True, kw_only=True)
class Program:
    """What every rank launches, in order."""

    name: str
    ranks: Sequence[tuple[Op, ...]]
    shape: PipelineShape | ExchangeShape
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Members of each group; a point-to-point group lists its sender first."""
    communicators: Mapping[str, str] = field(default_factory=dict)
    """Groups that share a communicator, by its name; a group that is not listed has one of its own.

    A communicator serves first come, first served, whatever lanes its ops stand on.
    """

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def sizes(self) -> list[int]:
        """Ops of each rank."""
        return self.ranks.sizes if isinstance(self.ranks, ActionColumns) else list(map(len, self.ranks))

    @property
    def num_ops(self) -> int:
        return sum(self.sizes)

    @property
    def explicit(self) -> bool:
        """Communication stands in the lists; False: whole actions, transfers follow from the placement."""
        if isinstance(self.shape, ExchangeShape) or self.shape.layers:
            return True
        return bool(self.groups)

    def pipeline(self) -> PipelineShape:
        if not isinstance(self.shape, PipelineShape):
            raise ScheduleError(
                f"{self.name} is the exchange of one layer; a pipeline program is needed here"
            )
        return self.shape

    def exchange(self) -> ExchangeShape:
        if not isinstance(self.shape, ExchangeShape):
            raise ScheduleError(
                f"{self.name} is a pipeline program; the exchange of one layer is needed here"
            )
        return self.shape


def forward(stage: int, microbatch: int) -> Op:
    """F keeps one unit: the activations of one stage for one microbatch."""
    return Op(kind=kinds.F, stage=stage, microbatch=microbatch, alloc=1.0)


def backward(stage: int, microbatch: int) -> Op:
    return Op(kind=kinds.B, stage=stage, microbatch=microbatch, free=1.0)


def input_grad(stage: int, microbatch: int) -> Op:
    """The dX part alone: what dW needs stays alive until W."""
    return Op(kind=kinds.I, stage=stage, microbatch=microbatch)


def weight_grad(stage: int, microbatch: int) -> Op:
    return Op(kind=kinds.W, stage=stage, microbatch=microbatch, free=1.0)


def pair(f: Op, b: Op) -> Op:
    """F of one microbatch and B of another as one op: they start together and end together."""
    return Op(kind=kinds.PAIR, parts=(f, b), alloc=f.alloc, free=b.free)


def self_overlap(action: Op) -> Op:
    """An action whose own ops hide its own communication."""
    return Op(kind=kinds.SELF, parts=(action,), alloc=action.alloc, free=action.free)


def pipeline_program(
    name: str, ranks: Iterable[Sequence[Op]], placement: StagePlacement, num_microbatches: int
) -> Program:
    """`ranks` stay columns if they are: only lists are copied."""
    shape = PipelineShape(placement=placement, num_microbatches=num_microbatches)
    kept = ranks if isinstance(ranks, ActionColumns) else tuple(map(tuple, ranks))
    return Program(name=name, ranks=kept, shape=shape)


def overlap_alone(program: Program) -> Program:
    """Every F and B outside a PAIR becomes SELF: warm-up and cool-down hide their own communication."""
    alone = (kinds.F, kinds.B, kinds.I)
    ranks = [[self_overlap(op) if op.kind in alone else op for op in ops] for ops in program.ranks]
    shape = program.pipeline()
    return pipeline_program(f"{program.name}+self", ranks, shape.placement, shape.num_microbatches)
