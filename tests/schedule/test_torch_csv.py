"""CSV files as torch reads and writes them; in them our orders equal those of the installed torch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.kinds import TRANSFERS
from moeclipse.schedule.legal import broken_rules
from moeclipse.schedule.lower import lower
from moeclipse.schedule.op import overlap_alone
from moeclipse.schedule.shape import LayerShape
from moeclipse.schedule.templates import expand
from moeclipse.schedule.torch_csv import format_csv, parse_csv

CLASSES = {
    "vpp": torch_schedules.ScheduleInterleaved1F1B,
    "zb-v": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}
CONFIGURATIONS = [
    (name, P, M, V)
    for name in CLASSES
    for P in (1, 2, 3, 4, 6, 8)
    for M in (2, 4, 5, 8, 12, 16, 17)
    for V in ((1, 2, 3, 4) if name == "vpp" else (2,))
    if not broken_rules(name, P, M, V) and (name != "vpp" or M % P == 0)  # where groups are torch's rounds
]


def torch_schedule(name: str, P: int, M: int, V: int) -> Any:
    """The order is computed from these few attributes; no process group is needed."""
    stages = [
        SimpleNamespace(
            group_size=P,
            group_rank=0,
            num_stages=P * V,
            stage_index=v * P,
            submod=None,
            is_first=v == 0,
            is_last=False,
            has_backward=True,
        )
        for v in range(V)
    ]
    return CLASSES[name](stages, M)


def test_there_are_enough_configurations() -> None:
    assert len(CONFIGURATIONS) >= 80
    assert {name for name, *_ in CONFIGURATIONS} == set(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_orders_equal_those_of_torch(name: str) -> None:
    for _, P, M, V in (c for c in CONFIGURATIONS if c[0] == name):
        theirs = torch_schedule(name, P, M, V).pipeline_order
        expected = {rank: [str(a) for a in actions if a is not None] for rank, actions in theirs.items()}
        ours = parse_csv_rows(format_csv(build(name, P, M, V)))
        assert ours == expected, (name, P, M, V)


def parse_csv_rows(text: str) -> dict[int, list[str]]:
    return {rank: row.split(",") for rank, row in enumerate(text.splitlines())}


@pytest.mark.parametrize(("name", "P", "M", "V"), [("dualpipev", 4, 7, 2), ("zb-v", 2, 4, 3)])
def test_what_torch_refuses_is_refused(name: str, P: int, M: int, V: int) -> None:
    with pytest.raises((ValueError, AssertionError)):
        torch_schedule(name, P, M, V)
    with pytest.raises(ScheduleError):
        build(name, P, M, V)


@pytest.mark.parametrize(
    ("name", "P", "M", "V"), [("vpp", 4, 8, 2), ("zb-v", 3, 7, 2), ("dualpipev", 4, 10, 2)]
)
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_files_that_torch_writes_are_read_and_verified(
    name: str, P: int, M: int, V: int, form: str, tmp_path: Path
) -> None:
    path = tmp_path / "order.csv"
    torch_schedule(name, P, M, V)._dump_csv(path, format=form)
    program = parse_csv(path.read_text(), name)
    ours = build(name, P, M, V)
    assert program.pipeline().placement == ours.pipeline().placement
    verify(program)
    if form == "compute_only":
        assert program == ours
    else:
        found = {op.kind for ops in program.ranks for op in ops}
        assert set(TRANSFERS) <= found


@pytest.mark.parametrize(("name", "P", "M", "V"), [("vpp", 4, 8, 2), ("dualpipev", 4, 10, 2)])
def test_files_that_we_write_are_read_by_torch(name: str, P: int, M: int, V: int, tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    program = build(name, P, M, V)
    path.write_text(format_csv(program))
    schedule = torch_schedule(name, P, M, V)
    schedule._load_csv(path)
    read = {rank: [str(a) for a in row] for rank, row in schedule.pipeline_order.items()}
    assert read == parse_csv_rows(format_csv(program))


def test_csv_round_trip_with_communication() -> None:
    lowered = lower(build("dualpipev", 4, 8), reduce=True)
    again = parse_csv(format_csv(lowered), lowered.name)
    assert again.ranks == lowered.ranks
    assert again.groups == lowered.groups
    assert again.shape == lowered.shape


def test_csv_refuses_what_it_cannot_say() -> None:
    with pytest.raises(ScheduleError, match="two directions"):
        format_csv(build("dualpipe", 4, 8))
    with pytest.raises(ScheduleError, match="stage 0 appears on ranks 0 and 1"):
        parse_csv("0F0,0B0\n0F1,0B1\n")
    with pytest.raises(ScheduleError, match=r"stages \[1\] appear on no rank"):
        parse_csv("0F0,0B0\n2F0,2B0\n")
    with pytest.raises(ScheduleError, match=r"^csv: cannot read '0X1'"):
        parse_csv("0X1\n")
    with pytest.raises(ScheduleError, match="layer ops; write the CSV before expanding"):
        format_csv(expand(build("1f1b", 2, 2), [LayerShape()]))
    with pytest.raises(ScheduleError, match="must hold two actions"):
        parse_csv("(0F0)OVERLAP_F_B\n")
    with pytest.raises(ScheduleError, match="F0 on rank 0 names no stage"):
        parse_csv("F0\n")
    with pytest.raises(ScheduleError, match="empty: no actions found"):
        parse_csv("\n", "empty")
    with pytest.raises(ScheduleError, match="1SEND_F0 has nobody on the other side: stage 1 is at the end"):
        parse_csv("0F0,0SEND_F0\n1RECV_F0,1F0,1SEND_F0\n")


def test_self_overlap_is_written_as_the_plain_action() -> None:
    program = build("zb-v", 2, 3)
    assert format_csv(overlap_alone(program)) == format_csv(program)


def test_a_rank_may_idle_and_reduce() -> None:
    """Empty cells are slots without work; torch says REDUCE_GRAD, UNSHARD and RESHARD."""
    program = parse_csv("0UNSHARD,0F0,,0B0,0REDUCE_GRAD,0RESHARD\n", "alone")
    assert [str(op) for op in program.ranks[0]] == ["0UNSHARD", "0F0", "0B0", "0REDUCE", "0RESHARD"]
    assert program.pipeline().reduce
    assert [op.comm for op in program.ranks[0] if op.comm] == [("dp0", 0), ("dp0", 1), ("dp0", 2)]
    verify(program)
    assert format_csv(program).strip() == "0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD"
