"""Keys that families share name keys of ours."""

from __future__ import annotations

from moeclipse.core.config import to_flat
from moeclipse.hf.family_keys import DEEPSEEK, DELTA, INDEXER, MLA, QWEN, WIDE_EXPERTS, without
from moeclipse.train.config import TrainConfig


def test_they_are_ours() -> None:
    known = to_flat(TrainConfig()).keys()
    for keys in (QWEN, DEEPSEEK, MLA, DELTA, INDEXER, WIDE_EXPERTS):
        assert keys.keys() <= known


def test_without() -> None:
    assert without(QWEN, "model.d_ff") == {"moe.d_ff": "moe_intermediate_size"}
