"""A folder that comes to be file by file, and is there whole or not at all.

Files are written into a hidden folder beside the one that is wanted, each with its SHA-256 in a journal.
Whoever was interrupted goes on: files that the journal knows and that are as they were written are kept. The
last step is one rename.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from moeclipse.core.errors import CheckpointError
from moeclipse.core.outside import MOST_INDEX, read_json
from moeclipse.train.checkpoints.disk import (
    DISK,
    Disk,
    Written,
    file_damage,
    make_folders,
    remove_tree,
    write_file,
)

JOURNAL = "journal.json"


class StagedFolder:
    def __init__(self, out: Path, job: str, disk: Disk = DISK) -> None:
        """`job` says what is made, and from what: what another job left behind is removed."""
        if out.exists():
            raise CheckpointError(f"{out} exists; choose another folder, or remove it")
        self.out, self.job, self.disk = out, job, disk
        self.path = out.with_name(f".{out.name}.partial")
        self.files: dict[str, Written] = {}
        self.kept = 0
        """Files that an earlier attempt had written."""
        make_folders(disk, out.absolute().parent)
        if self.path.exists() and not self._continues():
            remove_tree(disk, self.path)
        if not self.path.exists():
            disk.make_folder(self.path)

    def _continues(self) -> bool:
        try:
            tree = read_json(self.path / JOURNAL, most=MOST_INDEX)
            if tree["job"] != self.job:
                return False
            self._known = {name: Written(**entry) for name, entry in tree["files"].items()}
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return True

    _known: dict[str, Written] = {}  # noqa: RUF012  (replaced, never filled)

    def add(self, name: str, chunks: Callable[[], Iterable[memoryview]]) -> Written:
        """Write a file, unless it is there already."""
        path = self.path / name
        known = self._known.get(name)
        if known is not None and file_damage(path, known) is None:
            self.kept += 1
            self.files[name] = known
            return known
        if path.exists():
            self.disk.unlink(path)
        self.files[name] = write_file(self.disk, path, chunks())
        self._note()
        return self.files[name]

    def add_bytes(self, name: str, data: bytes) -> Written:
        return self.add(name, lambda: [memoryview(data)])

    def _note(self) -> None:
        tree = {
            "job": self.job,
            "files": {name: vars(one) for name, one in {**self._known, **self.files}.items()},
        }
        fresh = self.path / f"{JOURNAL}.new"
        if fresh.exists():
            self.disk.unlink(fresh)
        write_file(self.disk, fresh, [memoryview(json.dumps(tree).encode())])
        self.disk.rename(fresh, self.path / JOURNAL)

    def commit(self) -> Path:
        """Give the folder its name."""
        for entry in sorted(self.path.iterdir()):
            if entry.name not in self.files:
                self.disk.unlink(entry)
        self.disk.fsync_folder(self.path)
        self.disk.rename(self.path, self.out)
        self.disk.fsync_folder(self.out.absolute().parent)
        return self.out
