"""Faults while saving: killed, cut from power or out of space at every single operation of the disk."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from checkpoint_bed import (
    DEADLINE_S,
    CountingDisk,
    FailingDisk,
    KillingDisk,
    fork_ranks,
    names_in,
    save_step,
    tensors_at,
)

from moeclipse.core.errors import CheckpointError
from moeclipse.core.shown import visible
from moeclipse.train.checkpoints.checkpoint import Checkpoint, OneRank, Piece, Ranks, newest, save
from moeclipse.train.checkpoints.disk import DISK, Disk
from moeclipse.train.checkpoints.folder import checkpoints_in
from moeclipse.train.checkpoints.manifest import inspect
from moeclipse.train.checkpoints.save import size_text

ONE = OneRank()


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """In memory where that is possible: thousands of fsyncs of a busy disk would take minutes."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with TemporaryDirectory(dir=shared) as name:
        yield Path(name)


def assert_whole(checkpoint: Checkpoint | None, step: int) -> None:
    assert checkpoint is not None
    assert checkpoint.state["step"] == step
    for name, tensor in tensors_at(step).items():
        assert torch.equal(checkpoint.read(name), tensor.reshape(-1))


# Each scenario prepares a folder; then a save of `step` with `keep` is disturbed. `before` is the newest
# checkpoint when it starts.


def first_save(folder: Path) -> dict[str, int | None]:
    return {"before": None, "step": 20, "keep": 2}


def second_save(folder: Path) -> dict[str, int | None]:
    save_step(folder, 5, ONE)
    save_step(folder, 10, ONE)
    return {"before": 10, "step": 20, "keep": 2}


def after_a_dead_save(folder: Path) -> dict[str, int | None]:
    save_step(folder, 10, ONE)
    for name in (".tmp-step-00000020-dead", ".trash-step-00000005"):
        (folder / name).mkdir()
        (folder / name / "rank-00000.safetensors").write_text("half")
    return {"before": 10, "step": 20, "keep": 1}


def same_step_again(folder: Path) -> dict[str, int | None]:
    save_step(folder, 20, ONE)
    return {"before": 20, "step": 20, "keep": 1}


def same_step_interrupted(folder: Path) -> dict[str, int | None]:
    save_step(folder, 20, ONE)
    (folder / "step-00000020").rename(folder / "step-00000020.replaced")
    save_step(folder, 10, ONE)
    (folder / "step-00000020.abandoned").rename(folder / "step-00000020.replaced")
    return {"before": 20, "step": 20, "keep": 1}


def went_back(folder: Path) -> dict[str, int | None]:
    for step in (10, 30):
        save_step(folder, step, ONE, keep=3)
    return {"before": 30, "step": 20, "keep": 1}


SCENARIOS = [first_save, second_save, after_a_dead_save, same_step_again, same_step_interrupted, went_back]
Scenario = Callable[[Path], dict[str, int | None]]


def num_operations(tmp_path: Path, scenario: Scenario) -> int:
    """Operations of an undisturbed save; all disturbed ones are measured against it."""
    folder = tmp_path / "counted" / "checkpoints"
    case = scenario(folder)
    disk = CountingDisk()
    save_step(folder, case["step"] or 0, ONE, case["keep"] or 0, disk)
    shutil.rmtree(tmp_path / "counted")
    assert disk.count >= 18
    return disk.count


def assert_recovers(folder: Path, case: dict[str, int | None]) -> int | None:
    """A whole checkpoint is found, nothing else has a checkpoint's name, and the next save tidies up."""
    for entry in checkpoints_in(folder):
        assert inspect(entry.path).damage == ()
    found = newest(folder, ONE)
    step = found.checkpoint.state["step"] if found.checkpoint else None
    assert step in {case["before"], case["step"]}
    if step is not None:
        assert_whole(found.checkpoint, step)
    save_step(folder, 40, ONE, keep=1)
    left = [name for name in names_in(folder) if not name.endswith(".abandoned")]
    assert left == ["step-00000040"]
    return step


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_kill_at_every_operation(tmp_path: Path, scenario: Scenario) -> None:
    found = []
    for n in range(num_operations(tmp_path, scenario)):
        folder = tmp_path / str(n) / "checkpoints"
        case = scenario(folder)

        def work(ranks: Ranks, folder: Path = folder, case: dict = case, n: int = n) -> str:
            return save_step(folder, case["step"], ranks, case["keep"], KillingDisk(n))

        assert fork_ranks(1, work) == [{"signal": signal.SIGKILL}]
        found.append(assert_recovers(folder, case))
        shutil.rmtree(folder)
    if case["before"] != case["step"]:
        assert set(found) == {case["before"], case["step"]}, "the loop must see both sides of the commit"


def kills_of_two_ranks(tmp_path: Path, choose: slice) -> None:
    """Rank 0 or rank 1 dies at its n-th operation; the other one must not wait for it."""
    for victim in (0, 1):
        n, reports = choose.start or 0, [{"signal": 0}]
        while any("signal" in report for report in reports):
            folder = tmp_path / f"{victim}-{n}"
            save_step(folder, 5, ONE)
            save_step(folder, 10, ONE)

            def work(ranks: Ranks, folder: Path = folder, victim: int = victim, n: int = n) -> str:
                disk = KillingDisk(n) if ranks.rank == victim else DISK
                return save_step(folder, 20, ranks, 2, disk)

            started = time.monotonic()
            reports = fork_ranks(2, work)
            assert time.monotonic() - started < DEADLINE_S / 2
            assert reports[1 - victim].get("signal") is None
            assert reports[victim].get("signal") in (signal.SIGKILL, None)
            assert_recovers(folder, {"before": 10, "step": 20})
            shutil.rmtree(folder)
            n += choose.step or 1
        assert n > 5


def test_a_kill_of_one_of_two_ranks(tmp_path: Path) -> None:
    kills_of_two_ranks(tmp_path, slice(1, None, 5))


@pytest.mark.full
def test_a_kill_of_one_of_two_ranks_at_every_operation(tmp_path: Path) -> None:
    kills_of_two_ranks(tmp_path, slice(0, None, 1))


# ---- power


class PowerLossError(BaseException):
    """Not an Exception: nothing may tidy up after it."""


class PowerLossDisk(CountingDisk):
    """Forgets, when the power goes, all that was not fsynced: the worst that a file system may do."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.unsynced: set[Path] = set()
        """Files with bytes, and files and folders with a name, that are not on the disk yet."""
        self.unnamed: set[Path] = set()
        self.renamed: list[tuple[Path, Path]] = []

    def at(self) -> None:
        raise PowerLossError

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self.unnamed.add(path)

    def create(self, path: Path) -> FileIO:
        file = super().create(path)
        self.unnamed.add(path)
        return file

    def write(self, file: FileIO, data: memoryview) -> None:
        self.unsynced.add(Path(str(file.name)))
        super().write(file, data)

    def fsync(self, file: FileIO) -> None:
        super().fsync(file)
        self.unsynced.discard(Path(str(file.name)))

    def fsync_folder(self, path: Path) -> None:
        super().fsync_folder(path)
        self.unnamed = {entry for entry in self.unnamed if entry.parent != path}
        self.renamed = [pair for pair in self.renamed if pair[1].parent != path]

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.renamed.append((source, target))
        self._move(source, target)

    def _move(self, source: Path, target: Path) -> None:
        def moved(path: Path) -> Path:
            inside = path == source or source in path.parents
            return target / path.relative_to(source) if inside else path

        self.unsynced = {moved(path) for path in self.unsynced}
        # The folder's own name travels too: undone or not, it is the rename that decides.
        self.unnamed = {path if path == source else moved(path) for path in self.unnamed}

    def lose_power(self, *, undo_renames: bool) -> None:
        for source, target in reversed(self.renamed) if undo_renames else ():
            if target.exists():
                os.rename(target, source)
                self._move(target, source)
        for path in self.unsynced:
            if path.exists():
                os.truncate(path, path.stat().st_size // 2)
        for path in self.unnamed:
            if path.is_dir():
                shutil.rmtree(path)
            elif path.exists():
                path.unlink()


@pytest.mark.parametrize("undo_renames", [False, True])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_power_loss_at_every_operation(tmp_path: Path, scenario: Scenario, undo_renames: bool) -> None:
    for n in range(num_operations(tmp_path, scenario)):
        folder = tmp_path / str(n) / "checkpoints"
        case = scenario(folder)
        disk = PowerLossDisk(n)
        with pytest.raises(PowerLossError):
            save_step(folder, case["step"] or 0, ONE, case["keep"] or 0, disk)
        disk.lose_power(undo_renames=undo_renames)
        assert_recovers(folder, case)
        shutil.rmtree(tmp_path / str(n), ignore_errors=True)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_what_save_returned_survives_a_power_loss(tmp_path: Path, scenario: Scenario) -> None:
    folder = tmp_path / "run" / "checkpoints"
    case = scenario(folder)
    disk = PowerLossDisk(-1)
    save_step(folder, case["step"] or 0, ONE, case["keep"] or 0, disk)
    disk.lose_power(undo_renames=True)
    assert assert_recovers(folder, case) == case["step"]


def test_the_order_of_operations(tmp_path: Path) -> None:
    """Old ones go only after the new one's name is on the disk; other ranks are told only then, too."""
    save_step(tmp_path, 10, ONE)
    disk = CountingDisk()
    save_step(tmp_path, 20, ONE, keep=1, disk=disk)
    kinds = [name for name, _ in disk.log]
    first = kinds.index("rename")
    assert disk.log[first][1].endswith("-> " + str(tmp_path / "step-00000020"))
    assert kinds[first - 2 : first] == ["fsync", "fsync_folder"]
    assert disk.log[first + 1] == ("fsync_folder", str(tmp_path))
    assert disk.log[first + 2][1].endswith(".trash-step-00000010")
    assert not {"unlink", "remove_folder"} & set(kinds[:first])
    written = [path for name, path in disk.log if name == "create"]
    assert [Path(path).name for path in written] == ["rank-00000.safetensors", "index.json", "manifest.json"]


# ---- space


class KeepingDisk(Disk):
    """Nothing goes from it."""

    def unlink(self, path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")


def test_checkpoints_that_cannot_be_removed_are_told_in_one_harmless_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a\x1b[2J\nerror: all is lost"
    save_step(folder, 1, ONE, keep=1)
    assert save_step(folder, 2, ONE, keep=1, disk=KeepingDisk())
    told = f"warning: old checkpoints in {visible(str(folder))} could not be removed: Permission denied\n"
    assert capsys.readouterr() == ("", told)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_error_at_every_operation(
    tmp_path: Path, scenario: Scenario, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for n in range(num_operations(tmp_path, scenario)):
        folder = tmp_path / str(n) / "checkpoints"
        case = scenario(folder)
        standing = names_in(folder)
        disk = FailingDisk(n, code)
        capsys.readouterr()
        try:
            save_step(folder, case["step"] or 0, ONE, case["keep"] or 0, disk)
            assert "could not be removed" in capsys.readouterr().err
        except CheckpointError as error:
            said.append(str(error))
            assert f"checkpoint step {case['step']} could not be saved in {folder}: rank 0: " in said[-1]
            left = [name for name in names_in(folder) if not name.startswith(".trash")]
            if "it is complete, but may not survive a loss of power" not in said[-1]:
                # A replaced checkpoint may have its name back: that is no new one.
                assert set(left) <= {*standing, *(name.removesuffix(".replaced") for name in standing)}
                stands = "there is no earlier checkpoint"
                if case["before"] is not None:
                    stands = f"checkpoint step {case['before']} is intact"
                assert stands in said[-1]
        assert_recovers(folder, case)
        shutil.rmtree(tmp_path / str(n))
    word = "the disk is full" if code == errno.ENOSPC else "Input/output error"
    assert sum(word in text for text in said) >= 8
    assert sum("partial files were removed" in text for text in said) >= 7


def test_a_full_disk_says_what_to_do(tmp_path: Path) -> None:
    save_step(tmp_path, 10, ONE)
    disk = FailingDisk(4)
    with pytest.raises(CheckpointError) as caught:
        save_step(tmp_path, 20, ONE, disk=disk)
    text = str(caught.value)
    assert caught.value.code == 1, "another attempt may find space"
    assert text.startswith(
        f"checkpoint step 20 could not be saved in {tmp_path}: rank 0: the disk is full (writing "
    )
    assert "rank-00000.safetensors): the checkpoint needs 525 B, " in text
    assert text.endswith(
        "; partial files were removed; checkpoint step 10 is intact; "
        "free some space, lower checkpoint.keep or choose another run.dir, then resume"
    )


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_one_rank_without_space_stops_all_of_them(tmp_path: Path, num_ranks: int) -> None:
    save_step(tmp_path, 10, ONE)
    for victim in range(num_ranks):
        for n in range(4, 8) if victim == 0 else range(4):

            def work(ranks: Ranks, victim: int = victim, n: int = n) -> str:
                return save_step(tmp_path, 20, ranks, 2, FailingDisk(n) if ranks.rank == victim else DISK)

            started = time.monotonic()
            reports = fork_ranks(num_ranks, work)
            assert time.monotonic() - started < DEADLINE_S / 2
            assert reports == [reports[0]] * num_ranks
            assert f"rank {victim}: the disk is full" in reports[0]["error"]
            assert "checkpoint step 10 is intact" in reports[0]["error"]
            assert names_in(tmp_path) == ["step-00000010"]


def test_a_programming_error_on_one_rank_stops_all_of_them(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> str:
        def pieces() -> Iterator[Piece]:
            if ranks.rank == 1:
                raise RuntimeError("device lost")
            yield Piece(name="x", shape=(1,), start=0, data=torch.ones(1))

        return save(tmp_path, 20, pieces(), {}, ranks, keep=1).name

    reports = fork_ranks(2, work)
    assert reports[0] == reports[1]
    assert "rank 1: device lost" in reports[0]["error"]
    assert names_in(tmp_path) == []


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[None]:
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if (
        os.geteuid() != 0
        or shutil.which("mount") is None
        or subprocess.run(command, capture_output=True).returncode
    ):
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.root
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_disk_that_is_really_full(tmp_path: Path, num_ranks: int) -> None:
    with small_disk(tmp_path / "small", "256k"):
        folder = tmp_path / "small" / "checkpoints"
        fork_ranks(num_ranks, lambda ranks: save_step(folder, 10, ranks))

        def work(ranks: Ranks) -> str:
            piece = Piece(name=f"x{ranks.rank}", shape=(100_000,), start=0, data=torch.ones(100_000))
            return save(folder, 20, [piece], {}, ranks, keep=2).name

        reports = fork_ranks(num_ranks, work)
        assert reports == [reports[0]] * num_ranks
        assert "the disk is full (writing " in reports[0]["error"]
        assert f"the checkpoint needs {size_text(400_000 * num_ranks)}, " in reports[0]["error"]
        assert names_in(folder) == ["step-00000010"]
        assert_whole(newest(folder, ONE).checkpoint, 10)
        # Space came back with the partial files: a smaller one fits again.
        fork_ranks(num_ranks, lambda ranks: save_step(folder, 30, ranks))
        assert_whole(newest(folder, ONE).checkpoint, 30)


def test_sizes_in_words() -> None:
    assert [size_text(n) for n in (0, 999, 1536, 5 << 20, 3 << 40)] == [
        "0 B",
        "999 B",
        "1.5 KB",
        "5.0 MB",
        "3.0 TB",
    ]
