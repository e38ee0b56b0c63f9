"""Recipes of configurations: ends, widths, and vocabularies that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeclipse.core.errors import DataError
from moeclipse.train.data.data_config import DataConfig
from moeclipse.train.documents.cache import IN_MEMORY
from moeclipse.train.documents.recipe import recipe_of
from moeclipse.train.documents.tokenizer import Recipe


def test_bytes() -> None:
    assert recipe_of(DataConfig(), None, 256, 0, plain=True) == Recipe(lenient=True)
    config = DataConfig(files=("a.jsonl",), field="body")
    assert recipe_of(config, None, 256, 0, plain=False) == Recipe(field="body", end=0)
    assert recipe_of(DataConfig(files=("a",), end_of_text="9"), None, 256, 0, plain=True).end == 9


@pytest.mark.parametrize(("words", "dtype"), [(20, "uint8"), (300, "uint16"), (70_000, "uint32")])
def test_tokens_are_as_wide_as_the_vocabulary(tmp_path: Path, words: int, dtype: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    vocab = {f"w{i}": i for i in range(words)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="w0")).save(str(path))
    config = DataConfig(files=("a.jsonl",), tokenizer=str(path), end_of_text="w3")
    recipe = recipe_of(config, path, words, 0, plain=False)
    assert (recipe.dtype, recipe.end, recipe.tokenizer) == (dtype, 3, str(path))
    assert len(recipe.digest) == 64
    assert recipe_of(config, path, words - 1, IN_MEMORY - 1, plain=False) == recipe, "may not occur"
    says = rf"data.tokenizer: there are tokens up to {words - 1}.* set it to at least {words}"
    with pytest.raises(DataError, match=says):
        recipe_of(config, path, words - 1, IN_MEMORY, plain=False)
