"""Programs with one thing changed at random: what a generator, a file or a hand might get wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from edits import swapped, with_rank, without

from moeclipse.schedule.kinds import KINDS, TRANSFERS, Part
from moeclipse.schedule.op import Op, Program
from moeclipse.schedule.shape import PipelineShape


class Unfit(Exception):
    """The program has nothing that could be changed in this way."""


class Change:
    """One mutant: a random rank of a program, and a random op of it that fits."""

    def __init__(self, program: Program, rng: random.Random) -> None:
        self.program, self.rng = program, rng
        self.rank = rng.randrange(program.num_ranks)
        self.ops = list(program.ranks[self.rank])

    def pick(self, fits: Callable[[Op], bool] = lambda op: True) -> int:
        found = [i for i, op in enumerate(self.ops) if fits(op)]
        if not found:
            raise Unfit
        return self.rng.choice(found)

    def with_op(self, position: int, **fields: object) -> Program:
        self.ops[position] = self.ops[position]._replace(**fields)  # type: ignore[arg-type]
        return self.done()

    def done(self) -> Program:
        return with_rank(self.program, self.rank, self.ops)

    def moved(self, source: int, target: int) -> Program:
        order = [i for i in range(len(self.ops)) if i != source]
        order.insert(target, source)
        place = {old: new for new, old in enumerate(order)}
        self.ops = [
            self.ops[old]._replace(deps=tuple(sorted(place.get(d, d) for d in self.ops[old].deps)))
            for old in order
        ]
        return self.done()


def on_wire(op: Op) -> bool:
    return op.comm is not None


def drop(c: Change) -> Program:
    c.ops = without(c.ops, c.pick())
    return c.done()


def launch_twice(c: Change) -> Program:
    c.ops.append(c.ops[c.pick()])
    return c.done()


def swap_neighbours(c: Change) -> Program:
    i = c.rng.randrange(len(c.ops) - 1)
    c.ops = swapped(c.ops, i, i + 1)
    return c.done()


def swap_two(c: Change) -> Program:
    i, j = sorted(c.rng.sample(range(len(c.ops)), 2))
    c.ops = swapped(c.ops, i, j)
    return c.done()


def swap_on_every_rank(c: Change) -> Program:
    """The same places everywhere, numbers of groups too: what all ranks would do if all were wrong alike."""
    i = c.rng.randrange(min(map(len, c.program.ranks)) - 1)
    ranks = []
    for ops in c.program.ranks:
        new = swapped(list(ops), i, i + 1)
        a, b = new[i].comm, new[i + 1].comm
        if a is not None and b is not None and a[0] == b[0]:
            new[i], new[i + 1] = new[i]._replace(comm=b), new[i + 1]._replace(comm=a)
        ranks.append(tuple(new))
    return replace(c.program, ranks=tuple(ranks))


def move_to_end(c: Change) -> Program:
    return c.moved(c.pick(), len(c.ops) - 1)


def move_to_front(c: Change) -> Program:
    return c.moved(c.pick(), 0)


def move_a_little(c: Change) -> Program:
    i = c.pick()
    return c.moved(i, max(0, min(len(c.ops) - 1, i + c.rng.choice((-3, -2, 2, 3)))))


def move_a_transfer(c: Change) -> Program:
    return c.moved(c.pick(on_wire), c.rng.randrange(len(c.ops)))


def reverse_a_window(c: Change) -> Program:
    i = c.rng.randrange(len(c.ops) - 1)
    for a, b in ((i, i + 2), (i + 1, i + 1)):
        if a < b < len(c.ops):
            c.ops = swapped(c.ops, a, b)
    return c.done()


def drop_a_dep(c: Change) -> Program:
    i = c.pick(lambda op: bool(op.deps))
    gone = c.rng.choice(c.ops[i].deps)
    return c.with_op(i, deps=tuple(d for d in c.ops[i].deps if d != gone))


def drop_all_deps(c: Change) -> Program:
    return c.with_op(c.pick(lambda op: bool(op.deps)), deps=())


def depend_on_the_neighbour(c: Change) -> Program:
    """A dep is taken for that on the op before it on the same lane, or behind it."""
    i = c.pick(lambda op: bool(op.deps))
    dep = c.rng.choice(c.ops[i].deps)
    same = [k for k in range(i) if c.ops[k].lane == c.ops[dep].lane and k != dep]
    if not same:
        raise Unfit
    other = min(same, key=lambda k: (abs(k - dep), k))
    return c.with_op(i, deps=tuple(sorted({*c.ops[i].deps, other} - {dep})))


def depend_on_more(c: Change) -> Program:
    i = c.pick()
    if not i:
        raise Unfit
    return c.with_op(i, deps=tuple(sorted({*c.ops[i].deps, c.rng.randrange(i)})))


def depend_on_what_follows(c: Change) -> Program:
    i = c.pick()
    return c.with_op(i, deps=(*c.ops[i].deps, c.rng.randrange(i, len(c.ops) + 2)))


def forget_the_group(c: Change) -> Program:
    return c.with_op(c.pick(on_wire), comm=None)


def forget_all_groups(c: Change) -> Program:
    """And, one time in two, a transfer goes to the end, where nothing holds it any more."""
    if c.rng.random() < 0.5:
        c.program = move_a_transfer(c)
    if not any(op.comm for ops in c.program.ranks for op in ops):
        raise Unfit
    return replace(
        c.program, ranks=tuple(tuple(op._replace(comm=None) for op in ops) for ops in c.program.ranks)
    )


def wrong_number(c: Change) -> Program:
    i = c.pick(on_wire)
    group, number = c.ops[i].comm or ("", 0)
    return c.with_op(i, comm=(group, number + c.rng.choice((-1, 1, 7))))


def other_group(c: Change) -> Program:
    i = c.pick(on_wire)
    group, number = c.ops[i].comm or ("", 0)
    others = [g for g in (*c.program.groups, "nobody") if g != group]
    return c.with_op(i, comm=(c.rng.choice(others), number))


def group_for_compute(c: Change) -> Program:
    i = c.pick(lambda op: op.comm is None)
    if not c.program.groups:
        raise Unfit
    return c.with_op(i, comm=(c.rng.choice(list(c.program.groups)), 0))


def meet_oneself(c: Change) -> Program:
    if c.program.num_ranks == 1:
        raise Unfit
    return c.with_op(c.pick(on_wire), peers=(c.rank,))


def meet_oneself_everywhere(c: Change) -> Program:
    """All members shrink alike, so that nobody's word stands against another's."""
    i = c.pick(lambda op: len(c.program.groups.get(op.comm[0] if op.comm else "", ())) > 1)
    comm = c.ops[i].comm
    ranks = [
        tuple(op._replace(peers=(rank,)) if op.comm == comm else op for op in ops)
        for rank, ops in enumerate(c.program.ranks)
    ]
    return replace(c.program, ranks=tuple(ranks))


def other_peers(c: Change) -> Program:
    i = c.pick(on_wire)
    P = c.program.num_ranks
    return c.with_op(i, peers=tuple(sorted(c.rng.sample(range(P + 1), c.rng.randint(1, P)))))


def other_lane(c: Change) -> Program:
    i = c.pick()
    lanes = {op.lane for op in c.ops} | {"compute", "a2a", "dp", "p2p:0>1"}
    return c.with_op(i, lane=c.rng.choice(sorted(lanes - {c.ops[i].lane})))


def one_lane_for_both_ways(c: Change) -> Program:
    def shared(op: Op) -> Op:
        if op.kind not in TRANSFERS or op.comm is None:
            return op
        return op._replace(lane="p2p:" + "-".join(sorted(op.comm[0].split(">"))))

    if not any(op.kind in TRANSFERS for op in c.ops):
        raise Unfit
    return replace(c.program, ranks=tuple(tuple(map(shared, ops)) for ops in c.program.ranks))


def one_communicator_per_pair(c: Change) -> Program:
    names = {g: "-".join(sorted(g.split(">"))) for g in c.program.groups if ">" in g}
    if not names:
        raise Unfit
    return replace(c.program, communicators=names)


def take_more(c: Change) -> Program:
    i = c.pick()
    return c.with_op(i, alloc=c.ops[i].alloc + c.rng.choice((-0.5, 0.25, 1.0)))


def give_less(c: Change) -> Program:
    i = c.pick(lambda op: op.free > 0)
    return c.with_op(i, free=c.ops[i].free * c.rng.choice((0.0, 0.5, 2.0)))


def give_elsewhere(c: Change) -> Program:
    """The sum stays what it was."""
    i, j = c.pick(lambda op: op.free > 0), c.pick(lambda op: op.free == 0)
    free = c.ops[i].free
    c.with_op(i, free=0.0)
    return c.with_op(j, free=free)


def number(name: str) -> Callable[[Change], Program]:
    def change(c: Change) -> Program:
        i = c.pick(lambda op: getattr(op, name) is not None)
        return c.with_op(i, **{name: max(0, getattr(c.ops[i], name) + c.rng.choice((-1, 1)))})

    change.__name__ = f"other_{name}"
    return change


def new_number(c: Change) -> Program:
    """A number that its kind does not have."""
    i = c.pick()
    names = [
        n for n in ("stage", "layer", "microbatch", "step", "chunk", "expert") if getattr(c.ops[i], n) is None
    ]
    return c.with_op(i, **{c.rng.choice(names): c.rng.randint(0, 1)})


def other_kind(c: Change) -> Program:
    i = c.pick()
    near = [k for k in KINDS.values() if k.part is c.ops[i].kind.part or k.form is c.ops[i].kind.form]
    return c.with_op(i, kind=c.rng.choice(near))


def cut_otherwise(c: Change) -> Program:
    i = c.pick()
    return c.with_op(i, chunks=c.ops[i].chunks + c.rng.choice((1, 2)))


def swap_chunks(c: Change) -> Program:
    """Two chunks of one part change places, with their numbers on the group where they have any."""
    i = c.pick(lambda op: op.chunk is not None)
    op = c.ops[i]
    same = [
        k
        for k, o in enumerate(c.ops)
        if o._replace(chunk=op.chunk, deps=(), comm=None) == op._replace(deps=(), comm=None) and k != i
    ]
    if not same:
        raise Unfit
    j = c.rng.choice(same)
    a, b = c.ops[i], c.ops[j]
    c.ops[i], c.ops[j] = a._replace(chunk=b.chunk), b._replace(chunk=a.chunk)
    return c.done()


def fewer_members(c: Change) -> Program:
    group = c.rng.choice([g for g, members in c.program.groups.items() if len(members) > 1] or [""])
    if not group:
        raise Unfit
    members = list(c.program.groups[group])
    members.remove(c.rng.choice(members))
    return replace(c.program, groups={**c.program.groups, group: tuple(members)})


def groups_of_one(c: Change) -> Program:
    """Every rank has a group of its own where all should meet."""
    shared = [g for g, members in c.program.groups.items() if len(members) > 1 and ">" not in g]
    if not shared:
        raise Unfit
    group = c.rng.choice(shared)
    members = c.program.groups[group]
    ranks = [
        tuple(
            op._replace(comm=(f"{group}.{rank}", op.comm[1])) if op.comm and op.comm[0] == group else op
            for op in ops
        )
        for rank, ops in enumerate(c.program.ranks)
    ]
    groups = {**c.program.groups, **{f"{group}.{rank}": (rank,) for rank in members}}
    return replace(c.program, ranks=tuple(ranks), groups=groups)


def crossed_copies(c: Change) -> Program:
    """Two copies of a place send to each other's partner."""
    shape = c.program.shape
    if not isinstance(shape, PipelineShape) or shape.copies < 2:
        raise Unfit
    wires = [g for g in c.program.groups if ">" in g]
    first = c.rng.choice(wires)
    source, target = c.program.groups[first]
    beside = [
        g
        for g in wires
        if g != first
        and {m // shape.copies for m in c.program.groups[g]}
        == {source // shape.copies, target // shape.copies}
        and c.program.groups[g][0] // shape.copies == source // shape.copies
    ]
    if not beside:
        raise Unfit
    second = c.rng.choice(beside)
    a, b = c.program.groups[first], c.program.groups[second]
    other = {a[1]: second, b[1]: first}
    ranks = []
    for rank, ops in enumerate(c.program.ranks):
        new = [
            op._replace(comm=(other[rank], op.comm[1]))
            if op.comm and op.comm[0] in (first, second) and rank in other
            else op
            for op in ops
        ]
        ranks.append(tuple(new))
    groups = {**c.program.groups, first: (a[0], b[1]), second: (b[0], a[1])}
    return replace(c.program, ranks=tuple(ranks), groups=groups)


def forget_members(c: Change) -> Program:
    if not c.program.groups:
        raise Unfit
    gone = c.rng.choice(list(c.program.groups))
    return replace(c.program, groups={g: m for g, m in c.program.groups.items() if g != gone})


def turn_a_wire(c: Change) -> Program:
    wires = [g for g, members in c.program.groups.items() if len(members) > 1]
    if not wires:
        raise Unfit
    group = c.rng.choice(wires)
    return replace(c.program, groups={**c.program.groups, group: c.program.groups[group][::-1]})


def to_another_rank(c: Change) -> Program:
    if c.program.num_ranks < 2:
        raise Unfit
    i = c.pick()
    op = c.ops[i]
    other = c.rng.choice([r for r in range(c.program.num_ranks) if r != c.rank])
    program = with_rank(c.program, c.rank, without(c.ops, i))
    return with_rank(program, other, [*c.program.ranks[other], op._replace(deps=())])


def forget_a_rank(c: Change) -> Program:
    return replace(c.program, ranks=c.program.ranks[:-1])


def take_a_pair_apart(c: Change) -> Program:
    """Its two actions one after the other: that may well work."""
    i = c.pick(lambda op: len(op.parts) == 2)
    first, second = c.ops[i].parts
    if c.ops[i].deps or c.program.groups:
        raise Unfit
    c.ops[i : i + 1] = [first, second] if c.rng.random() < 0.5 else [second, first]
    return c.done()


def pair_of_one(c: Change) -> Program:
    i = c.pick(lambda op: bool(op.parts))
    return c.with_op(i, parts=c.ops[i].parts[: c.rng.randint(0, 1)])


def receive_late(c: Change) -> Program:
    i = c.pick(lambda op: op.kind.part is Part.RECV)
    return c.moved(i, min(len(c.ops) - 1, i + c.rng.randint(1, 4)))


MUTATIONS: tuple[Callable[[Change], Program], ...] = (
    drop, launch_twice, swap_neighbours, swap_two, swap_on_every_rank, move_to_end, move_to_front,
    move_a_little, move_a_transfer, reverse_a_window, drop_a_dep, drop_all_deps, depend_on_the_neighbour,
    depend_on_more, depend_on_what_follows, forget_the_group, forget_all_groups, wrong_number,
    other_group, group_for_compute, meet_oneself, meet_oneself_everywhere, other_peers, other_lane,
    one_lane_for_both_ways, one_communicator_per_pair, take_more, give_less, give_elsewhere,
    number("microbatch"), number("stage"), number("layer"), number("chunk"), number("step"), new_number,
    other_kind, cut_otherwise, swap_chunks, fewer_members, groups_of_one, crossed_copies, forget_members,
    turn_a_wire, to_another_rank, forget_a_rank, take_a_pair_apart, pair_of_one, receive_late,
)  # fmt: skip
