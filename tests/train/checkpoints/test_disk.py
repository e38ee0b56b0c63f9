"""The few things a checkpoint does to a disk: whole, durable, and hashed as they were given."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from checkpoint_bed import CountingDisk, FailingDisk

from moeclipse.train.checkpoints.disk import DISK, Disk, make_folders, remove_tree, sha256_of, write_file


def test_a_file_is_written_hashed_and_synced(tmp_path: Path) -> None:
    disk, path = CountingDisk(), tmp_path / "file"
    parts = [b"first", b"", b"x" * 100_000]
    written = write_file(disk, path, map(memoryview, parts))
    assert path.read_bytes() == b"".join(parts)
    assert written.size == 100_005
    assert written.sha256 == sha256_of(path) == hashlib.sha256(b"".join(parts)).hexdigest()
    assert [kind for kind, _ in disk.log] == ["create", "write", "write", "write", "fsync"]


def test_what_the_disk_does_to_the_bytes_is_noticed(tmp_path: Path) -> None:
    class Forgetful(Disk):
        def write(self, file: object, data: memoryview) -> None:
            super().write(file, memoryview(bytes(data).replace(b"a", b"b")))  # type: ignore[arg-type]

    written = write_file(Forgetful(), tmp_path / "file", [memoryview(b"banana")])
    assert written.sha256 == hashlib.sha256(b"banana").hexdigest() != sha256_of(tmp_path / "file")


def test_a_short_write_goes_on(tmp_path: Path) -> None:
    class Sip:
        """Takes three bytes at a time, as a file may."""

        def __init__(self) -> None:
            self.taken = b""

        def write(self, data: memoryview) -> int:
            self.taken += bytes(data[:3])
            return min(3, len(data))

    file = Sip()
    DISK.write(file, memoryview(b"0123456789"))  # type: ignore[arg-type]
    assert file.taken == b"0123456789"


@pytest.mark.parametrize("operation", [1, 2], ids=["write", "fsync"])
def test_an_error_names_the_file(tmp_path: Path, operation: int) -> None:
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_file(FailingDisk(operation), tmp_path / "file", [memoryview(b"x")])
    assert caught.value.filename == str(tmp_path / "file")


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        write_file(DISK, tmp_path / "file", [memoryview(b"x")])
    assert (tmp_path / "file").read_text() == "mine"


def test_folders_are_made_durable_from_above(tmp_path: Path) -> None:
    disk = CountingDisk()
    make_folders(disk, tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    made = [(kind, Path(path).relative_to(tmp_path).as_posix()) for kind, path in disk.log]
    assert made == [
        ("make_folder", "a"),
        ("fsync_folder", "."),
        ("make_folder", "a/b"),
        ("fsync_folder", "a"),
        ("make_folder", "a/b/c"),
        ("fsync_folder", "a/b"),
    ]
    make_folders(disk, tmp_path / "a")
    assert len(disk.log) == 6, "what is there needs nothing"


def test_a_tree_is_removed_and_links_are_not_followed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("mine")
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep" / "file").write_text("x")
    os.symlink(kept, tree / "link")
    remove_tree(DISK, tree)
    assert not tree.exists()
    assert (kept / "file").read_text() == "mine"


def test_a_link_is_no_file_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert len(sha256_of(tmp_path / "file")) == 64
    with pytest.raises(OSError, match="it is a link, not a regular file"):
        sha256_of(tmp_path / "link")
