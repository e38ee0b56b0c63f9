"""What comes from outside, files and JSON, within bounds: the only place that opens and parses it.

    with open_file(path) as file: ...           a regular file: nothing here waits for a pipe
    with open_file(path, inside=folder) ...     no link leads out of the folder
    regular(path, inside=folder)                the same for a library that opens by name
    read_bytes(path)   read_text(path)   read_json(path)   lines_of(file)

Contract. OSError says what cannot be opened, ValueError, in one sentence, what is wrong with what is in it;
nothing else is raised. Memory is bounded by `most`, the bytes that are taken, and nothing takes more than
linear time. JSON has at most DEPTH levels, and its numbers are finite and fit 64 bits; the sentence names the
key.

A snapshot in Hugging Face's cache is a folder of links to `blobs` beside it: these do not lead out.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Iterator
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, BinaryIO

MOST_BYTES = 16 << 20
"""Of a small file: a configuration, a summary, a chat template."""
MOST_INDEX = 1 << 28
"""Of a list of a model's tensors."""
MOST_LINE = 16 << 20
DEPTH = 64
KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(path: str | Path, *, inside: Path | None = None, links: bool = True) -> BufferedReader:
    """To be read; `links=False` where the file itself must be one, and no link to it."""
    if inside is not None:
        path, links = regular(path, inside=inside), False  # where a link leads was looked at just now
    follow = 0 if links else os.O_NOFOLLOW
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | follow)
    except ValueError as error:  # a zero byte in a name
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO) or not os.path.lexists(path):
            raise
        raise _not_regular(path, os.lstat(path).st_mode) from None  # what links and sockets answer
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise _not_regular(path, mode)
    return BufferedReader(FileIO(handle))


def regular(path: str | Path, *, inside: Path | None = None) -> Path:
    """The path, with its links followed, of what is a regular file; with `inside`, one of that folder."""
    try:
        found = Path(os.path.realpath(path, strict=True))
        if inside is not None:
            root = Path(os.path.realpath(inside, strict=True))
            blobs = (root.parent.parent / "blobs",) if root.parent.name == "snapshots" else ()
            if not any(found.is_relative_to(one) for one in (root, *blobs)):
                raise OSError(errno.EXDEV, f"it leads to {found}, outside of {root}; copy it", str(path))
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    mode = os.stat(found).st_mode
    if not stat.S_ISREG(mode):
        raise _not_regular(path, mode)
    return found


def _not_regular(path: str | Path, mode: int) -> OSError:
    kind = KINDS.get(stat.S_IFMT(mode), "something else")
    return OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def read_bytes(path: str | Path, *, most: int = MOST_BYTES, inside: Path | None = None) -> bytes:
    with open_file(path, inside=inside) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most >> 20} MiB")
    return data


def read_text(
    path: str | Path, *, most: int = MOST_BYTES, inside: Path | None = None, errors: str = "strict"
) -> str:
    data = read_bytes(path, most=most, inside=inside)
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (byte {error.start})") from None


def read_json(
    path: str | Path, *, most: int = MOST_BYTES, inside: Path | None = None, numbers: bool = True
) -> Any:
    return parse_json(read_bytes(path, most=most, inside=inside), numbers=numbers)


def read_table(
    path: str | Path, *, most: int = MOST_BYTES, inside: Path | None = None, numbers: bool = True
) -> dict[str, Any]:
    """A JSON file that holds a table."""
    return table(read_json(path, most=most, inside=inside, numbers=numbers))


def table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("it holds no table")
    return value


def parse_json(raw: bytes | str, *, numbers: bool = True, deep: bool = False) -> Any:
    """`numbers=False` leaves NaN, infinities and huge integers as they are: whoever reads them looks.

    `deep`: the caller has counted the brackets of each part.
    """
    try:
        value = json.loads(raw)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEPTH} levels") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (byte {error.start})") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    brackets = ("[", "{") if isinstance(raw, str) else (b"[", b"{")
    if not deep and (numbers or sum(map(raw.count, brackets)) > DEPTH):  # type: ignore[arg-type]
        _check_values(value, numbers)
    return value


Way = tuple[Any, str | int] | None
"""From a value up to the whole: the way to its holder, and its name there."""


def _check_values(value: Any, numbers: bool) -> None:
    level: list[tuple[Way, Any]] = [(None, value)]
    for _ in range(DEPTH + 1):
        below: list[tuple[Way, Any]] = []
        for way, one in level:
            if isinstance(one, dict):
                below += [((way, name), part) for name, part in one.items()]
            elif isinstance(one, list):
                below += [((way, number), part) for number, part in enumerate(one)]
            elif numbers and isinstance(one, float) and not math.isfinite(one):
                raise ValueError(f"{_key(way)} is {one}, not a finite number")
            elif numbers and isinstance(one, int) and not -(1 << 63) <= one < 1 << 64:
                raise ValueError(f"{_key(way)} is a number that does not fit 64 bits")
        if not below:
            return
        level = below
    raise ValueError(f"{_key(level[0][0])} is nested deeper than {DEPTH} levels")


def _key(way: Way) -> str:
    if way is None:
        return "it"
    names: list[str] = []
    while way is not None:
        way, name = way
        names.append(f"[{name}]" if isinstance(name, int) else f".{name[:80]}")
    text = "".join(reversed(names)).removeprefix(".")
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


def told_of(where: str | Path, error: OSError | ValueError) -> str:
    """The sentence with what it is about."""
    text = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    return f"{where} {text[3:]}" if text.startswith("it ") else f"{where}: {text}"


def lines_of(file: BinaryIO, most: int = MOST_LINE) -> Iterator[bytes | None]:
    """Lines with their ends; None for one that has more bytes than `most`."""
    while line := file.readline(most + 1):
        if len(line) <= most:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(most + 1)
        yield None
