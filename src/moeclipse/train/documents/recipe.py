"""From a configuration to a recipe: which tokenizer, which end, how wide a token; and does the model fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moeclipse.core.errors import DataError
from moeclipse.train.data.data_config import DataConfig
from moeclipse.train.documents.cache import IN_MEMORY
from moeclipse.train.documents.chat import special_tokens, template_beside, template_file
from moeclipse.train.documents.tokenizer import Recipe, digest_of, end_token, load_tokenizer, settings_beside


def recipe_of(config: DataConfig, path: Path | None, vocab_size: int, size: int, *, plain: bool) -> Recipe:
    """How documents become tokens.

    `path`: the tokenizer; `size`: bytes of documents; `plain`: all of them are text files.
    """
    tokenizer, largest = None, 255
    if path is not None:
        tokenizer = load_tokenizer(path, config.tokenizer)
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    chat, settings = config.kind == "chat", settings_beside(path) if path is not None else {}
    if chat and path is None:
        raise DataError(
            "data.kind = 'chat' needs data.tokenizer: a folder with a tokenizer and a chat template"
        )
    # Nothing was put between texts before there was such a key, and checkpoints know what they read.
    ends = not chat and (not plain or config.documents == "packed")
    end = end_token(config.end_of_text, tokenizer, path, wanted=ends)
    # A small text may do without the tokens that do not fit; nobody should tokenise for hours to learn it.
    if end >= vocab_size or (size >= IN_MEMORY and largest >= vocab_size):
        raise DataError(
            f"data.{'end_of_text' if end >= vocab_size else 'tokenizer'}: there are tokens up to "
            f"{max(end, largest)}, but model.vocab_size is {vocab_size}; set it to at least "
            f"{max(end, largest) + 1}, or give another tokenizer"
        )
    return Recipe(
        tokenizer=str(path or ""),
        digest=digest_of(path) if path else "",
        field=config.field or ("messages" if chat else "text"),
        end=end,
        dtype=str(np.min_scalar_type(max(largest, end))),
        lenient=not config.files,
        template=template_beside(path, settings) if chat and path is not None else "",
        template_file=template_file(path) if chat and path is not None else "",
        specials=special_tokens(settings) if chat else {},
    )
