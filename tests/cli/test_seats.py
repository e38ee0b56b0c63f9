"""Seats that are lost and come back: who is given up, when they are asked, and a run that goes through it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from elastic_bed import ended, losses, records, start, wait_for

from moeclipse.cli import seats as seats_module
from moeclipse.cli.failures import Failure
from moeclipse.cli.seats import DEVICES, ROOM, SEATS, Seats, culprit


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seats_module, "LOOK_S", 0.0)
    for name in (SEATS, ROOM, DEVICES):
        monkeypatch.setenv(name, "")


class Bench:
    """Seats whose answers the test gives."""

    def __init__(self, folder: Path, numbers: list[int], *, cuda: bool = False) -> None:
        self.settled: list[int] = []
        self.asked: list[int] = []
        self.saves = folder / "checkpoints"
        self.saves.mkdir()
        self.seats = Seats(numbers, folder, self.saves, cuda=cuda, settle=self.settled.append)
        self.seats._ask = self._ask  # type: ignore[method-assign]

    def _ask(self, seat: int) -> None:
        self.asked.append(seat)
        self.seats._asking.add(seat)

    def save(self) -> None:
        (self.saves / f"step-{len(list(self.saves.iterdir())):08d}").mkdir()
        self.seats.look()

    def answer(self, seat: int, word: str = "yes") -> None:
        self.seats._answer(seat).write_text(f"{word}\n")
        self.seats.look()
        self.seats._answer(seat).unlink()

    def lose(self, rank: int | None, **how: bool) -> tuple[int, str] | None:
        told = {"began": True, "last": False, "recurs": False} | how
        return self.seats.lose(rank, **told)


def test_a_rank_is_tried_again_before_its_seat_is_given_up(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [2, 3, 4])
    assert bench.lose(1) is None, "a restart is left"
    assert bench.lose(1, began=False) == (1, "it was started again and failed before its first step")
    assert (bench.seats.taken, os.environ[SEATS], bench.settled) == ([0, 2, 3], "0,2,3", [4, 3])
    assert bench.lose(1, began=False) is None, "another seat now, and its first failure"
    assert bench.lose(1, last=True) == (2, "no restart is left")
    assert bench.seats.taken == [0, 3]
    assert bench.lose(0, last=True) is None, "fewer than two were not allowed"


def test_a_fault_that_recurs_or_names_nobody(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [1, 2])
    assert bench.lose(None, last=True) is None
    assert bench.lose(0, recurs=True) == (0, "a restart does not help")
    assert bench.seats.taken == [1]


def test_what_no_layout_fits_stays_idle(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [2, 4])
    bench.lose(3, last=True)
    assert bench.seats.taken == [0, 1]
    assert bench.lose(0, last=True) == (0, "no restart is left")
    assert bench.seats.taken == [1, 2], "the idle one takes its place"


def test_devices_follow_the_seats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICES, "4,5,7")
    bench = Bench(tmp_path, [1, 2, 3], cuda=True)
    bench.lose(1, last=True)
    assert os.environ[DEVICES] == "4,7"


def test_seats_are_asked_after_saves_and_taken_back_together(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [1, 2, 3])
    bench.seats.look()
    bench.lose(2, last=True)
    bench.lose(1, last=True)
    bench.seats.look()
    assert bench.asked == [], "not before something was saved"
    bench.save()
    assert sorted(bench.asked) == [1, 2]
    bench.answer(2)
    assert bench.seats.room.exists(), "ranks leave at the next save"
    bench.answer(1, "no")
    assert bench.seats.take_back() == [2]
    assert (bench.seats.taken, bench.seats.room.exists()) == ([0, 2], False)
    bench.save()
    bench.answer(1)
    assert bench.seats.take_back() == [1]
    assert bench.seats.taken == [0, 1, 2]


def test_a_seat_that_comes_and_goes_is_asked_less_and_less_often(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [1, 2])
    saves = []
    for _ in range(4):
        assert bench.lose(1, began=False, last=not saves) is not None, "at once, where it had just returned"
        count = 0
        while bench.asked.count(1) == len(saves):
            bench.save()
            count += 1
        saves.append(count)
        bench.answer(1)
        bench.seats.take_back()
    assert saves == [1, 2, 4, 8]


def test_a_seat_is_asked_by_a_process_that_is_no_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seats_module.sys, "executable", "true")
    seats = Seats([1, 2], tmp_path, tmp_path, cuda=False, settle=lambda _: None)
    for command, word in (("true", "yes"), ("false", "no")):
        monkeypatch.setattr(seats_module.sys, "executable", command)
        seats._ask(1)
        until = time.monotonic() + 600
        while not seats._answer(1).exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        assert seats._answer(1).read_text() == f"{word}\n"


def test_the_culprit() -> None:
    late, victim = Failure(rank=0, text="", late=True), Failure(rank=1, text="", victim=True)
    assert culprit(Failure(rank=2, text="boom"), [], 3) == 2
    assert culprit(late, [late, victim], 3) == 2, "who left no word"
    assert culprit(late, [late], 3) is None
    assert culprit(late, [late, victim], 2) is None, "all of them wait: it was the network"


@pytest.mark.full
def test_a_run_loses_a_rank_for_good_and_takes_it_back(tmp_path: Path) -> None:
    """Three ranks; seat 1 is lost in step 3, two go on; it returns, and from a save on there are three."""
    words = ("--run.steps", 14, "--checkpoint.every", 2)
    code, _, err = ended(start(tmp_path, "--ranks", 1, *words, "--run.name", "alone"))
    assert code == 0, err
    for name, text in (("kill-1", "3"), ("hold-6", "")):
        (tmp_path / name).write_text(text)
    run = start(tmp_path, "--ranks", "2:3", *words)
    wait_for(
        lambda: records(tmp_path, file="incidents.jsonl")[-1:] != [] and len(records(tmp_path)) >= 5, run
    )
    wait_for(lambda: bool(list(tmp_path.glob("moeclipse-*/room"))), run)
    (tmp_path / "hold-6").unlink()
    code, out, err = ended(run)
    assert code == 0, err
    lost, back = err.splitlines()
    assert lost.startswith("going on with 2 of 3 ranks: rank 1 was killed by SIGKILL")
    assert lost.endswith("; no restart is left")
    assert back == "going on with 3 ranks instead of 2: seat 1 can be taken again"
    shown = [line for line in out.splitlines() if " ranks (dp" in line]
    assert [line.split(" · ")[1][:7] for line in shown] == ["3 ranks", "2 ranks", "3 ranks"]
    told = records(tmp_path, file="incidents.jsonl")
    changes = [(one["kind"], one["ranks"], one["seat"], one["attempt"]) for one in told if "seat" in one]
    assert changes == [("shrink", 2, 1, 0), ("grow", 3, 1, 1)]
    assert "resumed after step 2" in out
    assert "resumed after step 8" in out, "at the save that came next, and without another one"
    assert losses(tmp_path) == pytest.approx(losses(tmp_path, "alone"), rel=1e-12)
    assert len(losses(tmp_path)) == 14


@pytest.mark.full
def test_a_rank_that_cannot_be_started_again_is_given_up(tmp_path: Path) -> None:
    """One restart is tried with all of them; it does not count as one that the rank could not begin."""
    (tmp_path / "kill-2").write_text("3")
    run = start(tmp_path, "--ranks", "2:3", "--run.steps", 6, "--checkpoint.every", 1, "--restarts", 5)
    wait_for(lambda: not (tmp_path / "kill-2").exists(), run)
    (tmp_path / "gone-2").touch()
    code, _, err = ended(run)
    assert code == 0, err
    first, second = err.splitlines()
    assert first.startswith("restart 1 of 5: rank 2 was killed by SIGKILL")
    assert second == (
        "going on with 2 of 3 ranks: rank 2 ended with status 9; "
        "it was started again and failed before its first step"
    )
    assert [record["step"] for record in records(tmp_path)] == list(range(6))


MOVES = "--placement.planner random --placement.start-step 1 --placement.every 2 --placement.slots-per-rank 4"
KINDS = {
    "moving experts, smart": (3, f"{MOVES} --moe.schedule smart --moe.shadow auto"),
    "stages": (4, "--parallel.pp 2 --optim.accumulate 2 --data.batch-size 4"),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_a_seat_is_lost_twice(kind: str, tmp_path: Path) -> None:
    """Lost, taken back, lost again and taken back again; losses are those of a run that lost nothing."""
    most, flags = KINDS[kind]
    words = (*flags.split(), "--run.steps", 20, "--checkpoint.every", 2)
    code, _, err = ended(start(tmp_path, "--ranks", most, *words, "--run.name", "alone"))
    assert code == 0, err
    (tmp_path / "kill-1").write_text("3")
    for step in (6, 11, 15):
        (tmp_path / f"hold-{step}").touch()
    run = start(tmp_path, "--ranks", f"2:{most}", *words)

    def room() -> bool:
        return bool(list(tmp_path.glob("moeclipse-*/room")))

    wait_for(room, run)
    (tmp_path / "hold-6").unlink()
    wait_for(lambda: changes(tmp_path) == ["shrink", "grow"], run)
    for path in tmp_path.glob("held-*"):
        path.unlink()
    wait_for(lambda: len(list(tmp_path.glob("held-*"))) == most, run)
    (tmp_path / "kill-1").write_text("11")
    (tmp_path / "slow").write_text("0.5")  # asked after two saves: the launcher has to see each of them
    (tmp_path / "hold-11").unlink()
    wait_for(room, run)
    (tmp_path / "slow").write_text("0")
    (tmp_path / "hold-15").unlink()
    code, _, err = ended(run)
    assert code == 0, err
    assert changes(tmp_path) == ["shrink", "grow"] * 2
    assert losses(tmp_path) == pytest.approx(losses(tmp_path, "alone"), rel=1e-12)
    assert len(losses(tmp_path)) == 20


def changes(folder: Path) -> list[str]:
    return [one["kind"] for one in records(folder, file="incidents.jsonl") if "seat" in one]
