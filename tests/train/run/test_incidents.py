"""What is kept of an incident."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from moeclipse.comm.failure import Watch
from moeclipse.comm.watch.culprits import Stand
from moeclipse.comm.watch.op_log import OpLog
from moeclipse.core.errors import CommError
from moeclipse.train.run.incidents import Incidents, kept_by_launcher, place_of, step_of


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    """Folders of two ranks, as an agent makes them."""
    for rank in (0, 1):
        (tmp_path / "attempt" / str(rank)).mkdir(parents=True)
    return tmp_path / "attempt"


def watches(ranks: Path) -> list[Watch]:
    store = dist.HashStore()
    logs = [OpLog(ranks / str(rank) / "ops.txt", rank=rank) for rank in (0, 1)]
    return [Watch(store=store, rank=rank, num_ranks=2, deadline_s=5.0, log=logs[rank]) for rank in (0, 1)]


def leave(error: CommError) -> None:
    raise AssertionError("not stuck")


def begun(watch: Watch, run: Path) -> Incidents:
    incidents = Incidents(watch, leave)
    incidents.begin(run)
    return incidents


def test_a_stuck_rank_keeps_its_ops_and_is_ended(ranks: Path, tmp_path: Path) -> None:
    first, second = watches(ranks)
    second.publish("the disk is full")
    ended: list[str] = []
    incidents = Incidents(first, lambda error: ended.append(str(error)))
    incidents.begin(tmp_path)
    incidents.end(CommError("rank 1 failed: the disk is full"))
    assert ended == ["rank 1 failed: the disk is full"]
    assert (tmp_path / "ops" / "rank-0.txt").exists()


def read(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "incidents.jsonl").read_text().splitlines()]


def test_the_rank_that_judged_keeps_the_record_and_the_ops_of_all(
    ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    first, second = watches(ranks)
    second.log.launch("a2a", "combine of rows, layer 2")  # and froze
    label = "dispatch of rows, layer 3, microbatch 1"
    first.log.launch("a2a", label, (0, 1))
    mine = Stand(waits=True, op=label, lane="a2a", since_s=5.0, ranks=(0, 1))
    error = first.verdict("rank 0 waited 5 s: rank 1 did not arrive", mine, {0: mine})
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(ranks / "0" / "error.json"))
    keeper = begun(first, run)
    keeper.keep(str(error))
    keeper.keep("and again on the way out")
    (record,) = read(run)
    assert (record["kind"], record["rank"], record["what"]) == ("deadline", 0, str(error))
    assert (record["op"], record["lane"], record["layer"], record["microbatch"]) == (label, "a2a", 3, 1)
    assert record["waited_s"] == 5.0
    assert list(record["stands"]) == ["0"]  # type: ignore[call-overload]
    assert label in (run / "ops" / "rank-0.txt").read_text()
    assert "combine of rows, layer 2" in (run / "ops" / "rank-1.txt").read_text()


def test_a_victim_keeps_its_ops_and_no_record(ranks: Path, tmp_path: Path) -> None:
    first, second = watches(ranks)
    first.publish("the disk is full")
    second.publish("rank 1 lost rank 0")
    begun(second, tmp_path).keep("rank 1 lost rank 0")
    assert not (tmp_path / "incidents.jsonl").exists()
    assert (tmp_path / "ops" / "rank-1.txt").exists()
    begun(first, tmp_path).keep("the disk is full")
    assert [(record["kind"], record["what"]) for record in read(tmp_path)] == [("error", "the disk is full")]


def test_the_launcher_keeps_what_no_rank_could(
    ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    kept_by_launcher(ranks, 1, "rank 1 was killed")
    assert not (run / "incidents.jsonl").exists(), "nobody said where the run lives"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(ranks / "0" / "error.json"))
    begun(watches(ranks)[0], run)
    watches(ranks)[1].log.launch("a2a", "rows")
    kept_by_launcher(ranks, 1, "rank 1 was killed by SIGKILL")
    assert read(run)[0]["what"] == "rank 1 was killed by SIGKILL"
    assert "a2a: rows" in (run / "ops" / "rank-1.txt").read_text()


def test_the_launcher_knows_better_than_who_lost_a_peer(
    ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(ranks / "0" / "error.json"))
    run = tmp_path / "run"
    run.mkdir()
    earlier = {"time": 5.0, "attempt": 0, "kind": "error", "rank": 1, "what": "an earlier run"}
    (run / "incidents.jsonl").write_text(json.dumps(earlier) + "\n")
    begun(watches(ranks)[0], run).keep("rank 0 lost rank 1")
    kept_by_launcher(ranks, 1, "rank 1 was killed by SIGKILL")
    assert read(run)[0] == earlier
    (record,) = read(run)[1:]
    assert (record["rank"], record["what"]) == (1, "rank 1 was killed by SIGKILL")
    assert record["noticed"] == ["rank 0 lost rank 1"]


def test_a_record_of_the_moment_in_which_an_attempt_begins_is_its_own(ranks: Path, tmp_path: Path) -> None:
    record = {"time": 1000.0, "attempt": 0, "kind": "error", "rank": 0, "what": "rank 0 lost rank 1"}
    (tmp_path / "incidents.jsonl").write_text(json.dumps(record) + "\n")
    (ranks / "0" / "run").write_text(str(tmp_path))
    os.utime(ranks / "0" / "run", (1000.0004, 1000.0004))
    kept_by_launcher(ranks, 1, "rank 1 was killed by SIGKILL")
    assert [found["noticed"] for found in read(tmp_path)] == [["rank 0 lost rank 1"]]


DAMAGED = b'{"time": 9e99, "kind": "error", "wha'


@pytest.mark.parametrize(
    "there",
    [
        DAMAGED,
        DAMAGED + b"\n",
        b"[1]\n7\nnull\n{}\n",
        b"\xff\xfe\0\n",
        b"[" * 100_000 + b"\n",
        b'{"kind": "error", "time": "late"}\n',
        b'{"kind": "error", "time": ' + b"9" * 5000 + b"}\n",
    ],
)
def test_no_restart_hangs_on_what_stands_in_the_log(
    ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bytes
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(ranks / "0" / "error.json"))
    run = tmp_path / "run"
    run.mkdir()
    (run / "incidents.jsonl").write_bytes(there)
    begun(watches(ranks)[0], run).keep("rank 0 lost rank 1")
    kept_by_launcher(ranks, 1, "rank 1 was killed by SIGKILL")
    text = (run / "incidents.jsonl").read_bytes()
    assert text.count(b"\n") == there.rstrip(b"\n").count(b"\n") + 2
    record = json.loads(text.splitlines()[-1])
    assert (record["rank"], record["noticed"]) == (1, ["rank 0 lost rank 1"])
    assert ("damaged_lines" in record) == (not there.startswith(b'{"kind": "error", "time": "late"'))


def test_a_line_that_no_run_has_written_is_not_held(
    ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(ranks / "0" / "error.json"))
    long = b'{"kind": "error", "time": 9e99, "what": "' + b"x" * (17 << 20) + b'"}\n'
    (tmp_path / "incidents.jsonl").write_bytes(long)
    begun(watches(ranks)[0], tmp_path)
    kept_by_launcher(ranks, 1, "rank 1 was killed by SIGKILL")
    with (tmp_path / "incidents.jsonl").open("rb") as file:
        file.seek(len(long))
        record = json.loads(file.read())
    assert (record["damaged_lines"], "noticed" in record) == ([1], False)


def test_a_log_that_cannot_be_written_holds_nobody_up(
    ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(ranks / "0" / "error.json"))
    begun(watches(ranks)[0], tmp_path)
    (ranks / "1" / "ops.txt").unlink()
    os.mkfifo(ranks / "1" / "ops.txt")
    os.mkfifo(tmp_path / "incidents.jsonl")
    kept_by_launcher(ranks, 1, "rank 1 was killed")
    (ranks / "0" / "run").write_bytes(b"\xff\0")
    kept_by_launcher(ranks, 1, "rank 1 was killed")
    assert step_of(ranks) is None or step_of(ranks) == 0


def test_a_log_from_which_nothing_can_be_taken_back_gets_the_record_all_the_same(
    ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(ranks / "0" / "error.json"))
    begun(watches(ranks)[0], tmp_path).keep("rank 0 lost rank 1")
    (tmp_path / ".incidents.jsonl.tmp").mkdir()  # in the way of the file that would take its place
    kept_by_launcher(ranks, 1, "rank 1 was killed by SIGKILL")
    assert [record["what"] for record in read(tmp_path)][1:] == ["rank 1 was killed by SIGKILL"]


def test_nothing_is_kept_where_there_is_no_run(ranks: Path, tmp_path: Path) -> None:
    Incidents(watches(ranks)[0], leave).keep("x")
    begun(watches(ranks)[0], tmp_path / "missing").keep("x")
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize(
    ("label", "place"),
    [
        ("dispatch of rows, layer 3, microbatch 1", {"layer": 3, "microbatch": 1}),
        ("activations SEND_F (stage 1, microbatch 2) on lane p2p", {"stage": 1, "microbatch": 2}),
        ("exchange of control data", {}),
    ],
)
def test_the_place_of_an_op(label: str, place: dict[str, int]) -> None:
    found = place_of({"op": label, "lane": "a2a", "since_s": 2.0})
    assert {name: found[name] for name in ("layer", "microbatch", "stage") if name in found} == place
    assert place_of({}) == {}
