"""What the ops of a whole step make and read (`worlds`): launches inside ops, and the end of the step.

Stated here once more, and not taken from `schedule/needs` or `schedule/whole_step`.
"""

from __future__ import annotations

from collections.abc import Iterator

from worlds import Broken, ExchangeWorld, PipelineWorld, Thing, World

from moeclipse.schedule.kinds import Part
from moeclipse.schedule.launch import HostedLaunch
from moeclipse.schedule.op import Op, Program
from moeclipse.schedule.shape import ExchangeShape, PipelineShape

INSIDE = ("COUNTS", "SIZES", "SCORES", "TENSOR")
"""Parts that an op launches while it runs; LOADS has another meaning at the end of a step."""
WAITED_FOR = ("COUNTS_F", "COUNTS_R", "SIZES_F", "TENSOR_F", "TENSOR_B", "TENSOR_R")
END = ("TIED_SUM", "RESULTS_GATHER", "LOADS_GATHER", "LOADS_SUM")


def is_launch(op: Op) -> bool:
    return op.kind.part.name in INSIDE or op.kind.name == "LOADS_F"


class WholeWorld(PipelineWorld):
    """A step of some places, each run by `copies` ranks that share everything but tensors."""

    def __init__(self, program: Program, shape: PipelineShape) -> None:
        super().__init__(program, shape)
        assert shape.step is not None
        self.step = shape.step

    def launches(self, stage: int, layer: int) -> list[tuple[int, HostedLaunch]]:
        found = []
        of = self.layers(stage)[layer]
        for number, launch in enumerate(of.launches):
            name, part = launch.host.name, launch.host.part
            behind = self.neighbour(stage, 1)
            if name == "SEND_F":
                there = behind is not None and self.home(behind) != self.home(stage)
                there = there and layer == len(self.layers(stage)) - 1
            else:
                there = part in (of.recomputed if name.endswith("_R") else of.parts)
            if there:
                found.append((number, launch))
        return found

    def launch(self, op: Op) -> HostedLaunch:
        layers = self.layers(op.stage or 0)
        if op.layer is None or op.step is None or not 0 <= op.step < len(layers[op.layer].launches):
            raise Broken(f"{op} is launched by nobody")
        return layers[op.layer].launches[op.step]

    # what ops must say

    def check_op(self, rank: int, op: Op) -> None:
        if is_launch(op):
            self.check_lane(rank, op)
            launch = self.launch(op)
            if launch.kind is not op.kind or op.parts or op.expert is not None or op.alloc or op.free:
                raise Broken(f"{op} on rank {rank} is not what its layer launches")
            cut = 1 if launch.once else self.cuts.get(op.microbatch, 1)
            if op.chunks != cut or not (0 <= op.chunk < cut if op.chunk is not None else cut == 1):
                raise Broken(f"{op} on rank {rank} is cut in another way")
        elif op.kind.name in END or op.kind.part is Part.BUCKET:
            self.check_lane(rank, op)
            if (op.step is None) != (op.kind.name in END) or op.layer is not None or op.parts:
                raise Broken(f"{op} on rank {rank} is not what its kind is")
            if op.microbatch is not None or op.chunk is not None or op.chunks != 1 or op.expert is not None:
                raise Broken(f"{op} on rank {rank} ends a step, and has neither microbatch nor chunk")
            self.check_sizes(rank, op, 0.0, 0.0)
        else:
            super().check_op(rank, op)

    def check_meeting(self, group: str, came: dict[int, int]) -> None:
        ops = {rank: self.program.ranks[rank][position] for rank, position in came.items()}
        some_rank, some = next(iter(ops.items()))
        name, copies = some.kind.name, self.shape.copies
        places = len(self.program.ranks) // copies
        if name in ("SEND_F", "SEND_B", "RECV_F", "RECV_B"):
            super().check_meeting(group, came)
            return
        place, copy = divmod(some_rank, copies)
        expected = list(range(place * copies, (place + 1) * copies))
        if some.kind.part is Part.TENSOR:
            expected = [some_rank]
        elif name == "RESULTS_GATHER":
            expected = list(range(len(self.program.ranks)))
        elif name == "LOADS_SUM":
            expected = [other * copies + copy for other in range(places)]
        elif self.step.mirrored and some.kind.part is Part.BUCKET:
            both = {place, places - 1 - place}
            expected = [other for other in range(copies * places) if other // copies in both]
        elif name == "TIED_SUM":
            expected = sorted({copy, (places - 1) * copies + copy})
        if sorted(ops) != expected:
            raise Broken(f"{some} meets {sorted(ops)} alone")
        whole = name in END
        said = {
            (o.kind, o.step, *((None,) * 4 if whole else (o.stage, o.layer, o.microbatch, o.chunk)))
            for o in ops.values()
        }
        if len(said) > 1:
            raise Broken(f"{some} meets something else")
        self.check_peers(came, {rank: set(came) for rank in came})

    # what they make and read

    def first(self, rank: int) -> int:
        place = rank // self.shape.copies
        return min(s for s in range(len(self.shape.placement.rank_of)) if self.home(s) == place)

    def ends(self, rank: int) -> list[str]:
        place, homes = rank // self.shape.copies, self.shape.placement.rank_of
        found = ["TIED_SUM"] if self.step.tied and place in (homes[0], homes[-1]) else []
        found += ["RESULTS_GATHER", "LOADS_GATHER"]
        return found + ["LOADS_SUM"] * (self.shape.placement.num_ranks > 1)

    def everything(self, rank: int) -> Iterator[Thing]:
        yield from super().everything(rank)
        place, first = rank // self.shape.copies, self.first(rank)
        for stage in (s for s in range(len(self.shape.placement.rank_of)) if self.home(s) == place):
            for m in self.shape.microbatches_of(stage):
                for layer in range(len(self.layers(stage))):
                    for number, launch in self.launches(stage, layer):
                        yield from self.made_by(launch, number, stage, layer, m)
        yield from ((name, first) for name in self.ends(rank))
        for number in range(len(self.step.buckets[place])):
            yield from ((f"BUCKET_{form}", first, number) for form in ("REDUCE", "UPDATE", "GATHER"))

    def made_by(
        self, launch: HostedLaunch, number: int, stage: int, layer: int, m: int, chunk: int | None = None
    ) -> Iterator[Thing]:
        chunks = [0] if launch.once else range(self.cuts.get(m, 1)) if chunk is None else [chunk]
        yield from (("launch", number, stage, layer, m, each) for each in chunks)

    def makes(self, rank: int, op: Op) -> Iterator[Thing]:
        if is_launch(op):
            given = (op.step or 0, op.stage or 0, op.layer or 0, op.microbatch or 0)
            yield from self.made_by(self.launch(op), *given, op.chunk)
        elif op.kind.name in END:
            yield (op.kind.name, op.stage)
        elif op.kind.part is Part.BUCKET:
            yield (op.kind.name, op.stage, op.step)
        else:
            yield from super().makes(rank, op)

    def reads(self, rank: int, op: Op) -> Iterator[Thing]:
        if is_launch(op):
            yield from self._launch_reads(rank, op)
        elif op.kind.name in END or op.kind.part is Part.BUCKET:
            yield from self._end_reads(rank, op)
        else:
            yield from self.with_launches(super().reads(rank, op))
            if op.stage is not None:
                layer = len(self.layers(op.stage)) - 1 if op.layer is None else op.layer
                for number, launch in self.launches(op.stage, layer):
                    if launch.host is op.kind and launch.ahead and launch.kind.name in WAITED_FOR:
                        yield from self.made_by(launch, number, op.stage, layer, op.microbatch or 0, op.chunk)

    def with_launches(self, things: Iterator[Thing]) -> Iterator[Thing]:
        """Whoever reads what an op made reads what it launched; ROUTE wants loads in backward."""
        for thing in things:
            yield thing
            if len(thing) != 6:
                continue
            part, form, stage, layer, m, chunk = thing
            for number, launch in self.launches(stage, layer):  # type: ignore[arg-type]
                wanted = launch.host.name == f"{part}_{form}" and launch.kind.name != "LOADS_F"
                wanted |= launch.kind.name == "LOADS_F" and (part, form) == ("DISPATCH", "B")
                if wanted:
                    yield from self.made_by(launch, number, stage, layer, m, chunk)  # type: ignore[arg-type]

    def _launch_reads(self, rank: int, op: Op) -> Iterator[Thing]:
        """What stands in front of its host reads what the host reads; what stands behind reads the host.

        Collectives of one op work on what those before them brought.
        """
        launch, stage, layer = self.launch(op), op.stage or 0, op.layer or 0
        host = op._replace(kind=launch.host, step=None, layer=None if launch.host.name == "SEND_F" else layer)
        for number, other in self.launches(stage, layer):
            earlier = (
                other.host is launch.host and number < (op.step or 0) and (other.ahead or not launch.ahead)
            )
            if earlier and other.kind.name in WAITED_FOR:
                yield from self.made_by(other, number, stage, layer, op.microbatch or 0, op.chunk)
        on_wire = launch.host.name in ("SEND_F", "DISPATCH_F", "DISPATCH_B", "COMBINE_F", "COMBINE_B")
        if launch.ahead or on_wire:
            yield from self.with_launches(super().reads(rank, host))
        else:
            yield from super().makes(rank, host)

    def _end_reads(self, rank: int, op: Op) -> Iterator[Thing]:
        name, stage = op.kind.name, op.stage
        buckets, chain = self.step.buckets[rank // self.shape.copies], self.ends(rank)
        if name == "RESULTS_GATHER":
            yield from (("BUCKET_REDUCE", stage, number) for number in range(len(buckets)))
        elif name in ("LOADS_GATHER", "LOADS_SUM"):
            yield (chain[chain.index(name) - 1], stage)
        elif name == "BUCKET_UPDATE":
            yield from ((chain[-1], stage), ("BUCKET_REDUCE", stage, op.step))
        elif name == "BUCKET_GATHER":
            yield ("BUCKET_UPDATE", stage, op.step)
        else:
            mine = [b for b in buckets if b.tied] if name == "TIED_SUM" else [buckets[op.step or 0]]
            filled = {at for bucket in mine for at in bucket.places}
            for thing in super().everything(rank):
                if len(thing) == 6 and thing[1] == "W" and thing[2:4] in filled:
                    yield thing
            if name == "BUCKET_REDUCE" and mine[0].tied:
                yield ("TIED_SUM", stage)


def world_of(program: Program) -> World:
    if isinstance(program.shape, ExchangeShape):
        return ExchangeWorld(program, program.shape)
    kind = PipelineWorld if program.shape.step is None else WholeWorld
    return kind(program, program.shape)
