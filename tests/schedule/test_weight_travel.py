"""Weights of experts that lie on the host: where their copies stand, and what proves them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from edits import with_rank, without

from moeclipse.core.errors import ScheduleError
from moeclipse.cost.model import Costs
from moeclipse.schedule import kinds
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.kinds import Kind
from moeclipse.schedule.launch import BucketShape, StepShape
from moeclipse.schedule.op import Op, Program
from moeclipse.schedule.shape import LayerShape
from moeclipse.schedule.templates import Expansion, expand
from moeclipse.schedule.weight_travel import travelling_layers, visits
from moeclipse.schedule.whole_step import numbered
from moeclipse.sim.engine import simulate
from moeclipse.sim.measure import summarise

COPIES = kinds.WEIGHT_COPIES


def one_rank(
    layers: int,
    *,
    microbatches: int = 1,
    slots: int = 2,
    by_layers: bool = False,
    trained: bool = False,
    dense: int = 0,
    first_backward: int = 0,
    state: float = 0.0,
    ep: int = 1,
) -> Program:
    """Of a run without a pipeline, or layer by layer; `dense` layers below have no experts."""
    shapes = [
        LayerShape(
            moe=at >= dense,
            recompute="full",
            shared=False,
            head=at == layers - 1,
            weight_bytes=3e6 * (at >= dense),
            stored_bytes=2e6 * (at >= dense) * trained,
        )
        for at in range(layers)
    ]
    buckets = tuple(
        BucketShape(
            f"{at}",
            "dense_grads",
            ((at, 0) if by_layers else (0, at),),
            num_bytes=4e6,
            host_bytes=state,
            layer=f"{at}",
            weights=trained and at >= dense,
        )
        for at in reversed(range(layers))
    )
    step = StepShape(
        ep=ep,
        buckets=(buckets,),
        slots=2,
        by_layer=trained,
        weight_slots=slots,
        first_backward=first_backward,
    )
    actions = build("layers", 1, microbatches, layers) if by_layers else build("1f1b", 1, microbatches, 1)
    given = [[shape] for shape in shapes] if by_layers else [shapes]
    return expand(actions, given, Expansion(overlap="off"), step=step)


def renumbered(program: Program, ops: list[Op]) -> Program:
    """With other ops, numbered as they stand."""
    return with_rank(program, 0, numbered(program.pipeline(), 0, ops, {}))


def listed(program: Program, *wanted: Kind) -> list[str]:
    return [str(op) for op in program.ranks[0] if op.kind in wanted]


ALL = [
    {"layers": layers, "slots": slots, **how}
    for layers, slots in ((3, 1), (3, 2), (7, 3))
    for how in (
        {},
        {"microbatches": 3},
        {"microbatches": 3, "by_layers": True},
        {"trained": True},
        {"trained": True, "microbatches": 2, "state": 8e6},
        {"trained": True, "microbatches": 2, "by_layers": True, "state": 8e6},
        {"first_backward": 2},
    )
] + [{"layers": 5, "dense": 2, "trained": True}]


@pytest.mark.parametrize("how", ALL, ids=str)
def test_every_way_is_proved_and_written_as_text(how: dict[str, int]) -> None:
    program = one_rank(**how)  # type: ignore[arg-type]
    verify(program)
    assert listed(program, *COPIES)


def test_weights_come_for_forward_and_for_backward_where_a_buffer_is_free() -> None:
    found = listed(one_rank(4), *COPIES, kinds.MLP_F, kinds.MLP_B)
    assert found == [
        *("0.0MLP_F0", "0.2WEIGHTS_FETCH@0", "0.1MLP_F0", "0.3WEIGHTS_FETCH@0", "0.2MLP_F0", "0.3MLP_F0"),
        *("0.3MLP_B0", "0.1WEIGHTS_FETCH@0", "0.2MLP_B0", "0.0WEIGHTS_FETCH@0", "0.1MLP_B0", "0.0MLP_B0"),
    ], "the last two of forward are there for backward, the last two of backward for the next step"


def test_what_an_update_writes_leaves_before_its_buffer_is_taken() -> None:
    found = listed(one_rank(4, trained=True), *COPIES, kinds.BUCKET_UPDATE)
    assert found[2:] == [
        *("0BUCKET_UPDATE@0", "0.3WEIGHTS_STORE@0", "0.1WEIGHTS_FETCH@0"),
        *("0BUCKET_UPDATE@1", "0.2WEIGHTS_STORE@0", "0.0WEIGHTS_FETCH@0"),
        *("0BUCKET_UPDATE@2", "0.1WEIGHTS_STORE@0", "0BUCKET_UPDATE@3", "0.0WEIGHTS_STORE@0"),
    ]


def test_layer_by_layer_weights_travel_once_each_way_whatever_the_number_of_microbatches() -> None:
    for microbatches in (1, 2, 5):
        program = one_rank(6, microbatches=microbatches, by_layers=True, trained=True)
        assert len(listed(program, kinds.WEIGHTS_FETCH)) == 2 * (6 - 2)
        assert len(listed(program, kinds.WEIGHTS_STORE)) == 6
    for microbatches in (1, 2, 5):
        program = one_rank(6, microbatches=microbatches)
        assert len(listed(program, kinds.WEIGHTS_FETCH)) == microbatches * 2 * (6 - 2)
        assert not listed(program, kinds.WEIGHTS_STORE), "nothing is trained"


def test_below_what_is_trained_weights_come_for_forward_alone() -> None:
    found = listed(one_rank(6, first_backward=4), *COPIES, kinds.MLP_B)
    assert found[4:] == [
        *("0.5MLP_B0", "0.1WEIGHTS_FETCH@0", "0.4MLP_B0", "0.0WEIGHTS_FETCH@0"),
        *("0.3MLP_B0", "0.2MLP_B0", "0.1MLP_B0", "0.0MLP_B0"),
    ], "the next step begins with the first two"


def test_layers_without_experts_have_nothing_to_move() -> None:
    program = one_rank(5, dense=2)
    assert travelling_layers(program.pipeline()) == [(0, 2), (0, 3), (0, 4)]
    assert listed(program, *COPIES) == ["0.4WEIGHTS_FETCH@0", "0.2WEIGHTS_FETCH@0"]
    assert [
        [visit.number for visit in buffer] for buffer in visits(program.pipeline(), program.ranks[0])
    ] == [
        [0, 2, 0],
        [1],
    ]


@pytest.mark.parametrize(
    ("reader", "read"),
    [
        (kinds.MLP_F, kinds.WEIGHTS_FETCH),  # read before they came
        (kinds.MLP_R, kinds.WEIGHTS_FETCH),
        (kinds.WEIGHTS_FETCH, kinds.MLP_F),  # over what is still read
        (kinds.WEIGHTS_FETCH, kinds.WEIGHTS_STORE),  # over what has not left, and of what is old
        (kinds.WEIGHTS_STORE, kinds.BUCKET_UPDATE),  # stored before it is written
    ],
    ids=str,
)
def test_what_is_read_before_it_came_or_overwritten_while_it_is_read_is_refused(
    reader: Kind, read: Kind
) -> None:
    for program in (
        one_rank(5, trained=True),
        one_rank(4, microbatches=2, by_layers=True, trained=True),
    ):
        ops = list(program.ranks[0])
        gone = {at for at, op in enumerate(ops) if op.kind is read}
        careless = [
            op._replace(deps=tuple(dep for dep in op.deps if dep not in gone)) if op.kind is reader else op
            for op in ops
        ]
        assert careless != ops
        with pytest.raises(
            ScheduleError, match=rf"{reader}\S* on rank 0 reads \S*{read}\S*, which may still"
        ):
            verify(with_rank(program, 0, careless))


@pytest.mark.parametrize(
    ("kind", "nth", "words"),
    [
        (kinds.WEIGHTS_FETCH, 0, "needs weights that are not there"),
        (kinds.WEIGHTS_FETCH, -1, "needs weights that are not there"),
        (kinds.WEIGHTS_STORE, 0, "overwrites what 0BUCKET_UPDATE@0 wrote"),
        (kinds.WEIGHTS_STORE, -1, "the host has old weights of"),
    ],
)
def test_a_copy_that_is_left_out_is_missed(kind: Kind, nth: int, words: str) -> None:
    program = one_rank(5, trained=True)
    ops = list(program.ranks[0])
    at = [at for at, op in enumerate(ops) if op.kind is kind][nth]
    with pytest.raises(ScheduleError, match=words):
        verify(renumbered(program, without(ops, at)))


def test_a_step_ends_with_what_the_next_begins_with() -> None:
    program = one_rank(4, first_backward=4)
    ops = list(program.ranks[0])
    at = [at for at, op in enumerate(ops) if op.kind is kinds.WEIGHTS_FETCH][-1]
    with pytest.raises(ScheduleError, match="where the next begins with those of"):
        verify(renumbered(program, without(ops, at)))


def test_copies_of_nothing_are_refused() -> None:
    program = one_rank(4, trained=True)
    for kind, words in (
        (kinds.WEIGHTS_FETCH, "fetches weights that are there already"),
        (kinds.WEIGHTS_STORE, "stores weights that nobody wrote"),
    ):
        ops = list(program.ranks[0])
        at = [at for at, op in enumerate(ops) if op.kind is kind][-1]
        op = ops[at]
        twice = [*ops[: at + 1], op._replace(step=(op.step or 0) + 1), *ops[at + 1 :]]
        with pytest.raises(ScheduleError, match=words):
            verify(renumbered(program, twice))
        with pytest.raises(ScheduleError, match="is no move of weights that this list has"):
            verify(with_rank(program, 0, [*ops[:at], op._replace(step=7), *ops[at + 1 :]]))
    plain = replace(program.pipeline(), layers=one_rank(4).pipeline().layers)
    still = tuple(tuple(replace(layer, weight_bytes=0.0) for layer in stage) for stage in plain.layers)
    with pytest.raises(ScheduleError, match="moves weights that do not travel"):
        verify(replace(program, shape=replace(plain, layers=still)))


def test_several_ranks_are_refused() -> None:
    with pytest.raises(ScheduleError, match="weights on the host need one rank, not 2"):
        one_rank(4, ep=2)


def seconds(copy_s: float, **how: int) -> tuple[float, float, float]:
    """(step, copies, of these hidden) where all that computes takes a second."""
    program = one_rank(8, **how)  # type: ignore[arg-type]

    def takes(op: Op) -> float:
        return copy_s if op.kind in COPIES else float(op.lane == kinds.COMPUTE)

    durations = [[takes(op) for op in ops] for ops in program.ranks]
    found = summarise(simulate(verify(program), Costs(name="made", seconds={}), durations))
    copies = [found.kinds[kind] for kind in COPIES if kind in found.kinds]
    return found.makespan, sum(one.total for one in copies), sum(one.hidden for one in copies)


def test_copies_are_hidden_while_they_take_less_than_a_layer() -> None:
    at_rest, _, _ = seconds(0.0)
    step, total, hidden = seconds(3.0)  # as forward of a layer
    assert total == hidden == 36.0
    assert step == at_rest
    slow, total, hidden = seconds(40.0)
    assert slow > at_rest + 100
    assert hidden < 0.8 * total
    assert seconds(40.0, slots=4)[0] < slow, "more buffers move fewer layers"
