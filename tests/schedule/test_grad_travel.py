"""Gradients on the host from backward to the next forward: where copies stand, and what proves them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from edits import with_rank, without

from moeclipse.core.errors import ScheduleError
from moeclipse.cost.model import Costs
from moeclipse.schedule import kinds
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.grad_travel import leaves, makes_room_for, turns_of
from moeclipse.schedule.kinds import Kind
from moeclipse.schedule.launch import BucketShape, StepShape
from moeclipse.schedule.op import Op, Program
from moeclipse.schedule.shape import LayerShape
from moeclipse.schedule.templates import Expansion, expand
from moeclipse.sim.engine import simulate
from moeclipse.sim.measure import summarise

GRADS = (kinds.GRAD_STORE, kinds.GRAD_FETCH)


def step_of(layers: int, slots: int, *, state: float = 0.0, recompute: str = "off") -> Program:
    """One rank, one microbatch: a bucket a layer, from the last to the first, and the embedding."""
    shapes = [LayerShape(shared=False, head=at == layers - 1, recompute=recompute) for at in range(layers)]  # type: ignore[arg-type]
    turns = turns_of([*["layer"] * layers, None], slots)
    buckets = tuple(
        BucketShape(
            name,
            "dense_grads",
            ((0, place),),
            num_bytes=4e6,
            host_bytes=state,
            layer=name,
            turn=turn,
            grad_bytes=2e6,
        )
        for name, place, turn in zip(
            [*(f"layers.{at}" for at in reversed(range(layers))), "embedding"],
            [*reversed(range(layers)), 0],
            turns,
            strict=True,
        )
    )
    step = StepShape(buckets=(buckets,), slots=2, next_forward=True, loads=False)
    return expand(build("1f1b", 1, 1, 1), [shapes], Expansion(overlap="off"), step=step)


def listed(program: Program, *wanted: Kind) -> list[str]:
    return [str(op) for op in program.ranks[0] if op.kind in wanted]


def test_turns_go_round_among_those_that_are_alike() -> None:
    assert turns_of(["a", "b", "a", "b", "a", None, "a", None], 2) == [-1, -1, -1, -1, 0, -1, 2, -1]
    assert turns_of(["a"] * 4, 1) == [-1, 0, 1, 2]
    assert turns_of(["a"] * 4, 4) == [-1] * 4


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("state", [0.0, 8e6])
def test_every_number_of_buffers_is_proved(slots: int, state: float) -> None:
    for recompute in ("off", "full"):
        program = step_of(5, slots, state=state, recompute=recompute)
        verify(program)


def test_gradients_leave_behind_their_reduction_and_come_back_as_updates_make_room() -> None:
    program = step_of(4, 2)
    found = listed(program, *GRADS, kinds.BUCKET_UPDATE, kinds.BUCKET_REDUCE, kinds.ATTN_F)
    assert found == [
        *("0BUCKET_UPDATE@4", "0BUCKET_UPDATE@3", "0GRAD_FETCH@1", "0.0ATTN_F0"),
        *("0BUCKET_UPDATE@2", "0GRAD_FETCH@0", "0.1ATTN_F0"),
        *("0BUCKET_UPDATE@1", "0.2ATTN_F0", "0BUCKET_UPDATE@0", "0.3ATTN_F0"),
        *("0BUCKET_REDUCE@0", "0GRAD_STORE@0", "0BUCKET_REDUCE@1", "0GRAD_STORE@1"),
        *("0BUCKET_REDUCE@2", "0BUCKET_REDUCE@3", "0BUCKET_REDUCE@4"),  # the last ones keep theirs
    ]
    step = program.pipeline().step
    assert step is not None
    assert [leaves(step.buckets[0], number) for number in range(5)] == [True, True, False, False, False]
    assert [makes_room_for(step.buckets[0], number) for number in range(5)] == [None, None, 0, 1, None]


@pytest.mark.parametrize(
    ("reader", "read"),
    [
        (kinds.BUCKET_UPDATE, kinds.GRAD_FETCH),  # updated before it came back
        (kinds.GRAD_FETCH, kinds.BUCKET_UPDATE),  # over one that is still read
        (kinds.GRAD_STORE, kinds.BUCKET_REDUCE),  # stored before it is whole
        (None, kinds.GRAD_STORE),  # written, by whatever of a layer comes first, over one that has not left
    ],
    ids=str,
)
def test_what_is_read_before_it_came_or_overwritten_before_it_left_is_refused(
    reader: Kind | None, read: Kind
) -> None:
    program = step_of(5, 2)
    ops = list(program.ranks[0])
    gone = {at for at, op in enumerate(ops) if op.kind is read}
    careless = [
        op._replace(deps=tuple(dep for dep in op.deps if dep not in gone))
        if op.kind is (reader or op.kind)
        else op
        for op in ops
    ]
    assert careless != ops
    with pytest.raises(
        ScheduleError, match=rf"{reader or '[A-Z]+_[BW]'}.* on rank 0 reads .*{read}@\d, which may still run"
    ):
        verify(with_rank(program, 0, careless))


@pytest.mark.parametrize("kind", GRADS, ids=str)
def test_a_copy_that_is_left_out_is_missed(kind: Kind) -> None:
    program = step_of(4, 2)
    ops = list(program.ranks[0])
    at = next(at for at, op in enumerate(ops) if op.kind is kind)
    with pytest.raises(ScheduleError, match=f"rank 0 lacks 0{kind}@"):
        verify(with_rank(program, 0, without(ops, at)))


def test_copies_hide_while_they_take_less_than_a_layer() -> None:
    def seconds(copy_s: float, slots: int = 2) -> tuple[float, float]:
        program = step_of(8, slots)

        def takes(op: Op) -> float:
            return (
                copy_s
                if op.kind in GRADS
                else float(op.lane == kinds.COMPUTE and op.kind.part.name != "BUCKET")
            )

        durations = [[takes(op) for op in ops] for ops in program.ranks]
        found = summarise(simulate(verify(program), Costs(name="made", seconds={}), durations))
        copies = [found.kinds[kind] for kind in GRADS]
        return found.makespan, sum(one.hidden for one in copies) / max(sum(one.total for one in copies), 1e-9)

    at_rest, _ = seconds(0.0)
    assert seconds(2.0)[0] == at_rest
    assert seconds(2.0)[1] == 1.0
    slow, hidden = seconds(20.0)
    assert slow > at_rest + 30
    assert hidden < 0.8
    assert seconds(20.0, slots=3)[0] < slow


def test_without_turns_nothing_travels() -> None:
    program = step_of(4, 2)
    step = program.pipeline().step
    assert step is not None
    plain = tuple(bucket._replace(turn=-1) for bucket in step.buckets[0])
    layers = [list(stage) for stage in program.pipeline().layers]
    other = expand(
        build("1f1b", 1, 1, 1), layers, Expansion(overlap="off"), step=replace(step, buckets=(plain,))
    )
    assert not listed(other, *GRADS)
