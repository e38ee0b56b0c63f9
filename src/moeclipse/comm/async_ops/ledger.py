"""Every launch is the next op of the program, and every op is launched: checked as they happen.

    ledger = Ledger(program, place, groups)      # one rank's part; `groups` are those of its mesh, by axis
    recorder.ledger = ledger                     # from here on every launch passes by
    with ledger.step(): ...                      # raises at the first launch that is not next on its lane,
                                                 # and at the end where something was not launched

Whoever launches says lane, group and label (`record.Recorder.passes`), and a program says the same of its
ops, so nothing is matched by count alone. The exchange of a layer is a program of its own, chosen from the
rows of the moment (`schedule/smart`): the layer announces it, and it stands in the place of its DISPATCH,
MLP and COMBINE.

What is launched inside `apart` belongs to no step: probes of costs, checks of integrity. Between steps
launches are free, and are only remembered, by label.
Hazard: it raises on one rank, and the others wait for that rank until their deadline; it is for tests.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from moeclipse.comm.group import Group
from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import A2A, COMPUTE, COPIES, LAUNCHES, TP, TRANSFERS, Form, Kind, Part
from moeclipse.schedule.op import Op, Program
from moeclipse.schedule.whole_step import axis_of, buckets_of, cuts_of_ops, hosted_launch

EXCHANGED = (Part.DISPATCH, Part.MLP, Part.COMBINE)
"""Parts whose launches the program of an exchange lists."""
SAID: dict[Kind, str] = {
    kinds.TIED_SUM: "gradient of the tied embedding",
    kinds.RESULTS_GATHER: "exchange of step results",
    kinds.LOADS_GATHER: "exchange of expert loads",
    kinds.LOADS_SUM: "loads of all stages",
}
HOST_GROUP = "host"
"""What copies between host and device are recorded under; one rank is all of it."""


def input_label(kind: Kind, where: str) -> str:
    """Of a copy; `where` names layer and microbatch."""
    return f"{kind.form.name.lower()} of input, {where}"


def weights_label(kind: Kind, where: str) -> str:
    """Of a copy; `where` names the layer."""
    return f"{kind.form.name.lower()} of weights, {where}"


Slices = Mapping[Kind, Sequence[str]]
"""Labels of an exchange, by the op of its layer that launches them."""


class Ledger:
    """What one rank has to launch next, lane by lane."""

    def __init__(self, program: Program, place: int, groups: Mapping[str, Group]) -> None:
        self.shape = program.pipeline()
        assert self.shape.step is not None, "a ledger needs a program of the whole step"
        self.groups, self.rows = groups, groups[self.shape.step.rows]
        self._cuts = cuts_of_ops(program.ranks)
        self._first_layer = self.shape.first_layers
        self._listed = [op for op in program.ranks[place] if self._travels(op)]
        self._left: dict[str, deque[Op]] = {}
        self._slice: deque[tuple[str, Op]] = deque()
        self._announced: dict[tuple[str, int], Slices] = {}
        self._apart: str | None = None
        self._open = False
        self.between: Counter[str] = Counter()
        """Launches outside of steps, by label; inside `apart`, by its name."""
        self.checked = 0
        """Launches that were the next op."""

    def _travels(self, op: Op) -> bool:
        """Whether something is launched for it; one rank in a group sends nothing."""
        if op.kind in TRANSFERS or op.kind in COPIES:
            return True
        if op.kind.part in EXCHANGED and op.layer is not None and op.stage is not None:
            return self.shape.layers[op.stage][op.layer].moe and self.rows.size > 1
        return op.kind.lane != COMPUTE and self.groups[axis_of(self.shape, op)].size > 1

    @contextmanager
    def step(self, quiet: Sequence[int] = ()) -> Iterator[None]:
        """One step; `quiet` buckets have nothing to send. What raises inside is all that is told."""
        self._left, self._open = {}, True
        self._slice.clear()
        self._announced.clear()
        for op in self._listed:
            if op.kind.part is Part.BUCKET and op.step in quiet:
                continue
            lane = A2A if op.kind.part in EXCHANGED else op.lane
            self._left.setdefault(lane, deque()).append(op)
        try:
            yield
            self._check_done()
        finally:
            self._open = False

    @contextmanager
    def apart(self, what: str) -> Iterator[None]:
        """What is launched here is no part of the step."""
        outer, self._apart = self._apart, what
        try:
            yield
        finally:
            self._apart = outer

    def leave_out(self, *left_out: Kind) -> None:
        """Ops of these kinds will not be launched in this step: an update that is skipped, for one."""
        for lane, ops in self._left.items():
            self._left[lane] = deque(op for op in ops if op.kind not in left_out)

    def announce(self, where: str, slices: Slices) -> None:
        """The exchange of one call of a layer; `where` names layer and microbatch, chunks come in order."""
        if self._open:
            chunk = sum(at == where for at, _ in self._announced)
            self._announced[where, chunk] = slices

    def launch(self, lane: str, group: str, label: str) -> Op | None:
        """Somebody is about to launch this; the op that it is, or None outside of steps."""
        if self._apart is not None or not self._open:
            self.between[label if self._apart is None else self._apart] += 1
            return None
        left = self._left.get(lane, deque())
        if lane == A2A:
            self._next_slice(left)
            if self._slice:
                wanted, op = self._slice.popleft()
                self._compare(wanted == label and group == self.rows.name, lane, label, wanted)
                return op
        if not left:
            raise ScheduleError(
                f"{label!r} is launched on lane {lane!r} behind the last op of the program there"
            )
        op = left.popleft()
        fits = group == self._group_of(op) and self._says(op, label)
        self._compare(fits, lane, label, f"{op} in group {self._group_of(op)!r}: {self._words(op)!r}")
        return op

    def pass_over(self, lane: str, group: str, label: str) -> None:
        """This is the next op, and is not launched: all ranks of its group know that they can do without."""
        if self._open and self._apart is None:
            self.launch(lane, group, label)
            self.checked -= 1

    def _compare(self, fits: bool, lane: str, label: str, wanted: str) -> None:
        if not fits:
            raise ScheduleError(
                f"{label!r} is launched on lane {lane!r}, but the program's next there is {wanted}"
            )
        self.checked += 1

    def _next_slice(self, left: deque[Op]) -> None:
        """Put the labels of exchanges whose turn it is in front."""
        while not self._slice and left and left[0].kind.part in EXCHANGED:
            op = left[0]
            where = self._where(op)
            chunks = range(self._cuts.get(op.microbatch or 0, 1)) if op.chunk is None else (op.chunk,)
            if any((where, chunk) not in self._announced for chunk in chunks):
                return
            left.popleft()
            for chunk in chunks:
                self._slice += [(label, op) for label in self._announced[where, chunk].get(op.kind, ())]

    def _where(self, op: Op) -> str:
        assert op.stage is not None
        assert op.layer is not None
        return f"layer {self._first_layer[op.stage] + op.layer}, microbatch {op.microbatch}"

    def _group_of(self, op: Op) -> str:
        if op.kind in TRANSFERS:
            assert op.comm is not None
            source, target = map(int, op.comm[0].split(">"))
            return f"pipe.{op.kind.form.name}.{'up' if source < target else 'down'}"
        if op.kind in COPIES:
            return HOST_GROUP
        return self.groups[axis_of(self.shape, op)].name

    def _words(self, op: Op) -> str:
        if op.kind in LAUNCHES:
            what = hosted_launch(self.shape, op).what
            return what if op.lane == TP else f"{what}, microbatch {op.microbatch}"
        if op.kind in TRANSFERS:
            return f"{'activations' if op.kind.form is Form.F else 'gradients'} {op} "
        if op.kind.part in (Part.BUCKET, Part.GRAD):
            assert self.shape.step is not None
            return f" bucket {buckets_of(self.shape, self.shape.step, op.stage or 0)[op.step or 0].name}"
        if op.kind.part is Part.INPUT:
            return input_label(op.kind, self._where(op))
        if op.kind.part is Part.WEIGHTS:
            return weights_label(op.kind, self._where(op).partition(",")[0])
        return SAID[op.kind] if op.kind in SAID else f"an exchange of {self._where(op)}, once it is announced"

    def _says(self, op: Op, label: str) -> bool:
        words = self._words(op)
        if op.kind in TRANSFERS:
            return label.startswith(words)
        return label.endswith(words) if op.kind.part in (Part.BUCKET, Part.GRAD) else label == words

    def _check_done(self) -> None:
        self._next_slice(self._left.get(A2A, deque()))
        missing = [f"{lane}: {ops[0]} ({self._words(ops[0])})" for lane, ops in self._left.items() if ops]
        if self._slice:
            missing.append(f"{A2A}: {self._slice[0][0]}")
        if missing:
            raise ScheduleError(
                f"the step has ended, but ops were not launched; the first by lane: {missing}"
            )
