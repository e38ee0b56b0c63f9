"""The small files of a Hugging Face folder: its configuration and its tokenizer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from moeclipse.core.errors import CheckpointError
from moeclipse.core.outside import read_bytes, read_table, told_of

CONFIG = "config.json"
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json"),
)
"""What is copied as it is, where it is there."""
MOST_SMALL = 1 << 28
"""Bytes of such a file; a tokenizer.json of a large vocabulary has some thirty million."""
HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""What a model of the Hugging Face Hub is called: OWNER/NAME."""
NEEDED = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Without any of these there is no tokenizer."""


def is_model_folder(path: Path) -> bool:
    """Whether a folder is one of a Hugging Face model, and no checkpoint of ours."""
    return (path / CONFIG).exists() and not (path / "manifest.json").exists()


def config_of(path: Path) -> dict[str, Any]:
    """`config.json` of a folder."""
    if not path.is_dir():
        known = f"give one with {CONFIG} and safetensors files"
        if HUB.fullmatch(str(path)):
            known = f"a model of the Hugging Face Hub comes by: hf download {path} --local-dir {path.name}"
        raise CheckpointError(f"{path}: there is no such folder; {known}")
    try:
        # A key that is not ours may be infinite, and is in some families.
        return read_table(path / CONFIG, inside=path, numbers=False)
    except FileNotFoundError:
        raise CheckpointError(f"{path} has no {CONFIG}; it is no folder of a Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{told_of(path / CONFIG, error)}; download it again") from None


def small_files(path: Path, *, tokenizer: bool = True) -> dict[str, bytes]:
    """Tokenizer files and the like, by name; CheckpointError where a tokenizer is wanted and missing."""
    found = {}
    for name in TOKENIZER:
        try:
            found[name] = read_bytes(path / name, most=MOST_SMALL, inside=path)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{told_of(path / name, error)}; download it again") from None
    if tokenizer and not any(name in found for name in NEEDED):
        raise CheckpointError(
            f"{path} has no tokenizer ({', '.join(NEEDED)}); put one there, or leave it out with "
            "--no-tokenizer"
        )
    return found


def byte_tokenizer() -> dict[str, bytes]:
    """Files of a tokenizer whose tokens are the bytes of UTF-8, by their numbers.

    `tokenizers` knows bytes by printable characters: itself where a byte is one, else the next from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    names = {chr(byte if byte in printable else next(spare)): byte for byte in range(256)}
    as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": names, "merges": [], "ignore_merges": False, "byte_fallback": False}
    tree = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": as_bytes,
        "decoder": as_bytes,
        "model": model,
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {
        "tokenizer.json": json.dumps(tree).encode() + b"\n",
        "tokenizer_config.json": json.dumps(settings, indent=2).encode() + b"\n",
    }
