"""Whether a program works, found out by running it: nothing of the verifier is used here.

An executor walks the lists of all ranks on three kinds of machine, each as slow as it may be:

    host      compute runs in the caller; transfers are under way beside it, and end when somebody waits
    streams   a transfer waits for everything that was launched on the compute stream before it, for its
              lane and for its communicator, and occupies both until everyone has come
    lanes     every lane has a worker of its own, and waits for what an op lists, and for nothing else

Whatever an op starts after is known by then; what it reads and does not know may still be on its way (a
race). What ops make and read stands in `worlds`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from whole_world import world_of
from worlds import HOST_WAITS, ON_WIRE, Broken, Thing, World

from moeclipse.schedule.op import Op, Program


def why_broken(program: Program) -> str | None:
    """None: it works on all three machines."""
    try:
        world = world_of(program)
        for machine in ("host", "streams", "lanes"):
            Machine(program, world, machine).run()
    except Broken as error:
        return str(error)
    except (KeyError, IndexError, ValueError, TypeError) as error:
        return f"malformed: {error!r}"
    return None


class Machine:
    def __init__(self, program: Program, world: World, kind: str) -> None:
        self.program, self.world, self.kind = program, world, kind
        self.in_caller, self.in_lanes = kind != "lanes", kind != "host"
        ranks = range(len(program.ranks))
        self.known: list[dict[int, int]] = [{} for _ in ranks]
        """Of ops that have ended: what was known to have ended when they started, as bits of positions."""
        self.caller = [0 for _ in ranks]
        """What the caller of each rank knows by now."""
        self.waits: list[int | None] = [None for _ in ranks]
        """What the caller of each rank waits for before it goes on."""
        self.at_launch: list[list[int]] = [[] for _ in ranks]
        self.open: list[list[int]] = [[] for _ in ranks]
        """Launched and not ended."""
        self.behind: list[list[set[int]]] = [[] for _ in ranks]
        """The ops before each, on its lane and on its communicator."""
        self.number: list[list[int]] = [[] for _ in ranks]
        self.came: dict[tuple[str, int], dict[int, int]] = {}
        self.entered: Counter[Thing] = Counter()
        self.made: list[dict[Thing, int]] = [{} for _ in ranks]
        for rank, ops in enumerate(program.ranks):
            self._look(rank, ops)

    def _look(self, rank: int, ops: Sequence[Op]) -> None:
        last: dict[str, int] = {}
        count: Counter[str] = Counter()
        for position, op in enumerate(ops):
            places = [f"lane {op.lane}"]
            self.number[rank].append(count[op.comm[0]] if op.comm else -1)
            if op.comm:
                count[op.comm[0]] += 1
                places.append(f"communicator {self.program.communicators.get(op.comm[0], op.comm[0])}")
            self.behind[rank].append({last[p] for p in places if p in last} if self.in_lanes else set())
            last |= dict.fromkeys(places, position)

    def run(self) -> None:
        while any(self._advance(rank) for rank in range(len(self.program.ranks))):
            pass
        for rank, ops in enumerate(self.program.ranks):
            late = [op for position, op in enumerate(ops) if position not in self.known[rank]]
            if late:
                raise Broken(f"{self.kind}: rank {rank} never ends {late[0]}")
            wrong = set(self.made[rank]) ^ set(self.world.everything(rank))
            if wrong:
                raise Broken(f"{self.kind}: rank {rank} makes or lacks {min(map(str, wrong))}")

    def _advance(self, rank: int) -> bool:
        """Launch as far as the caller comes, then let go on what can."""
        ops, moved = self.program.ranks[rank], False
        while len(self.at_launch[rank]) < len(ops):
            position = len(self.at_launch[rank])
            op = ops[position]
            waits = self.waits[rank]
            if waits is not None and self.in_caller:
                if waits not in self.known[rank]:
                    break
                self.caller[rank] |= self._after(rank, (waits,))
                self.waits[rank] = None
            if any(not 0 <= dep < position for dep in op.deps):
                raise Broken(f"{op} on rank {rank} waits for what is not launched before it")
            if self.in_caller:
                if any(dep not in self.known[rank] for dep in op.deps):
                    break
                self.caller[rank] |= self._after(rank, op.deps)
            self.at_launch[rank].append(self.caller[rank])
            moved = True
            if op.kind.name in ON_WIRE or not self.in_caller:
                self.open[rank].append(position)
                if op.kind.name in HOST_WAITS:
                    self.waits[rank] = position
            else:
                self._end(rank, position, self.caller[rank])
                self.caller[rank] |= 1 << position
        for position in list(self.open[rank]):
            if self._free(rank, position):
                moved |= self._begin(rank, position)
        return moved

    def _after(self, rank: int, positions: Iterable[int]) -> int:
        known = 0
        for position in positions:
            known |= self.known[rank][position] | 1 << position
        return known

    def _free(self, rank: int, position: int) -> bool:
        """At the head of all it stands on."""
        deps = self.program.ranks[rank][position].deps
        return all(p in self.known[rank] for p in (*self.behind[rank][position], *deps))

    def _begin(self, rank: int, position: int) -> bool:
        """What meets others ends when everyone has come."""
        op = self.program.ranks[rank][position]
        came = {rank: position}
        if op.kind.name in ON_WIRE:
            if op.comm is None or op.comm[1] != self.number[rank][position]:
                raise Broken(f"{op} on rank {rank} is number {self.number[rank][position]} of its group")
            came = self.came.setdefault(op.comm, {})
            arrived = rank not in came
            came[rank] = position
            if set(came) != set(self.program.groups[op.comm[0]]):
                return arrived
            self.world.check_meeting(op.comm[0], came)
        for other, at in came.items():
            deps = self.program.ranks[other][at].deps
            known = self.at_launch[other][at] | self._after(other, (*self.behind[other][at], *deps))
            self._end(other, at, known)
            self.open[other].remove(at)
        return True

    def _end(self, rank: int, position: int, known: int) -> None:
        op = self.program.ranks[rank][position]
        self.world.check_op(rank, op)
        for thing in self.world.reads(rank, op):
            at = self.made[rank].get(thing)
            if at is None or not known >> at & 1:
                raise Broken(f"{self.kind}: {op} on rank {rank} reads {thing}, which may not be there")
        for thing in self.world.makes(rank, op):
            if thing in self.made[rank]:
                raise Broken(f"{op} on rank {rank} makes {thing} once more")
            self.made[rank][thing] = position
        self._pass_border(rank, op)
        self.known[rank][position] = known

    def _pass_border(self, rank: int, op: Op) -> None:
        """A runtime hands chunks on as they come: the first before the second."""
        border = self.world.border(op)
        if border is not None and op.chunk is not None and self.kind == "host":
            border = (rank, *border)
            if op.chunk > self.entered[border]:
                raise Broken(f"{op} on rank {rank} comes before chunk {self.entered[border]}")
            self.entered[border] = max(self.entered[border], op.chunk + 1)
