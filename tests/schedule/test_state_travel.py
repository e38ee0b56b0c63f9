"""State that travels between host and device: where its ops stand, what proves them, what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from edits import swapped, with_rank, without
from hypothesis import given
from hypothesis import strategies as st
from whole_steps import SCHEDULES, whole

from moeclipse.core.errors import ScheduleError
from moeclipse.cost.model import Costs
from moeclipse.schedule import kinds
from moeclipse.schedule.check import verify
from moeclipse.schedule.kinds import STATE_COPIES, Kind
from moeclipse.schedule.launch import BucketShape, StepShape
from moeclipse.schedule.op import Program
from moeclipse.schedule.state_travel import (
    fetched_ahead,
    in_the_buffer_before,
    layers_of,
    ring,
    room_of,
    spread,
    updated_before,
    updates,
)
from moeclipse.schedule.templates import replicate
from moeclipse.sim.engine import simulate
from moeclipse.sim.measure import summarise


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    "when", [{}, {"by_layer": True}, {"next_forward": True}], ids=("end", "layer", "next")
)
def test_every_schedule_is_proved_with_state_on_the_host(name: str, when: dict[str, bool]) -> None:
    for slots in (1, 3):
        program = whole(name, slots=slots, **when)
        verify(program)
        verify(replicate(program))


def listed(program: Program) -> list[str]:
    return [str(op) for op in program.ranks[0]]


def test_updates_stand_behind_the_norm_and_state_leaves_when_the_step_begins() -> None:
    found = listed(whole("pp1", slots=1))
    assert found[0] == "0BUCKET_FETCH@0"
    assert found[found.index("0LOADS_GATHER") + 1 :] == [
        *("0BUCKET_UPDATE@0", "0BUCKET_STORE@0", "0BUCKET_FETCH@1", "0BUCKET_UPDATE@1", "0BUCKET_STORE@1"),
        *("0BUCKET_GATHER@0", "0BUCKET_GATHER@1"),
    ]


def test_by_layers_an_update_stands_behind_the_gradients_of_its_layer() -> None:
    found = listed(whole("pp1", slots=2, by_layer=True))
    assert found[:2] == ["0BUCKET_FETCH@0", "0BUCKET_FETCH@1"]
    at = found.index("0BUCKET_REDUCE@0")
    assert found[at : at + 3] == ["0BUCKET_REDUCE@0", "0BUCKET_UPDATE@0", "0BUCKET_STORE@0"]
    assert at < found.index("0.0ATTN_B3")  # the layer below has not begun its last backward


def test_updates_of_the_step_before_stand_in_front_of_their_layers_forward() -> None:
    found = listed(whole("pp1", slots=1, next_forward=True))
    begin, at = found.index("0BUCKET_UPDATE@1"), found.index("0.1ATTN_F0")
    assert found[begin : begin + 3] == ["0BUCKET_UPDATE@1", "0BUCKET_STORE@1", "0BUCKET_FETCH@0"]
    assert begin < found.index("0.0ATTN_F0")
    # Behind the last update the first state of the next step leaves: it travels under backward.
    ahead = ["0BUCKET_UPDATE@0", "0BUCKET_STORE@0", "0BUCKET_FETCH@1"]
    assert [op for op in found[begin + 3 : at] if "BUCKET" in op] == ahead
    assert [op for op in found[at:] if "FETCH" in op or "UPDATE" in op] == []


def test_a_bucket_of_several_layers_is_updated_before_the_first_of_them() -> None:
    assert updated_before([0, 0, 3, 2, 2, 5, 4]) == [0, 0, 2, 2, 2, 4, 4]
    assert updated_before([]) == []


def test_a_layer_that_reads_weights_before_their_update_is_refused() -> None:
    program = whole("pp1", slots=1, next_forward=True)
    ops = list(program.ranks[0])
    update, layer = (
        next(place for place, op in enumerate(ops) if str(op) == name)
        for name in ("0BUCKET_UPDATE@0", "0.1ATTN_F0")
    )
    for place in range(layer, update, -1):
        ops = swapped(ops, place - 1, place)
    with pytest.raises(ScheduleError, match=r"0\.1ATTN_F0 on rank 0 .*BUCKET_UPDATE@0"):
        verify(with_rank(program, 0, ops))


def test_layers_may_have_several_buckets_some_of_which_do_not_travel() -> None:
    made = [("9", 8.0), ("9", 0.0), ("8", 8.0), ("8", 8.0), ("8", 0.0), ("7", 8.0)]
    buckets = [
        BucketShape(str(n), "dense_grads", (), host_bytes=size, layer=layer)
        for n, (layer, size) in enumerate(made)
    ]
    step = StepShape(slots=2)
    assert layers_of([layer for layer, _ in made]) == {1: [0, 1], 4: [2, 3, 4], 5: [5]}
    assert fetched_ahead(buckets, step) == [(kinds.BUCKET_FETCH, 0), (kinds.BUCKET_FETCH, 2)]
    assert [str(kind) + str(number) for kind, number in updates(buckets, step, [0, 1, 2])] == [
        *("BUCKET_UPDATE0", "BUCKET_STORE0", "BUCKET_FETCH3", "BUCKET_UPDATE1"),
        *("BUCKET_UPDATE2", "BUCKET_STORE2", "BUCKET_FETCH5"),
    ]
    assert [in_the_buffer_before(buckets, step, number) for number in (0, 2, 3, 5)] == [None, None, 0, 2]


@given(st.lists(st.integers(1, 9), max_size=30), st.integers(1, 4))
def test_who_takes_a_region_waits_for_all_that_lay_there(sizes: list[int], slots: int) -> None:
    regions = ring(sizes, slots)
    for place, region in enumerate(regions):
        assert region.stop - region.start == sizes[place]
        assert region.stop <= room_of(sizes, slots)
        assert -1 <= region.before < place
        lay_there = [other for other in range(place) if regions[other].overlaps(region)]
        assert all(other <= region.before for other in lay_there), "stores end in their order"
    assert [region.before for region in regions] == sorted(region.before for region in regions)


def test_small_buckets_leave_the_ring_to_large_ones() -> None:
    sizes = [1.0, 16, 1, 16, 1, 16, 1, 16]
    assert room_of(sizes, 2) == 16 + 1 + 16 + 2
    assert [region.before for region in ring(sizes, 2)] == [-1, -1, -1, -1, -1, 1, 1, 3]
    assert room_of(sizes, 4) == sum(sizes)
    assert [region.before for region in ring([8, 8, 8, 8], 2)] == [-1, -1, 0, 1]
    assert ring([], 4) == []


def test_a_share_of_buckets_travels_spread_over_backward_and_the_last_stay() -> None:
    sizes = [(str(number), 2.0 if number % 2 else 4.0) for number in range(20)] + [("norm", 1e-4)]
    whole = sum(size for _, size in sizes)
    assert spread(sizes, 0.0) == []
    assert spread(sizes, 1.0) == [str(number) for number in range(20)]  # but for the small one
    for share in (0.2, 0.5, 0.72, 0.9):
        names = spread(sizes, share)
        taken = sum(size for name, size in sizes if name in names)
        assert abs(taken - share * whole) <= 4.0
        assert names == sorted(names, key=int)
        assert "19" not in names
        early = sum(size for name, size in sizes if name in names and int(name) < 10)
        assert 0.4 < early / taken < 0.75, "not all on one side"


@pytest.mark.parametrize("when", [{}, {"by_layer": True}, {"next_forward": True}], ids=str)
@pytest.mark.parametrize("reader", [kinds.BUCKET_UPDATE, kinds.BUCKET_STORE, kinds.BUCKET_FETCH], ids=str)
def test_what_is_used_before_it_came_or_overwritten_while_it_is_read_is_refused(
    reader: Kind, when: dict[str, bool]
) -> None:
    """An update waits for its state, a store for the update, a fetch for the store of what was there."""
    read = {kinds.BUCKET_UPDATE: kinds.BUCKET_FETCH, kinds.BUCKET_FETCH: kinds.BUCKET_STORE}.get(
        reader, kinds.BUCKET_UPDATE
    )
    program = whole("pp1", slots=1, **when)
    ops = list(program.ranks[0])
    gone = {at for at, op in enumerate(ops) if op.kind is read}
    careless = [
        op._replace(deps=tuple(dep for dep in op.deps if dep not in gone)) if op.kind is reader else op
        for op in ops
    ]
    assert careless != ops
    with pytest.raises(ScheduleError, match=f"{reader}@. on rank 0 reads 0{read}@., which may still run"):
        verify(replace(program, ranks=(tuple(careless),)))


@pytest.mark.parametrize("kind", STATE_COPIES, ids=str)
def test_a_copy_that_is_left_out_is_missed(kind: Kind) -> None:
    program = whole("pp1", slots=2)
    ops = list(program.ranks[0])
    at = next(at for at, op in enumerate(ops) if op.kind is kind)
    with pytest.raises(ScheduleError, match=f"rank 0 lacks 0{kind}"):
        verify(with_rank(program, 0, without(ops, at)))


def seconds(by_layer: bool, copy_s: float, slots: int = 2) -> tuple[float, float, float]:
    """(step, copies, of these hidden) where all that computes takes a second."""
    program = whole("pp1", slots=slots, by_layer=by_layer, copies=(1, 1, 1))
    durations = [
        [copy_s if op.kind in STATE_COPIES else float(op.lane == kinds.COMPUTE) for op in ops]
        for ops in program.ranks
    ]
    found = summarise(simulate(program, Costs(name="made", seconds={}), durations))
    copies = [found.kinds[kind] for kind in STATE_COPIES]
    return found.makespan, sum(one.total for one in copies), sum(one.hidden for one in copies)


def test_copies_by_layers_are_hidden_up_to_the_last_store() -> None:
    at_rest, _, _ = seconds(False, 0.0)
    step, total, hidden = seconds(True, 1.0)
    assert total == 4.0
    assert hidden == 3.0  # the last bucket's way back has nothing to hide behind
    assert step == at_rest + 1.0
    assert seconds(False, 1.0)[0] == at_rest + 1.0  # here both were fetched ahead


def test_a_ring_of_one_buffer_makes_updates_wait() -> None:
    at_rest, _, _ = seconds(False, 0.0)
    assert seconds(False, 1.0, slots=1)[0] == at_rest + 3.0  # store, fetch, and the last store
