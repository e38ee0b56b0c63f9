"""Every family of models writes from its folder: read piece by piece, logits are those of a whole forward."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tiny_models import TINY, write_tiny

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.model.decode import Decoder, writing
from moeclipse.moe.tokens import Tokens
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.data.vocabulary import ByteVocabulary
from moeclipse.train.generate.text import LanguageModel, load_model
from moeclipse.train.weights.open_model import find_model

TEXT = [5, 2, 9, 40, 3, 3, 17, 8]
BEGINNINGS = (3, 1)


def read(model: LanguageModel) -> list[torch.Tensor]:
    """Two rows with beginnings of unequal length, which grow to the same text."""
    decoder = Decoder(model.model, 2, len(TEXT))
    found: list[list[torch.Tensor]] = [[], []]
    with writing(model.model):
        new = [TEXT[:beginning] for beginning in BEGINNINGS]
        while any(new):
            logits_BV = decoder.read(new)
            for row, logits_V, more in zip(found, logits_BV, new, strict=True):
                row += [logits_V] if more else []
            new = [TEXT[len(text) : len(text) + 1] for text in decoder.texts]
    return [torch.stack(row) for row in found]


def opened(mesh: Mesh, folder: Path) -> LanguageModel:
    """Without a tokenizer: tokens are given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moeclipse.train.weights.open_model.FoundModel.vocabulary", lambda *_: ByteVocabulary())
        return load_model(str(folder), mesh=mesh, dtype="float64", peer="off")


def families(mesh: Mesh, root: Path) -> dict[str, float]:
    worst = {}
    for name in TINY:
        write_tiny(name, root / name)
        model = opened(mesh, root / name)
        with writing(model.model):
            tokens = Tokens(mesh=mesh, first=0, total=len(TEXT))
            whole = model.model.logits(model.model.hidden(torch.tensor([TEXT]), tokens)[0])
        worst[name] = max(
            difference(found, whole[beginning - 1 :])
            for found, beginning in zip(read(model), BEGINNINGS, strict=True)
        )
    return worst


def cut(mesh: Mesh, root: Path, names: tuple[str, ...]) -> list[list[torch.Tensor]]:
    return [read(opened(mesh, root / name)) for name in names]


def test_all_families_and_their_layouts(tmp_path: Path) -> None:
    worst = run_alone(families, tmp_path)
    assert worst.keys() == TINY.keys()
    assert max(worst.values()) < 1e-12, worst
    names = ("deepseek_v3", "gpt_oss", "olmoe", "qwen3_next")
    expected = run_alone(cut, tmp_path, names)
    for layout in ({}, {"tp": 2}):
        for rank in run_ranks(2, cut, tmp_path, names, **layout):
            for model, wanted in zip(rank, expected, strict=True):
                for mine, theirs in zip(model, wanted, strict=True):
                    assert difference(mine, theirs) < 1e-12
    mixtral = find_model(tmp_path / "mixtral")
    assert mixtral.context == 64
    assert mixtral.ends == {1}
    with pytest.raises(ConfigError, match=r"no tokenizer.json; give its"):
        mixtral.vocabulary()
    shutil.copy(tmp_path / "mixtral" / "config.json", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 6]}')
    assert find_model(tmp_path).ends == {4, 6}
