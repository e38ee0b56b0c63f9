"""A run that begins from a Hugging Face model and ends in one.

Every rank opens the folder and reads the slices that it holds; no rank ever has the whole model. At the end
rank 0 turns the checkpoint that all ranks wrote into a folder, tensor by tensor, while the others wait.
"""

from __future__ import annotations

from pathlib import Path

from moeclipse.core.errors import CheckpointError, ConfigError, StorageError
from moeclipse.hf.folder import HfFolder
from moeclipse.hf.read import contradictions
from moeclipse.train.checkpoints.checkpoint import Checkpoint
from moeclipse.train.checkpoints.disk import DISK, remove_tree
from moeclipse.train.ranks import OneRank, Ranks, RanksFailed, together
from moeclipse.train.step.learner import Learner
from moeclipse.train.weights.base import BaseSource
from moeclipse.train.weights.convert import hf_state, to_hf
from moeclipse.train.weights.lora import Adapted


def load_folder(learner: Learner, ranks: Ranks) -> None:
    """Collective: fails on all ranks or on none."""
    path = learner.config.model.from_hf
    folders: list[HfFolder] = []

    def open_it() -> None:
        folders.append(HfFolder.open(path, ranks.rank, ranks.num_ranks))

    try:
        together(ranks, open_it, str)
    except RanksFailed as error:
        raise CheckpointError(str(error)) from None
    problems = list(contradictions(folders[0].values, learner.config, path))
    if problems:
        raise ConfigError(problems)
    base = BaseSource(folders[0], learner.model)
    learner.load_weights(Adapted.of(base, learner.config, folders[0].family.names))
    learner.hf = hf_state(folders[0])


def export(checkpoint: Path, out: Path, source: Path, ranks: Ranks) -> None:
    """Collective: rank 0 writes; an older export is replaced when the new one is whole."""

    def write() -> None:
        if ranks.rank == 0:
            fresh = out.with_name(f"{out.name}.new")
            for old in (fresh, fresh.with_name(f".{fresh.name}.partial")):
                if old.exists():
                    remove_tree(DISK, old)
            opened = Checkpoint.open(checkpoint, OneRank())
            to_hf(opened, fresh, tokenizer=source if source.is_dir() else None)
            if out.exists():
                remove_tree(DISK, out)
            DISK.rename(fresh, out)
            DISK.fsync_folder(out.parent)

    try:
        together(ranks, write, str)
    except RanksFailed as error:
        raise StorageError(f"the model could not be exported to {out}: {error}") from None
