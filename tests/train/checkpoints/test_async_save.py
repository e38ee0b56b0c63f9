"""A save beside training: the state at its beginning is what is saved, and failures are everybody's."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_bed import (
    FailingDisk,
    KillingDisk,
    fork_ranks,
    names_in,
    pieces_of,
    same,
    save_step,
    tensors_at,
)

from moeclipse.core.errors import CheckpointError
from moeclipse.train.checkpoints.async_save import AsyncSave
from moeclipse.train.checkpoints.checkpoint import Checkpoint, OneRank, Ranks, newest, save
from moeclipse.train.checkpoints.disk import DISK, Disk

ONE = OneRank()


def begin(
    folder: Path, step: int, ranks: Ranks, beside: AsyncSave, disk: Disk = DISK
) -> dict[str, torch.Tensor]:
    tensors = tensors_at(step)
    pieces = pieces_of(tensors, ranks.rank, ranks.num_ranks)
    save(folder, step, pieces, {"step": step}, ranks, keep=2, disk=disk, async_save=beside)
    return tensors


def holds(folder: Path, step: int) -> bool:
    checkpoint = newest(folder, ONE).checkpoint
    assert checkpoint is not None
    assert checkpoint.path.name == f"step-{step:08d}"
    return all(same(checkpoint.read(name), t.reshape(-1)) for name, t in tensors_at(step).items())


def changed_after_begin(folder: Path) -> Callable[[Ranks], Any]:
    def work(ranks: Ranks) -> Any:
        beside = AsyncSave()
        assert beside.ended
        assert beside.finish() is None
        names = []
        for step in (10, 20, 30):
            for tensor in begin(folder, step, ranks, beside).values():
                tensor.zero_()  # training goes on at once
            assert beside.under_way
            names.append(beside.finish().name)  # type: ignore[union-attr]
            assert not beside.under_way
        return names

    return work


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_what_training_changes_afterwards_is_not_saved(tmp_path: Path, num_ranks: int) -> None:
    for report in fork_ranks(num_ranks, changed_after_begin(tmp_path)):
        assert report["result"] == ["step-00000010", "step-00000020", "step-00000030"]
    assert names_in(tmp_path) == ["step-00000020", "step-00000030"]
    assert holds(tmp_path, 30)


class StuckDisk(Disk):
    def __init__(self) -> None:
        self.works = threading.Event()

    def fsync(self, file: Any) -> None:
        self.works.wait()
        super().fsync(file)


def test_training_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> Any:
        beside, disk = AsyncSave(), StuckDisk()
        begin(tmp_path, 10, ranks, beside, disk)
        steps = 0
        while beside.under_way:
            # What the numbers of a step tell: whether everyone has ended.
            if all(ranks.gather_objects(beside.ended)):
                beside.advance()
            steps += 1
            if steps == 10:
                disk.works.set()
            time.sleep(0.02)
        return steps >= 10

    assert [report["result"] for report in fork_ranks(2, work)] == [True] * 2
    assert holds(tmp_path, 10)


def test_a_full_disk_of_one_rank_is_told_to_all_with_the_words_of_a_save(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> Any:
        save_step(tmp_path, 10, ranks)
        beside = AsyncSave()
        begin(tmp_path, 20, ranks, beside, FailingDisk(1) if ranks.rank == 1 else DISK)
        try:
            beside.finish()
        except CheckpointError as error:
            assert not beside.under_way
            begin(tmp_path, 30, ranks, beside)
            return [str(error), beside.finish().name]  # type: ignore[union-attr]
        return []

    reports = fork_ranks(2, work)
    assert reports[0] == reports[1]
    text, after = reports[0]["result"]
    assert text.startswith(f"checkpoint step 20 could not be saved in {tmp_path}: rank 1: the disk is full")
    assert "checkpoint step 10 is intact; free some space" in text
    assert after == "step-00000030"
    assert names_in(tmp_path) == ["step-00000010", "step-00000030"]


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, victim: int) -> None:
    n = 0
    while True:
        folder = tmp_path / str(n)

        def work(ranks: Ranks, folder: Path = folder, n: int = n) -> Any:
            save_step(folder, 10, ranks)
            beside = AsyncSave()
            begin(folder, 20, ranks, beside, KillingDisk(n) if ranks.rank == victim else DISK)
            return beside.finish().name  # type: ignore[union-attr]

        reports = fork_ranks(2, work)
        found = newest(folder, ONE)
        assert found.checkpoint is not None
        assert found.passed_over == ()
        if all("result" in report for report in reports):
            break
        assert reports[victim] == {"signal": signal.SIGKILL}
        n += 1
    assert n >= (8 if victim == 0 else 3), "operations of the disk were counted"
    assert holds(tmp_path / str(n), 20)


def test_one_at_a_time(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> Any:
        beside, disk = AsyncSave(), StuckDisk()
        begin(tmp_path, 10, ranks, beside, disk)
        try:
            begin(tmp_path, 20, ranks, beside)
        except AssertionError as error:
            disk.works.set()
            beside.finish()
            return [str(error), threading.active_count()]
        return []

    (report,) = fork_ranks(1, work)
    assert report["result"] == ["one save at a time: finish the one before", 1]


def test_memory_of_the_copy_is_used_again(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> Any:
        beside, places = AsyncSave(), set()
        for step in (10, 20, 30):
            begin(tmp_path, step, ranks, beside)
            assert beside.memory is not None
            places.add(beside.memory.data.data_ptr())
            beside.finish()
        return len(places)

    assert [report["result"] for report in fork_ranks(2, work)] == [1, 1]
    assert Checkpoint.open(tmp_path / "step-00000030", ONE).state == {"step": 30}
    assert os.listdir(tmp_path)
