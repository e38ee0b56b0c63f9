"""What the ops of a program make and read, in words of the model: nothing of the verifier is used here.

Ops make things, once each: a thing is (part, form, stage, layer, microbatch, chunk) and the like. What an
op reads is stated here once more, and not taken from `schedule/needs`, so that the two can be held against
each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from moeclipse.schedule.kinds import Form, Part
from moeclipse.schedule.op import Op, Program
from moeclipse.schedule.shape import ExchangeShape, LayerShape, PipelineShape

Thing = tuple[object, ...]
TRANSFERS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
ROWS = ("DISPATCH_F", "DISPATCH_B", "DISPATCH_R", "COMBINE_F", "COMBINE_B", "S_F", "S_B", "R_F", "R_B")
ENDS = ("TIED_SUM", "RESULTS_GATHER", "LOADS_GATHER", "LOADS_SUM", "BUCKET_REDUCE", "BUCKET_GATHER")
SUMS = ("REDUCE", "UNSHARD", "RESHARD", *ENDS)
ASKED = ("COUNTS_F", "COUNTS_R", "LOADS_F", "SIZES_F", "SCORES_F", "SCORES_B")
TENSOR = ("TENSOR_F", "TENSOR_B", "TENSOR_R")
ON_WIRE = frozenset((*TRANSFERS, *ROWS, *SUMS, *ASKED, *TENSOR, "SHADOW_SEND", "SHADOW_REDUCE"))
HOST_WAITS = frozenset(("COUNTS_F", "COUNTS_R", "SIZES_F", *TENSOR, *ENDS[:4]))
"""The caller goes on behind these when they have ended."""


class Broken(Exception):
    """The program does not work; says why."""


class World:
    """What both kinds of programs have in common; the rest is theirs."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def everything(self, rank: int) -> Iterator[Thing]:
        """All that a rank has made in the end."""
        raise NotImplementedError

    def makes(self, rank: int, op: Op) -> Iterator[Thing]:
        raise NotImplementedError

    def reads(self, rank: int, op: Op) -> Iterator[Thing]:
        raise NotImplementedError

    def check_op(self, rank: int, op: Op) -> None:
        raise NotImplementedError

    def check_meeting(self, group: str, came: dict[int, int]) -> None:
        raise NotImplementedError

    def border(self, op: Op) -> Thing | None:
        """Where chunks must pass in order."""

    def check_lane(self, rank: int, op: Op) -> None:
        name = op.kind.name
        fits = op.lane == "compute"
        if name in TRANSFERS:
            fits = op.lane.startswith("p2p:")
        elif name in ON_WIRE:
            fits = op.lane == ("dp" if name in SUMS else "tp" if name in TENSOR else "a2a")
        if not fits or (name not in ON_WIRE and (op.comm is not None or op.peers)):
            raise Broken(f"{op} on rank {rank} stands on lane {op.lane}")

    def check_sizes(self, rank: int, op: Op, taken: float, given: float) -> None:
        if abs(op.alloc - taken) > 1e-6 or abs(op.free - given) > 1e-6:
            raise Broken(f"{op} on rank {rank} says +{op.alloc} -{op.free}, holds +{taken} -{given}")

    def check_peers(self, came: dict[int, int], partners: dict[int, set[int]]) -> None:
        named = {}
        for rank, position in came.items():
            op = self.program.ranks[rank][position]
            named[rank] = set(op.peers) or set(came)
            if not partners[rank] <= named[rank] <= set(came):
                raise Broken(f"{op} on rank {rank} leaves without some of {partners[rank]}")
        for rank, others in named.items():
            if any(rank not in named[other] for other in others if other != rank):
                raise Broken(f"rank {rank} waits for one who does not wait for it")


class PipelineWorld(World):
    def __init__(self, program: Program, shape: PipelineShape) -> None:
        super().__init__(program)
        self.shape = shape
        if len(program.ranks) != shape.placement.num_ranks * shape.copies:
            raise Broken("some ranks have no list")
        self.cuts: dict[int | None, int] = {}
        for op in (op for ops in program.ranks for op in ops):
            if op.chunk is not None and self.cuts.setdefault(op.microbatch, op.chunks) != op.chunks:
                raise Broken(f"{op} cuts its microbatch in another way")

    # places

    def home(self, stage: int) -> int:
        return self.shape.placement.rank_of[stage]

    def neighbour(self, stage: int, step: int) -> int | None:
        length = len(self.shape.placement.rank_of) // self.shape.placement.num_chains
        other = stage + step
        return other if other >= 0 and other // length == stage // length else None

    def chunks(self, op: Op) -> list[int]:
        return list(range(self.cuts.get(op.microbatch, 1))) if op.chunk is None else [op.chunk]

    def layers(self, stage: int) -> tuple[LayerShape, ...]:
        return self.shape.layers[stage]

    def border(self, op: Op) -> Thing | None:
        if op.layer is None or op.stage is None:
            return None
        if op.layer == 0 and op.kind.part is Part.ATTN and op.kind.form in (Form.F, Form.B):
            return ("border", op.kind.form, op.stage, op.microbatch)
        if op.layer == len(self.layers(op.stage)) - 1 and op.kind.form is Form.B:
            return ("gradient", op.stage, op.microbatch)
        return None

    # what ops must say

    def check_op(self, rank: int, op: Op) -> None:
        self.check_lane(rank, op)
        inside = {"PAIR": 2, "SELF": 1}.get(op.kind.name, 0)
        strange = op.parts and (op.stage, op.layer, op.microbatch) != (None, None, None)
        if len(op.parts) != inside or op.step is not None or op.expert is not None or strange:
            raise Broken(f"{op} on rank {rank} is not what its kind is")
        cut = op.chunk is not None
        if cut != (op.chunks > 1) and not (cut and op.chunks == 1):
            raise Broken(f"{op} on rank {rank} does not say which chunk it is")
        if cut and (op.layer is None or not 0 <= (op.chunk or 0) < op.chunks):
            raise Broken(f"{op} on rank {rank} cannot be cut")
        if op.layer is None:
            taken = sum(leaf.kind.name == "F" for leaf in op.parts or (op,)) * self.shape.unit
            given = sum(leaf.kind.name in "BW" for leaf in op.parts or (op,)) * self.shape.unit
        else:
            taken, given = self._layer_sizes(op)
        self.check_sizes(rank, op, taken, given)
        if op.kind.name == "PAIR":
            first, second = op.parts
            if first.kind.name != "F" or second.kind.name not in "BI":
                raise Broken(f"{op} on rank {rank} is no pair")

    def _layer_sizes(self, op: Op) -> tuple[float, float]:
        layer = self.layers(op.stage or 0)[op.layer or 0]
        size = layer.activation
        of = {"ATTN": size.attn, "SHARED": size.shared, "MLP": size.mlp, "HEAD": size.head}
        if not layer.moe:
            of["MLP"] += size.shared
        part, form = op.kind.part, op.kind.form.name
        whole = of.get(part.name, 0.0)
        first = size.input if part is Part.ATTN else 0.0
        taken = given = 0.0
        if form == "F":
            taken = first + (0.0 if part in layer.recomputed else whole)
        elif form == "R":
            taken = whole
        else:
            later = {"ATTN": size.attn_grad, "SHARED": size.shared_grad, "MLP": size.mlp_grad}
            waits = later.get(part.name, 0.0)
            if form == "W":
                given = first + whole + waits
            elif waits > 0:
                taken = waits
            else:
                given = -waits
        return taken / op.chunks, given / op.chunks

    def check_meeting(self, group: str, came: dict[int, int]) -> None:
        ops = {rank: self.program.ranks[rank][position] for rank, position in came.items()}
        some_rank, some = next(iter(ops.items()))
        copies = self.shape.copies
        if some.kind.name in TRANSFERS:
            first, second = self.program.groups[group]
            out, back = ops[first], ops[second]
            step = 1 if out.kind.name == "SEND_F" else -1
            fits = (out.kind.name, back.kind.name) in (("SEND_F", "RECV_F"), ("SEND_B", "RECV_B"))
            fits = fits and (back.stage, back.microbatch) == ((out.stage or 0) + step, out.microbatch)
            if not fits or first % copies != second % copies:
                raise Broken(f"{out} meets {back}")
        else:
            place = some_rank // copies
            if sorted(ops) != list(range(place * copies, (place + 1) * copies)):
                raise Broken(f"{some} meets {sorted(ops)} alone")
            names = {(o.kind, o.stage, o.layer, o.microbatch, o.chunk, o.chunks) for o in ops.values()}
            if len(names) > 1:
                raise Broken(f"{some} meets something else")
        self.check_peers(came, {rank: set(came) for rank in came})

    # what ops make and read

    def everything(self, rank: int) -> Iterator[Thing]:
        place = rank // self.shape.copies
        for stage in (s for s in range(len(self.shape.placement.rank_of)) if self.home(s) == place):
            for m in self.shape.microbatches_of(stage):
                for step, name in ((-1, "in"), (1, "grad")):
                    other = self.neighbour(stage, step)
                    if other is not None and self.home(other) != place:
                        yield (name, stage, m)
                        yield ("sent back" if step < 0 else "sent on", stage, m)
                if not self.shape.layers:
                    yield from ((what, stage, m) for what in ("F", "I", "W"))
                for index, layer in enumerate(self.layers(stage) if self.shape.layers else ()):
                    for part in layer.parts:
                        for chunk in range(self.cuts.get(m, 1)):
                            yield (part.name, "F", stage, index, m, chunk)
                            yield (part.name, "B", stage, index, m, chunk)
                            if part in layer.recomputed:
                                yield (part.name, "R", stage, index, m, chunk)
                            if part not in (Part.DISPATCH, Part.COMBINE):
                                yield (part.name, "W", stage, index, m, chunk)
            if self.shape.reduce:
                yield ("reduced", stage)

    def makes(self, rank: int, op: Op) -> Iterator[Thing]:
        for leaf in op.parts or (op,):
            name, stage, m = leaf.kind.name, leaf.stage, leaf.microbatch
            if leaf.layer is not None:
                yield from (
                    (leaf.kind.part.name, leaf.kind.form.name, stage, leaf.layer, m, chunk)
                    for chunk in self.chunks(leaf)
                )
            elif name in ("RECV_F", "RECV_B"):
                yield ("in" if name == "RECV_F" else "grad", stage, m)
            elif name in ("SEND_F", "SEND_B"):
                yield ("sent on" if name == "SEND_F" else "sent back", stage, m)
            elif name == "REDUCE":
                yield ("reduced", stage)
            elif name == "B":
                yield from (("I", stage, m), ("W", stage, m))
            elif name not in ("UNSHARD", "RESHARD"):
                yield (name, stage, m)

    def reads(self, rank: int, op: Op) -> Iterator[Thing]:
        for leaf in op.parts or (op,):
            name, stage, m = leaf.kind.name, leaf.stage or 0, leaf.microbatch or 0
            if leaf.layer is not None:
                for chunk in self.chunks(leaf):
                    yield from self._layer_reads(leaf, stage, leaf.layer, m, chunk)
            elif name == "SEND_F":
                yield from self.output(stage, m)
            elif name == "SEND_B":
                yield from self.input_gradient(stage, m)
            elif name == "REDUCE":
                yield from (t for t in self.everything(rank) if t[1] == stage and t[0] == "W")
                yield from (t for t in self.everything(rank) if len(t) > 3 and t[1:3] == ("W", stage))
            elif name == "F":
                yield from self.arriving(stage, m)
            elif name in ("B", "I"):
                yield ("F", stage, m)
                yield from self.gradient(stage, m)
            elif name == "W":
                yield ("I", stage, m)

    def every_chunk(self, what: tuple[str, str], stage: int, layer: int, m: int) -> Iterator[Thing]:
        yield from ((*what, stage, layer, m, chunk) for chunk in range(self.cuts.get(m, 1)))

    def output(self, stage: int, m: int, chunk: int | None = None) -> Iterator[Thing]:
        if not self.shape.layers:
            yield ("F", stage, m)
            return
        last = len(self.layers(stage)) - 1
        chunks = range(self.cuts.get(m, 1)) if chunk is None else [chunk]
        for part in self.last_parts(self.layers(stage)[last]):
            yield from ((part, "F", stage, last, m, each) for each in chunks)

    def last_parts(self, layer: LayerShape, body: bool = False) -> list[str]:
        if layer.head and not body:
            return ["HEAD"]
        return ["COMBINE", *["SHARED"] * layer.shared] if layer.moe else ["MLP"]

    def input_gradient(self, stage: int, m: int, chunk: int | None = None) -> Iterable[Thing]:
        if not self.shape.layers:
            return [("I", stage, m)]
        if chunk is not None:
            return [("ATTN", "B", stage, 0, m, chunk)]
        return self.every_chunk(("ATTN", "B"), stage, 0, m)

    def arriving(self, stage: int, m: int, chunk: int | None = None) -> Iterable[Thing]:
        before = self.neighbour(stage, -1)
        if before is None:
            return []
        return self.output(before, m, chunk) if self.home(before) == self.home(stage) else [("in", stage, m)]

    def gradient(self, stage: int, m: int, chunk: int | None = None) -> Iterable[Thing]:
        behind = self.neighbour(stage, 1)
        if behind is None:
            return self.output(stage, m, chunk)
        if self.home(behind) == self.home(stage):
            return self.input_gradient(behind, m, chunk)
        return [("grad", stage, m)]

    def _layer_reads(self, op: Op, stage: int, index: int, m: int, chunk: int) -> Iterator[Thing]:
        layer, part, form = self.layers(stage)[index], op.kind.part.name, op.kind.form.name
        last = index == len(self.layers(stage)) - 1

        def local(part: str, form: str) -> Thing:
            return (part, form, stage, index, m, chunk)

        if form == "W":
            yield local(part, "B")
            return
        before = {"ROUTE": "ATTN", "SHARED": "ATTN", "DISPATCH": "ROUTE", "MLP": "DISPATCH", "COMBINE": "MLP"}
        if not layer.moe:
            before["MLP"] = "ATTN"
        if form == "R":
            source = before.get(part, "ATTN")
            again = part != "ATTN" and Part[source] in layer.recomputed
            yield local(source, "R" if again else "F")
        elif form == "F" and part == "ATTN":
            if index == 0:
                yield from self.arriving(stage, m, chunk)
            else:
                above = self.layers(stage)[index - 1]
                yield from ((p, "F", stage, index - 1, m, chunk) for p in self.last_parts(above))
        elif form == "F":
            yield from (
                local(p, "F") for p in (self.last_parts(layer, True) if part == "HEAD" else [before[part]])
            )
        else:
            yield from self._backward_reads(layer, part, stage, index, m, chunk, last)

    def _backward_reads(
        self, layer: LayerShape, part: str, stage: int, index: int, m: int, chunk: int, last: bool
    ) -> Iterator[Thing]:
        def local(part: str, form: str = "B") -> Thing:
            return (part, form, stage, index, m, chunk)

        if part not in ("DISPATCH", "COMBINE"):  # what it computed comes from forward, or from recompute
            yield local(part, "R" if Part[part] in layer.recomputed else "F")
        inside = {"MLP": ["COMBINE"], "DISPATCH": ["MLP"], "ROUTE": ["DISPATCH"]}
        inside["ATTN"] = ["ROUTE", *["SHARED"] * layer.shared] if layer.moe else ["MLP"]
        if part == "HEAD":
            yield from self.gradient(stage, m, chunk)
        elif part in inside and (layer.moe or part == "ATTN"):
            yield from (local(p) for p in inside[part])
        elif layer.head:
            yield local("HEAD")
        elif last:
            yield from self.gradient(stage, m, chunk)
        else:
            yield ("ATTN", "B", stage, index + 1, m, chunk)


class ExchangeWorld(World):
    def __init__(self, program: Program, shape: ExchangeShape) -> None:
        super().__init__(program)
        self.shape = shape
        self.ring = shape.groups
        if len(program.ranks) != sum(map(len, self.ring)):
            raise Broken("some ranks have no list")
        self.cuts = Counter(step for step, _ in shape.units)
        self.way = "B" if shape.backward else "F"

    def check_op(self, rank: int, op: Op) -> None:
        self.check_lane(rank, op)
        chunks = self.cuts[op.step or 0]
        said = op.chunks if op.chunk is not None else chunks if op.kind.name == "C_W" else 1
        strange = op.parts or (op.stage, op.layer, op.microbatch) != (None, None, None)
        if strange or (op.step is not None and said != chunks) or (op.chunk is None and op.chunks != 1):
            raise Broken(f"{op} on rank {rank} is not what its kind is")
        events = len(self.shape.units) * (self.shape.experts_per_rank if self.shape.per_expert else 1)
        sizes = {"S_F": (1 / events, 0.0), "R_B": (0.0, 1 / events)}
        self.check_sizes(rank, op, *sizes.get(op.kind.name, (0.0, 0.0)))

    def check_meeting(self, group: str, came: dict[int, int]) -> None:
        ops = {rank: self.program.ranks[rank][position] for rank, position in came.items()}
        some = next(iter(ops.values()))
        if sorted(ops) != list(range(len(self.program.ranks))):
            raise Broken(f"{some} meets {sorted(ops)} alone")
        if len({(o.kind, o.step, o.chunk, o.chunks, o.expert) for o in ops.values()}) > 1:
            raise Broken(f"{some} meets something else")
        partners = {rank: set(came) for rank in came}
        if some.step is not None:
            place = {rank: g for g, members in enumerate(self.ring) for rank in members}
            near = (some.step % len(self.ring), -some.step % len(self.ring))
            partners = {
                rank: {rank, *(o for o in came if (place[o] - place[rank]) % len(self.ring) in near)}
                for rank in came
            }
        self.check_peers(came, partners)

    def units(self) -> Iterator[Thing]:
        experts = range(self.shape.experts_per_rank) if self.shape.per_expert else [None]
        for step, chunk in self.shape.units:
            yield from ((step, chunk if self.cuts[step] > 1 else None, expert) for expert in experts)

    def everything(self, rank: int) -> Iterator[Thing]:
        for unit in self.units():
            yield from ((f"{part}_{self.way}", *unit) for part in "SCR")
        weights = [None, *[0] * bool(self.shape.own_weights)] if self.shape.backward else []
        yield from (("C_W", step, None, None) for step in weights)
        if self.shape.shadows:
            names = ["SEND", "F"] if not self.shape.backward else ["B", "W", "REDUCE", "ADD"]
            if self.shape.serving:
                names = [name for name in names if name in ("SEND", "REDUCE", "ADD")]
            yield from ((f"SHADOW_{name}", None, None, None) for name in names)

    def makes(self, rank: int, op: Op) -> Iterator[Thing]:
        yield (op.kind.name, op.step, op.chunk, op.expert)

    def reads(self, rank: int, op: Op) -> Iterator[Thing]:
        name = op.kind.name
        unit = (op.step, op.chunk, op.expert)
        if name == "C_W":
            yield from (("C_B", *u) for u in self.units() if op.step is None or u[0] == op.step)
        elif name.startswith("C_"):
            yield (f"S_{self.way}", *unit)
            if self.shape.serving and self.way == "F":
                yield ("SHADOW_SEND", None, None, None)
        elif name in ("R_F", "R_B"):
            yield (f"C_{self.way}", *unit)
        chain = {"SHADOW_F": "SHADOW_SEND", "SHADOW_W": "SHADOW_B", "SHADOW_REDUCE": "SHADOW_W"}
        chain["SHADOW_ADD"] = "SHADOW_REDUCE"
        if self.shape.serving:
            chain["SHADOW_REDUCE"] = "C_W"
        if name in chain:
            yield (chain[name], None, None, None)
