"""Inputs of layers that lie on the host for a while: where their copies stand, and what proves them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from edits import with_rank, without
from whole_steps import SCHEDULES, whole

from moeclipse.core.errors import ScheduleError
from moeclipse.cost.model import Costs
from moeclipse.schedule import kinds
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.input_travel import InputKey, buffer_sources, host_regions, ring_buffers
from moeclipse.schedule.kinds import Kind, Part
from moeclipse.schedule.launch import StepShape
from moeclipse.schedule.op import Op, Program
from moeclipse.schedule.shape import Activation, LayerShape
from moeclipse.schedule.templates import Expansion, expand, replicate
from moeclipse.sim.engine import simulate
from moeclipse.sim.measure import summarise

LATE = ("zb-h1", "zb-v", "dualpipe", "dualpipev")
"""Schedules that leave weight gradients for later."""


def one_rank(layers: int, *, microbatches: int = 1, slots: int = 2, by_layers: bool = False) -> Program:
    """Of a run without a pipeline, or layer by layer; all inputs but the last one's travel."""
    shapes = [
        LayerShape(
            recompute="full",
            shared=False,
            activation=Activation(input=1.0, attn=0.0, shared=0.0, mlp=0.0),
            host_bytes=1e6 * (at < layers - 1),
            head=at == layers - 1,
        )
        for at in range(layers)
    ]
    actions = build("layers", 1, microbatches, layers) if by_layers else build("1f1b", 1, microbatches, 1)
    given = [[shape] for shape in shapes] if by_layers else [shapes]
    return expand(actions, given, Expansion(overlap="off"), step=StepShape(input_slots=slots))


def listed(program: Program, *wanted: Kind) -> list[str]:
    return [str(op) for op in program.ranks[0] if op.kind in wanted]


COPIES = (kinds.INPUT_STORE, kinds.INPUT_FETCH)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in LATE])
def test_every_schedule_is_proved_with_inputs_on_the_host(name: str) -> None:
    ways = (("off", 1, {}), ("pair+self", 3, {"by_layer": True}), ("pair+self", 2, {"next_forward": True}))
    for overlap, slots, when in ways:
        program = whole(name, overlap, "full", slots=slots, inputs=1e6, copies=(1, 2, 1), **when)
        verify(program)
    verify(replicate(program))


def test_layer_by_layer_is_proved_too() -> None:
    for slots in (1, 2, 3):
        verify(one_rank(4, microbatches=3, slots=slots, by_layers=True))


@pytest.mark.parametrize("name", ["zb-h1", "dualpipe"])
def test_a_schedule_without_a_free_buffer_in_time_is_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match="before one of 1 buffers is free"):
        whole(name, "off", "full", slots=1, inputs=1e6)


def test_layers_that_keep_their_activations_are_refused() -> None:
    with pytest.raises(ScheduleError, match="the layer does not run again in backward"):
        whole("1f1b", "off", "mlp", slots=1, inputs=1e6)


def test_copies_stand_behind_forward_and_where_a_buffer_is_free() -> None:
    found = listed(one_rank(5), *COPIES, kinds.ATTN_F, kinds.ATTN_R, kinds.ATTN_W)
    assert found == [
        *("0.0ATTN_F0", "0.0INPUT_STORE0", "0.1ATTN_F0", "0.1INPUT_STORE0", "0.2ATTN_F0", "0.2INPUT_STORE0"),
        *("0.3ATTN_F0", "0.3INPUT_STORE0", "0.3INPUT_FETCH0", "0.2INPUT_FETCH0"),
        *("0.4ATTN_F0", "0.4ATTN_R0", "0.4ATTN_W0"),  # keeps its own: nothing comes between
        *("0.3ATTN_R0", "0.3ATTN_W0", "0.1INPUT_FETCH0", "0.2ATTN_R0", "0.2ATTN_W0", "0.0INPUT_FETCH0"),
        *("0.1ATTN_R0", "0.1ATTN_W0", "0.0ATTN_R0", "0.0ATTN_W0"),
    ]


def test_layer_by_layer_all_microbatches_of_a_layer_leave_and_come_back_together() -> None:
    program = one_rank(3, microbatches=2, by_layers=True)
    assert listed(program, *COPIES) == [
        *("0.0INPUT_STORE0", "0.0INPUT_STORE1"),
        *("1.0INPUT_STORE0", "1.0INPUT_FETCH0", "1.0INPUT_STORE1", "1.0INPUT_FETCH1"),
        *("0.0INPUT_FETCH0", "0.0INPUT_FETCH1"),
    ]
    assert host_regions(program.pipeline(), program.ranks[0]).count == 4


def test_regions_of_the_host_are_taken_again_by_the_next_microbatch() -> None:
    program = one_rank(4, microbatches=3)
    ops, shape = program.ranks[0], program.pipeline()
    regions = host_regions(shape, ops)
    assert regions.count == 3
    assert {regions.of[InputKey(0, layer, m)] for m in range(3) for layer in range(3)} == {0, 1, 2}
    before = regions.before[InputKey(0, 0, 1)]
    assert before is not None
    store, fetch = (
        next(at for at, op in enumerate(ops) if op.kind is kind and InputKey.of(op) == key)
        for kind, key in ((kinds.INPUT_STORE, InputKey(0, 0, 1)), (kinds.INPUT_FETCH, before))
    )
    assert fetch in buffer_sources(shape, ops)[store], "the host's copy is read until the fetch has ended"
    rings = ring_buffers(ops, 2)
    assert [rings[InputKey(0, layer, 0)] for layer in (2, 1, 0)] == [0, 1, 0]


@pytest.mark.parametrize(
    ("reader", "read"),
    [
        (kinds.ATTN_R, kinds.INPUT_FETCH),  # used before it came
        (kinds.INPUT_FETCH, kinds.INPUT_STORE),  # fetched before it lies there
        (kinds.INPUT_FETCH, kinds.ATTN_W),  # over what is still read
        (kinds.INPUT_STORE, kinds.ATTN_F),  # stored before it is there
        (kinds.ATTN_F, kinds.INPUT_STORE),  # more wait for their way out than there is room for
    ],
    ids=str,
)
def test_what_is_used_before_it_came_or_overwritten_while_it_is_read_is_refused(
    reader: Kind, read: Kind
) -> None:
    for program in (one_rank(5), one_rank(4, microbatches=2, by_layers=True)):
        ops = list(program.ranks[0])
        gone = {at for at, op in enumerate(ops) if op.kind is read}
        careless = [
            op._replace(deps=tuple(dep for dep in op.deps if dep not in gone)) if op.kind is reader else op
            for op in ops
        ]
        assert careless != ops
        with pytest.raises(
            ScheduleError, match=rf"{reader}\d on rank 0 reads \d\.\d{read}\d, which may still run"
        ):
            verify(with_rank(program, 0, careless))


@pytest.mark.parametrize("kind", COPIES, ids=str)
def test_a_copy_that_is_left_out_is_missed(kind: Kind) -> None:
    program = one_rank(3)
    ops = list(program.ranks[0])
    at = next(at for at, op in enumerate(ops) if op.kind is kind)
    with pytest.raises(ScheduleError, match=f"rank 0 lacks 0.[01]{kind}0"):
        verify(with_rank(program, 0, without(ops, at)))


def seconds(copy_s: float, layers: int = 8, slots: int = 2) -> tuple[float, float, float]:
    """(step, copies, of these hidden) where all that computes takes a second."""
    program = one_rank(layers, slots=slots)

    def takes(op: Op) -> float:
        return copy_s if op.kind in COPIES else float(op.lane == kinds.COMPUTE)

    durations = [[takes(op) for op in ops] for ops in program.ranks]
    found = summarise(simulate(verify(program), Costs(name="made", seconds={}), durations))
    copies = [found.kinds[kind] for kind in COPIES]
    return found.makespan, sum(one.total for one in copies), sum(one.hidden for one in copies)


def test_copies_are_hidden_while_they_take_less_than_a_layer() -> None:
    at_rest, _, _ = seconds(0.0)
    step, total, hidden = seconds(1.0)
    assert total == hidden == 14.0
    assert step == at_rest
    slow, total, hidden = seconds(10.0)
    assert slow > at_rest + 30
    assert hidden < 0.8 * total


def test_memory_holds_inputs_of_the_ring_alone() -> None:
    assert verify(one_rank(9)).peak == (3.0,)  # two in the ring beside the one of the last layer
    program = one_rank(9)
    kept = [[replace(layer, host_bytes=0.0) for layer in program.pipeline().layers[0]]]
    actions = build("1f1b", 1, 1, 1)
    resident = expand(actions, kept, Expansion(overlap="off"), step=StepShape(input_slots=2))
    assert verify(resident).peak == (9.0,)
    assert not [op for op in resident.ranks[0] if op.kind.part is Part.INPUT]
