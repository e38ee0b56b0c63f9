"""The trace holds every op at its time, and the ASCII timeline shows what ran."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from moeclipse.cost.model import DEEPSEEK_V3, UNIT, Costs
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.lower import lower
from moeclipse.schedule.shape import LayerShape
from moeclipse.schedule.smart import exchange_shape, smart
from moeclipse.schedule.templates import Expansion, expand
from moeclipse.sim.engine import simulate
from moeclipse.sim.trace import perfetto, timeline, write_perfetto


@pytest.mark.parametrize("written", [False, True])
def test_perfetto_has_every_op_once(written: bool, tmp_path: Path) -> None:
    program = build("dualpipev", 4, 8)
    result = simulate(lower(program) if written else program, replace(UNIT, wire=0.25))
    path = tmp_path / "trace.json"
    write_perfetto(result, path)
    events = json.loads(path.read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    compute = [e for e in slices if e["cat"] not in ("SEND_F", "SEND_B", "RECV_F", "RECV_B")]
    assert len(compute) == program.num_ops
    assert sorted(e["name"] for e in compute) == sorted(str(op) for ops in program.ranks for op in ops)
    assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(result.makespan * 1e6)
    sends = [e for e in slices if e["cat"].startswith("SEND")]
    assert len(sends) == 2 * 8 * 6  # both directions, 8 microbatches, 7 edges less the local one
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[0, 0] == "compute"
    assert {"p2p:0>1"} <= set(names.values())
    for event in slices:
        assert (event["pid"], event["tid"]) in names
    memory = [e["args"]["held"] for e in events if e["ph"] == "C" and e["pid"] == 0]
    assert max(memory) == 9
    assert memory[-1] == 0


def test_lanes_never_overlap_themselves() -> None:
    program = expand(build("vpp+1", 2, 4), [LayerShape()] * 2, Expansion(chunks=2))
    parts = ("ATTN", "ROUTE", "SHARED", "MLP", "DISPATCH", "COMBINE")
    costs = Costs(seconds={f"{p}_{f}": 1.0 for p in parts for f in "FBW"}, wire=0.5)
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in perfetto(simulate(program, costs))["traceEvents"]:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    for spans in rows.values():
        ordered = sorted(spans)
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(ordered))


def test_timeline_of_whole_actions() -> None:
    text = timeline(simulate(build("1f1b", 2, 2), UNIT), width=9)
    assert text.splitlines()[:2] == ["rank 0 FF..BB.BB", "rank 1 .FBBFBB.."]
    assert "paired" in text
    assert "#" in timeline(simulate(build("pp1", 1, 4), UNIT), width=20).splitlines()[0]


def test_timeline_marks_exposed_communication() -> None:
    program = expand(build("1f1b", 2, 2), [LayerShape(shared=False)], Expansion(overlap="off"))
    text = timeline(simulate(program, DEEPSEEK_V3), width=60)
    assert "!" in text.splitlines()[1]
    paired = expand(build("pp1", 1, 8), [LayerShape(shared=False)] * 2, Expansion(overlap="pair"))
    rows = timeline(simulate(paired, DEEPSEEK_V3), width=60).splitlines()
    assert rows[0].count("#") > 30
    assert rows[1].count("-") > 30


def test_timeline_of_an_exchange_and_of_many_ranks() -> None:
    program = smart(exchange_shape(20, group_size=4))
    durations = [[1.0] * len(ops) for ops in program.ranks]
    text = timeline(simulate(program, Costs(seconds={}), durations), width=40)
    assert "... and 4 more ranks" in text
    assert "C compute" in text
    assert "C" in text.splitlines()[0]


def test_a_trace_has_one_clock_whatever_the_unit_of_its_costs() -> None:
    result = simulate(build("1f1b", 2, 3), UNIT)
    seconds, milliseconds = (
        [e for e in perfetto(result, seconds_per_unit=unit)["traceEvents"] if e["ph"] in "XC"]
        for unit in (1.0, 1e-3)
    )
    for one, other in zip(seconds, milliseconds, strict=True):
        assert other["ts"] == pytest.approx(one["ts"] / 1000)
        assert other.get("dur", 0.0) == pytest.approx(one.get("dur", 0.0) / 1000)
    assert {e["ph"] for e in seconds} == {"X", "C"}
