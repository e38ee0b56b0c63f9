"""A rank that is killed, or stands still, over NCCL: the others end after the deadline with the cause.

Not under MPS: a client that ends with work on the device leaves its server, and all others, in no known
state.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_nccl import HAS_NCCL

from fault_bed import FREEZE, KILL, POINTS, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.nccl,
    pytest.mark.skipif(not HAS_NCCL, reason="needs a CUDA device and NCCL"),
]

DEADLINE_S = 5
SMALL = ("--preset", "tiny", "--run.device", "cuda", "--parallel.backend", "nccl", "--ranks", "2")
SMALL += ("--run.steps", "8", "--parallel.deadline-s", str(DEADLINE_S), "--checkpoint.every", "1")


@pytest.mark.parametrize("point", POINTS)
def test_a_frozen_rank_is_named(tmp_path: Path, point: str) -> None:
    words, when = POINTS[point]
    found = train(tmp_path, *SMALL, *words, fault=f"1 {FREEZE} {when}")
    assert found.code == 1, found.err
    last = found.err.strip().splitlines()[-1]
    assert last.startswith(f"error: rank 0 waited {DEADLINE_S} s in "), found.err
    assert last.endswith(": rank 1 did not arrive"), found.err
    (incident,) = found.incidents
    assert incident["time"] - found.fault_at < DEADLINE_S + 5
    assert (incident["kind"], incident["rank"], incident["what"] in last) == ("deadline", 0, True)
    assert {file.name for file in (found.run / "ops").iterdir()} == {"rank-0.txt", "rank-1.txt"}


@pytest.mark.parametrize("point", ["forward", "pair", "migration"])
def test_a_killed_rank_is_named_and_the_run_resumes(tmp_path: Path, point: str) -> None:
    words, when = POINTS[point]
    found = train(tmp_path, *SMALL, *words, "--restarts", "1", fault=f"1 {KILL} {when}")
    assert found.code == 0, found.err
    assert "restart 1 of 1" in found.err
    assert len(found.incidents) == 1
    assert "Producer process has been terminated" not in found.err
    assert len(found.losses) == 8
