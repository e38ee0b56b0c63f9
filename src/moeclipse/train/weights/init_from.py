"""A new run that begins from weights of another, with an optimizer, data and steps of its own.

The weights are those of a checkpoint, of the newest whole one of a run, or of a converted Hugging Face model.
A Hugging Face folder itself also has a shape to give and is named by `model.from_hf`.

Contract: collective, fails on all ranks or on none; the model must have the checkpoint's shape, unless
experts are made of dense blocks (`train/weights/upcycle`), and its type may be another. `--resume` goes on
exactly and is something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from moeclipse.core.errors import CheckpointError, ConfigError
from moeclipse.hf.config_file import is_model_folder
from moeclipse.hf.read import contradictions, read_config
from moeclipse.train.checkpoints.checkpoint import Checkpoint, newest
from moeclipse.train.checkpoints.manifest import RunState
from moeclipse.train.config import TrainConfig
from moeclipse.train.fingerprint import differences, fingerprint_of, in_present_terms
from moeclipse.train.ranks import Ranks
from moeclipse.train.step.learner import Learner
from moeclipse.train.weights.base import BaseSource, DecodedWeights
from moeclipse.train.weights.lora import Adapted
from moeclipse.train.weights.upcycle import upcycled


def load_weights_of(path: str, learner: Learner, ranks: Ranks) -> None:
    upcycles = learner.config.init.upcycle != "off"
    if upcycles and is_model_folder(Path(path)):
        learner.load_weights(upcycled(path, learner, ranks))
        return
    checkpoint = open_weights(path, ranks)
    if upcycles:
        learner.load_weights(upcycled(path, learner, ranks, checkpoint))
        return
    lines = list(other_shape(checkpoint.state, learner.config, path))
    if lines:
        raise ConfigError([f"run.init_from ({path}): {line}" for line in lines])
    learner.hf = checkpoint.state.get("hf")
    names = None if learner.hf is None else read_config(learner.hf["config"], path).family.names
    base = BaseSource(DecodedWeights(checkpoint), learner.model)
    learner.load_weights(Adapted.of(base, learner.config, names))


def open_weights(path: str, ranks: Ranks) -> Checkpoint:
    """Of a checkpoint's folder, or of a run's."""
    if not (Path(path) / "checkpoints").is_dir():
        return Checkpoint.open(path, ranks)
    found = newest(Path(path) / "checkpoints", ranks)
    if found.checkpoint is None:
        damaged = f": {'; '.join(found.passed_over)}" if found.passed_over else ""
        raise CheckpointError(f"run.init_from ({path}): the run has no whole checkpoint{damaged}")
    return found.checkpoint


def other_shape(state: RunState, config: TrainConfig, path: str) -> Iterator[str]:
    """Where the model differs from the one whose weights these are."""
    if "fingerprint" in state:
        expected = fingerprint_of(config, torch.float32)
        stored = in_present_terms(state["fingerprint"], expected, TrainConfig())
        if "lora" not in stored:
            expected.pop("lora", None)  # adapters beside a model that had none
        free = {"dtype": "", "init_std": 0.0, "base": "", "dense_base": ""}
        for fingerprint in (expected, stored):  # weights are taken as they are, whatever they began from
            fingerprint["model"] = {**fingerprint["model"], **free}
        yield from differences(stored, expected)
    elif isinstance(told := state.get("hf"), Mapping):
        yield from contradictions(read_config(told["config"], path).values, config, path)
    else:
        yield "its state does not say what model it belongs to; it was saved by another program"
