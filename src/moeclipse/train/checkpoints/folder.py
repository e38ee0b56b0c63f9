"""The folder of a run's checkpoints: names, order, and what is removed when.

    step-00000020              a checkpoint
    step-00000020.replaced     the one it replaces, while a save of the same step commits; still a checkpoint
    step-00000030.abandoned    was ahead of a run that went back and saved an earlier step; not resumed
    .tmp-step-00000020-1f...   a save under way, or a dead one
    .trash-step-00000010       being removed
    best.json                  which step is the best one so far, by its loss on text that is held out

Contract. Nothing is removed under a checkpoint's name: it is renamed away first, so a name that looks like a
checkpoint never stands for half of one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from moeclipse.core.outside import read_json
from moeclipse.train.checkpoints.disk import Disk, remove_tree

INDEX, MANIFEST = "index.json", "manifest.json"
"""Files that every checkpoint has."""
TEMPORARY = ".tmp-"
TRASH = ".trash-"
REPLACED = ".replaced"
ABANDONED = ".abandoned"
BEST = "best.json"
NAME = re.compile(r"step-(\d{8,})(\.replaced)?")


@dataclass(frozen=True, kw_only=True)
class FolderEntry:
    """Something in the folder that has a checkpoint's name; whether it is whole is not known yet."""

    step: int
    path: Path
    is_replaced: bool


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def checkpoints_in(folder: Path) -> list[FolderEntry]:
    """Checkpoints by name, newest first; one that was being replaced comes after its successor."""
    entries = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = NAME.fullmatch(path.name)
        if match and path.is_dir():
            entries.append(FolderEntry(step=int(match[1]), path=path, is_replaced=match[2] is not None))
    return sorted(entries, key=lambda entry: (-entry.step, entry.is_replaced))


def remove_leftovers(disk: Disk, folder: Path) -> None:
    """What dead saves and dead removals left behind; a run never has two saves under way."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith((TEMPORARY, TRASH)) and path.is_dir():
            remove_tree(disk, path)


def commit(disk: Disk, temporary: Path, final: Path) -> None:
    """Gives a finished folder its name. A whole checkpoint has a checkpoint's name at every moment."""
    replaced = final.with_name(final.name + REPLACED)
    if final.exists():
        if replaced.exists():
            discard(disk, replaced)
        disk.rename(final, replaced)
    try:
        disk.rename(temporary, final)
    except OSError:
        if replaced.exists() and not final.exists():
            disk.rename(replaced, final)
        raise
    disk.fsync_folder(final.parent)


def prune(disk: Disk, folder: Path, step: int, keep: int) -> None:
    """After a commit of `step`: keeps it, the keep - 1 newest before it and the best one so far.

    What is ahead is set aside.
    """
    entries = checkpoints_in(folder)
    steps = sorted({entry.step for entry in entries if entry.step <= step}, reverse=True)
    kept = {*steps[:keep], best_step(folder)}
    committed = {entry.step for entry in entries if not entry.is_replaced}
    for entry in entries:
        if entry.is_replaced and entry.step in committed:
            discard(disk, entry.path)
        elif entry.step > step:
            aside = entry.path.with_name(step_name(entry.step) + ABANDONED)
            if aside.exists():
                discard(disk, aside)
            disk.rename(entry.path, aside)
        elif entry.step not in kept:
            discard(disk, entry.path)
    disk.fsync_folder(folder)


def best_step(folder: Path) -> int | None:
    """The step that `best.json` names."""
    try:
        step = read_json(folder / BEST)["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if type(step) is int else None


def discard(disk: Disk, path: Path) -> None:
    """Removes a checkpoint: its name first, at once and for good, then its files."""
    trash = path.with_name(TRASH + path.name)
    if trash.exists():
        remove_tree(disk, trash)
    disk.rename(path, trash)
    disk.fsync_folder(path.parent)  # a power loss must not bring the name back after files are gone
    remove_tree(disk, trash)
