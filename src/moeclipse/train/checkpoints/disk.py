"""The few things a checkpoint does to a disk, behind one small seam.

Idea. Every change to the file system goes through a method of `Disk`. A test passes another `Disk` that
counts operations and kills the process, cuts the power or fills the disk at the n-th one; so "a kill at any
moment" is a loop over n, not a hope.

Contract. Methods raise OSError and nothing else, and do one thing each. `write_file` returns the SHA-256 of
the bytes it was given, not of bytes read back: what the disk does to them later is what must be noticed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedReader, FileIO
from pathlib import Path
from typing import TypedDict

from moeclipse.core.outside import open_file


class Disk:
    """The real disk. Holds no state."""

    def make_folder(self, path: Path) -> None:
        os.mkdir(path)

    def create(self, path: Path) -> FileIO:
        """A new, unbuffered file: an error of the disk is raised by the write that meets it."""
        return FileIO(path, "x")

    def write(self, file: FileIO, data: memoryview) -> None:
        while data.nbytes:
            data = data[file.write(data) :]

    def fsync(self, file: FileIO) -> None:
        os.fsync(file.fileno())

    def fsync_folder(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        os.rmdir(path)


DISK = Disk()


class WrittenEntry(TypedDict):
    """`Written`, as ranks tell it."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Written:
    """A file as it was handed to the disk."""

    size: int
    sha256: str


def write_file(disk: Disk, path: Path, chunks: Iterable[memoryview]) -> Written:
    """Writes a new file to stable storage, hashing on the way; one chunk is in memory at a time."""
    digest, size = hashlib.sha256(), 0
    try:
        with disk.create(path) as file, ThreadPoolExecutor(max_workers=1) as hasher:
            for chunk in chunks:
                hashed = hasher.submit(
                    digest.update, chunk
                )  # takes as long as writing, and can run beside it
                disk.write(file, chunk)
                hashed.result()
                size += chunk.nbytes
            disk.fsync(file)
    except OSError as error:
        error.filename = error.filename or str(path)  # write and fsync do not know the file's name
        raise
    return Written(size=size, sha256=digest.hexdigest())


def open_regular(path: Path) -> BufferedReader:
    """A file to read that is itself a file: a link could lead out of its folder, a pipe would never end."""
    return open_file(path, links=False)


def sha256_of(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_folders(disk: Disk, path: Path) -> None:
    """`path` and whatever is missing above it, each entry made durable."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        disk.make_folder(folder)
        disk.fsync_folder(folder.parent)


def remove_tree(disk: Disk, path: Path) -> None:
    """A folder and everything in it; links are removed, not followed."""
    for entry in sorted(path.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            remove_tree(disk, entry)
        else:
            disk.unlink(entry)
    disk.remove_folder(path)


def file_damage(path: Path, expected: Written) -> str | None:
    """What is wrong with a file, in words; None when it is as it was written."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
        if size < expected.size:
            return f"{path.name} is truncated ({size} of {expected.size} bytes)"
        if size > expected.size:
            return f"{path.name} has grown ({size} bytes, {expected.size} were written)"
        if sha256_of(path) != expected.sha256:
            return f"{path.name} has changed (its SHA-256 differs from the manifest's)"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return None
