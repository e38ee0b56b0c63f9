"""Writing a checkpoint: three agreements between the ranks, then one rename.

    prepare   each rank lists its pieces; rank 0 clears leftovers and makes a hidden folder
    write     each rank writes and fsyncs its file, hashing on the way
    commit    rank 0 writes index and manifest, fsyncs, renames, fsyncs the parent

After each of them every rank knows whether all others managed; the first failure makes all of them clean up
and raise. A rank that dies instead is the communication layer's to report; what it leaves behind is removed
by the next save.
"""

from __future__ import annotations

import errno
import json
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypedDict

from moeclipse.core.errors import CheckpointError, ConfigError, StorageError
from moeclipse.core.shown import say, visible
from moeclipse.train.checkpoints import folder as layout
from moeclipse.train.checkpoints.disk import (
    DISK,
    Disk,
    Written,
    WrittenEntry,
    make_folders,
    remove_tree,
    write_file,
)
from moeclipse.train.checkpoints.folder import INDEX, MANIFEST
from moeclipse.train.checkpoints.manifest import Index, build_index, encode_manifest
from moeclipse.train.checkpoints.shard import Piece, PieceRecord, Shard
from moeclipse.train.ranks import Ranks, RanksFailed, together

FULL = (errno.ENOSPC, errno.EDQUOT)


def save(
    folder: Path,
    step: int,
    pieces: Iterable[Piece],
    state: Mapping[str, object],
    ranks: Ranks,
    *,
    keep: int,
    disk: Disk = DISK,
    async_save: SavesAsync | None = None,
) -> Path:
    """Writes checkpoint `step` into `folder` and returns its path. Collective; `state` is rank 0's.

    With `async_save` it only begins: the path is a checkpoint when that says so (`checkpoints/async_save`).
    """
    if keep < 1 or step < 0:
        raise ConfigError(f"checkpoint.keep ({keep}) must be at least 1, and the step ({step}) at least 0")
    # To prepare another one would remove the files of the one that is being written.
    assert async_save is None or not async_save.under_way, "one save at a time: finish the one before"
    job = SaveJob(folder=Path(folder), step=step, ranks=ranks, disk=disk, keep=keep)
    with job.failing_together():
        plans = together(ranks, lambda: job.prepare(pieces, state), job.words)
        job.agree(plans, state)
        if async_save is not None:
            async_save.begin(job)
            return job.final
        files = together(ranks, job.write, job.words)
        together(ranks, lambda: job.commit(files), job.words)
    return job.final


def shard_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


class SavesAsync(Protocol):
    """Takes over a save after its preparation."""

    @property
    def under_way(self) -> bool: ...

    def begin(self, job: SaveJob) -> None: ...


class SavePlan(TypedDict):
    """What a rank tells the others before it writes."""

    step: int
    temporary: str
    bytes: int
    pieces: list[PieceRecord]


@dataclass(kw_only=True)
class SaveJob:
    """One rank's side of one save."""

    folder: Path
    step: int
    ranks: Ranks
    disk: Disk
    keep: int
    shard: Shard | None = None
    index: Index | None = None
    temporary: Path | None = None
    needed: int = 0
    committing: bool = False

    @property
    def final(self) -> Path:
        return self.folder / layout.step_name(self.step)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """What failed on any rank is cleaned up and raised on all of them, as one StorageError."""
        try:
            yield
        except (RanksFailed, CheckpointError) as error:
            text = self.clean_up(str(error)) if self.ranks.rank == 0 else ""
            # Once more together: no rank goes on before the partial files are gone, and all say the same.
            raise StorageError(self.ranks.gather_objects(text)[0]) from None

    def prepare(self, pieces: Iterable[Piece], state: Mapping[str, object]) -> SavePlan:
        temporary = ""
        if self.ranks.rank == 0:
            _check_state(state)
            make_folders(self.disk, self.folder)
            layout.remove_leftovers(self.disk, self.folder)
            # A fresh name: a rank of a dead attempt that still writes cannot reach this save's files.
            temporary = f"{layout.TEMPORARY}{layout.step_name(self.step)}-{secrets.token_hex(4)}"
            self.temporary = self.folder / temporary
            self.disk.make_folder(self.temporary)
        self.shard = Shard(pieces)
        return {
            "step": self.step,
            "temporary": temporary,
            "bytes": self.shard.num_bytes,
            "pieces": self.shard.records(),
        }

    def agree(self, plans: list[SavePlan], state: Mapping[str, object]) -> None:
        """Find the index, the same on all ranks (rank 0's `state` is the one that is written)."""
        steps = [plan["step"] for plan in plans]
        if len(set(steps)) > 1:
            raise StorageError(f"ranks save different steps {steps}; all must save the same one")
        self.temporary = self.folder / plans[0]["temporary"]
        self.needed = sum(plan["bytes"] for plan in plans)
        records = [(shard_name(rank), plan["pieces"]) for rank, plan in enumerate(plans)]
        self.index = build_index(records, state)

    def write(self) -> dict[str, WrittenEntry]:
        assert self.shard is not None
        assert self.temporary is not None
        if not self.shard.stored:
            return {}
        if not self.temporary.is_dir():
            raise StorageError(
                f"{self.temporary} was made by rank 0 but is not seen here; "
                f"run.dir must be a folder that all hosts share"
            )
        name = shard_name(self.ranks.rank)
        written = write_file(self.disk, self.temporary / name, self.shard.chunks())
        self.disk.fsync_folder(self.temporary)
        return {name: {"size": written.size, "sha256": written.sha256}}

    def commit(self, files: list[dict[str, WrittenEntry]]) -> None:
        """On rank 0: index, manifest, the rename; then what is old goes."""
        if self.ranks.rank != 0:
            return
        assert self.temporary is not None
        assert self.index is not None
        manifest = {name: Written(**entry) for one in files for name, entry in one.items()}
        manifest[INDEX] = self._write_bytes(INDEX, self.index.encode())
        self._write_bytes(MANIFEST, encode_manifest(manifest))
        self.disk.fsync_folder(self.temporary)
        self.committing = True
        layout.commit(self.disk, self.temporary, self.final)
        self.prune()

    def _write_bytes(self, name: str, data: bytes) -> Written:
        assert self.temporary is not None
        return write_file(self.disk, self.temporary / name, [memoryview(data)])

    def words(self, error: Exception) -> str:
        """A failure of this rank, for all ranks to read."""
        if not isinstance(error, OSError):
            return str(error) or repr(error)
        where = f" (writing {error.filename})" if error.filename else ""
        if error.errno not in FULL:
            return f"{error.strerror or error}{where}"
        needed = f"the checkpoint needs {size_text(self.needed)}, " if self.needed else ""
        return f"the disk is full{where}: {needed}{size_text(_free(self.folder))} are free"

    def clean_up(self, problem: str) -> str:
        """On rank 0: removes what this save wrote; says what happened, what still stands and what to do."""
        text = f"checkpoint step {self.step} could not be saved in {self.folder}: {problem}"
        if self.committing and not self.temporary_exists():
            return f"{text}; it is complete, but may not survive a loss of power"
        outcome = "; partial files were removed"
        if self.temporary_exists():
            try:
                remove_tree(self.disk, self.temporary or Path())
            except OSError as error:
                outcome = f"; {self.temporary} could not be removed ({error.strerror or error})"
        before = layout.checkpoints_in(self.folder)
        stands = (
            f"; checkpoint step {before[0].step} is intact" if before else "; there is no earlier checkpoint"
        )
        todo = "; free some space, lower checkpoint.keep or choose another run.dir, then resume"
        return f"{text}{outcome}{stands}{todo if 'the disk is full' in problem else ''}"

    def temporary_exists(self) -> bool:
        return self.temporary is not None and self.temporary.exists()

    def prune(self) -> None:
        """Old checkpoints go last; failing to remove one is no reason to lose the run."""
        try:
            layout.prune(self.disk, self.folder, self.step, self.keep)
        except OSError as error:
            told = f"old checkpoints in {self.folder} could not be removed: {error.strerror or error}"
            say(f"warning: {visible(told)}", error=True)


def size_text(num_bytes: int) -> str:
    """1536 -> '1.5 KB'."""
    size, units = float(num_bytes), ["B", "KB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def _check_state(state: Mapping[str, object]) -> None:
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the state cannot be written as JSON: {error}; "
            f"give dicts, lists, strings, numbers, booleans and None"
        ) from error


def _free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
