"""The graph of whole actions: transfers that nobody wrote down, and cycles in words."""

from __future__ import annotations

import pytest
from edits import swapped, with_rank

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.action_graph import action_graph, tabulate
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.kinds import Form, Part
from moeclipse.schedule.legal import SCHEDULES, broken_rules, default_stages_per_rank
from moeclipse.schedule.lower import lower
from moeclipse.schedule.op import (
    Op,
    backward,
    forward,
    input_grad,
    pipeline_program,
    weight_grad,
)
from moeclipse.schedule.shape import StagePlacement


@pytest.mark.parametrize(
    ("name", "rank", "first", "second"),
    [
        ("zb-v", 2, "2F0", "3F0"),  # neighbours on the rank of the fold, forward
        ("zb-v", 2, "3I0", "2I0"),  # and backward
        ("dualpipev", 2, "3B1", "2B1"),
        ("zb-v", 0, "0I1", "0W1"),  # dX before its dW
        ("zb-h1", 1, "1I0", "1W0"),
        ("zb-v", 1, "1F0", "1I0"),
    ],
)
def test_swapping_what_one_rank_makes_and_reads_is_caught(
    name: str, rank: int, first: str, second: str
) -> None:
    program = build(name, 3, 6)
    ops = list(program.ranks[rank])

    def find(text: str) -> int:
        return next(i for i, op in enumerate(ops) if text in map(str, op.leaves))

    i, j = find(first), find(second)
    assert i < j
    if ops[i].kind is kinds.PAIR or ops[j].kind is kinds.PAIR:
        ops = [leaf for op in ops for leaf in op.leaves]
        i, j = find(first), find(second)
    with pytest.raises(ScheduleError, match="circle") as caught:
        verify(with_rank(program, rank, swapped(ops, i, j)))
    assert first in str(caught.value)


def test_a_cycle_is_told_op_by_op() -> None:
    """Rank 0 wants the gradient of microbatch 1 before it has sent microbatch 1."""
    ranks = [
        [forward(0, 0), backward(0, 1), forward(0, 1), backward(0, 0)],
        [forward(1, 0), backward(1, 0), forward(1, 1), backward(1, 1)],
    ]
    with pytest.raises(ScheduleError) as caught:
        verify(pipeline_program("bad", ranks, StagePlacement.loop(2), 2))
    assert "0B1 on rank 0 needs" in str(caught.value)
    assert "0F1 on rank 0 waits on its lane for 0B1 on rank 0" in str(caught.value)


def test_crossed_microbatches_between_ranks_are_caught() -> None:
    ranks = [[forward(0, 0), forward(0, 1), backward(0, 0), backward(0, 1)]]
    ranks += [[forward(1, 0), backward(1, 0), backward(1, 1), forward(1, 1)]]
    with pytest.raises(ScheduleError, match="circle"):
        verify(pipeline_program("crossed", ranks, StagePlacement.loop(2), 2))


@pytest.mark.parametrize("name", SCHEDULES)
def test_implied_transfers_are_those_that_lowering_writes(name: str) -> None:
    """The same messages on the same wires in the same order."""
    P, V = (1 if name in ("pp1", "layers") else 4), default_stages_per_rank(name)
    assert not broken_rules(name, P, 8, V)
    program = build(name, P, 8, V)
    transfers = action_graph(program, tabulate(program)).transfers
    assert transfers is not None
    implied: dict[str, list[tuple[int, int, bool]]] = {}
    ends = zip(transfers.source, transfers.destination, strict=True)
    messages = zip(transfers.stage, transfers.microbatch, transfers.is_forward, strict=True)
    for (source, target), (stage, microbatch, is_forward) in zip(ends, messages, strict=True):
        implied.setdefault(f"{source}>{target}", []).append((int(stage), int(microbatch), bool(is_forward)))
    written: dict[str, list[tuple[int, int, bool]]] = {}
    for ops in lower(program).ranks:
        for op in ops:
            if op.kind.part is Part.SEND:
                assert op.comm is not None
                message = (op.stage, op.microbatch, op.kind.form is Form.F)
                written.setdefault(op.comm[0], []).append(message)  # type: ignore[arg-type]
    assert implied == written


def test_a_table_of_actions() -> None:
    """Stage 0, microbatch 1 is cell 1 of two microbatches; B makes both gradients, I and W one each."""
    ranks = [[forward(0, 0), forward(0, 1), backward(0, 0), input_grad(0, 1), weight_grad(0, 1)]]
    table = tabulate(pipeline_program("by hand", ranks, StagePlacement.loop(1), 2))
    assert table.forward_at.tolist() == [0, 1]
    assert table.input_grad_at.tolist() == [2, 3]
    assert table.weight_grad_at.tolist() == [2, 4]
    assert [column.tolist() for column in table.of_kind(kinds.B, kinds.W)] == [[0, 1], [2, 4]]
    assert table.begin.tolist() == [0, 5]


def test_what_is_no_action_is_refused() -> None:
    program = build("1f1b", 2, 2)
    nowhere = (Op(kind=kinds.F, microbatch=0), Op(kind=kinds.F, stage=0))
    for bad in (Op(kind=kinds.MLP_F, stage=0, microbatch=0), *nowhere):
        with pytest.raises(ScheduleError, match="is no action; expected F, B, I or W"):
            tabulate(with_rank(program, 0, [bad]))
    for bad in (forward(2, 0), forward(0, 2)):
        with pytest.raises(ScheduleError, match=r"lies outside stages 0..1 and microbatches 0..1"):
            tabulate(with_rank(program, 0, [bad]))
