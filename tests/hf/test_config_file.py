"""Small files of a folder; what is wrong with config.json, `test_folder.py` sees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moeclipse.core.errors import CheckpointError
from moeclipse.hf.config_file import config_of, is_model_folder, small_files


def test_small_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    assert config_of(tmp_path) == {"model_type": "mixtral"}
    assert small_files(tmp_path, tokenizer=False) == {}
    with pytest.raises(CheckpointError, match=r"has no tokenizer .*--no-tokenizer"):
        small_files(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        small_files(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    assert small_files(tmp_path) == {"tokenizer.json": b"[]", "tokenizer_config.json": b"{}"}


def test_what_a_link_leads_to_is_not_copied(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret").write_text("of somebody else")
    (folder / "vocab.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"vocab.json leads to .*secret, outside of"):
        small_files(folder)
    (folder / "vocab.json").unlink()
    os.mkfifo(folder / "vocab.json")
    with pytest.raises(CheckpointError, match=r"vocab.json is a pipe, not a regular file"):
        small_files(folder)


def test_a_checkpoint_of_ours_is_no_model_folder(tmp_path: Path) -> None:
    assert not is_model_folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert is_model_folder(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    assert not is_model_folder(tmp_path)
