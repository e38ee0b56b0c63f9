"""A ledger of one rank, told of launches by hand."""

from __future__ import annotations

import pytest
import torch

from moeclipse.comm.async_ops.ledger import Ledger
from moeclipse.comm.async_ops.record import Recorder
from moeclipse.comm.group import Group
from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.launch import BucketShape, HostedLaunch, StepShape
from moeclipse.schedule.op import Program
from moeclipse.schedule.shape import LayerShape
from moeclipse.schedule.templates import Expansion, expand

AXES = ("world", "stage", "experts", "tensor", "dense_grads")
WHERE = "layer 0, microbatch 0"
SLICES = {
    kinds.DISPATCH_F: ["rows 0", "rows 1"],
    kinds.MLP_F: ["back 0"],
    kinds.COMBINE_F: ["back 1"],
    kinds.COMBINE_B: ["gradients"],
    kinds.DISPATCH_B: ["gradients back"],
}
STEP = (
    ("tp", "tensor", "sum of queries"),
    ("a2a", "experts", f"exchange of sizes, {WHERE}"),
    ("a2a", "experts", "rows 0"),
    ("a2a", "experts", "rows 1"),
    ("a2a", "experts", "back 0"),
    ("a2a", "experts", "back 1"),
    ("a2a", "experts", "gradients"),
    ("a2a", "experts", "gradients back"),
    ("dp", "dense_grads", "reduction of gradients, bucket first"),
    ("dp", "world", "exchange of step results"),
    ("dp", "stage", "exchange of expert loads"),
    ("dp", "dense_grads", "gather of parameters, bucket first"),
)
"""In an order that a rank might take: lanes are beside each other."""


def program() -> Program:
    launches = (
        HostedLaunch(kinds.TENSOR_F, kinds.ATTN_F, "tensor", "sum of queries"),
        HostedLaunch(kinds.SIZES_F, kinds.ROUTE_F, "experts", "exchange of sizes, layer 0"),
    )
    step = StepShape(dp=1, ep=2, tp=2, buckets=((BucketShape("first", "dense_grads", ((0, 0),)),),))
    return expand(build("1f1b", 1, 1), [LayerShape(launches=launches)], Expansion(overlap="off"), step=step)


def ledger(size: int = 4) -> Ledger:
    ranks = tuple(range(size))
    return Ledger(program(), 0, {axis: Group(name=axis, ranks=ranks, index=0) for axis in AXES})


def run(ledger: Ledger, launches: tuple[tuple[str, str, str], ...]) -> None:
    with ledger.step():
        ledger.announce(WHERE, SLICES)
        for launch in launches:
            ledger.launch(*launch)


def test_a_step_twice() -> None:
    mine = ledger()
    for _ in range(2):
        run(mine, STEP)
    assert mine.checked == 2 * len(STEP)
    assert not mine.between


def test_lanes_are_beside_each_other() -> None:
    run(ledger(), tuple(sorted(STEP, key=lambda launch: launch[0])))


@pytest.mark.parametrize("gone", range(len(STEP)))
def test_each_launch_is_missed(gone: int) -> None:
    with pytest.raises(ScheduleError, match=r"the program's next there is|were not launched"):
        run(ledger(), STEP[:gone] + STEP[gone + 1 :])


@pytest.mark.parametrize("at", range(len(STEP) + 1))
def test_one_more_is_refused_wherever_it_stands(at: int) -> None:
    for lane in ("a2a", "tp", "dp", "p2p:0>1"):
        with pytest.raises(ScheduleError, match="'more' is launched on lane"):
            run(ledger(), (*STEP[:at], (lane, "experts", "more"), *STEP[at:]))


@pytest.mark.parametrize("at", range(len(STEP)))
def test_another_group_is_refused(at: int) -> None:
    lane, _, label = STEP[at]
    with pytest.raises(ScheduleError, match="the program's next there is"):
        run(ledger(), (*STEP[:at], (lane, "others", label), *STEP[at + 1 :]))


def test_two_of_one_lane_in_another_order_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"'rows 1' is launched on lane 'a2a', .* next there is rows 0"):
        run(ledger(), (*STEP[:2], STEP[3], STEP[2], *STEP[4:]))


def test_an_exchange_that_was_not_announced_is_no_excuse() -> None:
    mine = ledger()
    mine.announce = lambda where, slices: None  # type: ignore[method-assign]
    with pytest.raises(ScheduleError, match="an exchange of layer 0, microbatch 0, once it is announced"):
        run(mine, STEP)


def test_groups_of_one_rank_launch_nothing() -> None:
    run(ledger(size=1), ())


def test_apart_and_between_steps() -> None:
    mine, recorder = ledger(), Recorder(torch.device("cpu"))
    with recorder.apart("nobody looks"):
        recorder.passes("dp", "world", "before there is a ledger")
    recorder.ledger = mine
    recorder.passes("dp", "world", "a barrier")
    with mine.step():
        mine.announce(WHERE, SLICES)
        with recorder.apart("a probe"):
            recorder.passes("a2a", "experts", "one")
            recorder.passes("a2a", "experts", "two")
        for launch in STEP:
            recorder.launch(*launch)
    assert mine.between == {"a barrier": 1, "a probe": 2}
    assert mine.checked == len(STEP)


def test_an_update_that_is_skipped_and_buckets_that_are_quiet() -> None:
    mine = ledger()
    with mine.step():
        mine.announce(WHERE, SLICES)
        for launch in STEP[:-1]:
            mine.launch(*launch)
        mine.leave_out(kinds.BUCKET_GATHER)
    with mine.step(quiet=[0]):
        mine.announce(WHERE, SLICES)
        for launch in (*STEP[:8], *STEP[9:-1]):
            mine.launch(*launch)


def test_what_a_call_does_without_is_next_and_is_not_launched() -> None:
    mine = ledger()
    mine.pass_over(*STEP[1])
    with mine.step(), mine.apart("probes"):
        mine.pass_over(*STEP[1])
        mine.leave_out(*(op.kind for op in mine._listed))
    assert not mine.between, "outside of steps nobody waits for it"
    with mine.step():
        mine.announce(WHERE, SLICES)
        for launch in STEP:
            (mine.pass_over if launch == STEP[1] else mine.launch)(*launch)
    assert mine.checked == len(STEP) - 1
    with pytest.raises(ScheduleError, match="the program's next there is"), mine.step():
        mine.pass_over(*STEP[2])


def test_what_raises_inside_is_what_is_told() -> None:
    with pytest.raises(ZeroDivisionError), ledger().step():
        raise ZeroDivisionError


def with_region(launches: tuple[tuple[str, str, str], ...]) -> Ledger:
    """A step that is captured, and two more that are replayed as one."""
    mine, recorder = ledger(), Recorder(torch.device("cpu"))
    recorder.ledger = mine
    with recorder.apart("capture"), recorder.region() as region:
        for launch in launches:
            recorder.launch(*launch)
    for _ in range(2):
        with mine.step():
            mine.announce(WHERE, SLICES)
            recorder.replay(region)
    return mine


def test_a_captured_region_is_checked_by_what_it_lists() -> None:
    mine = with_region(STEP)
    assert mine.checked == 2 * len(STEP)
    assert mine.between == {"capture": len(STEP)}


@pytest.mark.parametrize("at", range(len(STEP)))
def test_a_region_that_lists_less_or_more_is_refused(at: int) -> None:
    for launches in (STEP[:at] + STEP[at + 1 :], (*STEP[:at], ("a2a", "experts", "more"), *STEP[at:])):
        with pytest.raises(ScheduleError):
            with_region(launches)
