"""A folder that we wrote is verified."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from moeclipse.core.errors import CheckpointError
from moeclipse.hf.manifest import MANIFEST, check_manifest, encode


def test_changed_missing_and_unreadable(tmp_path: Path) -> None:
    check_manifest(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode())
    files = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("a", "b")}
    (tmp_path / MANIFEST).write_bytes(encode(files))
    check_manifest(tmp_path)
    (tmp_path / "b").write_bytes(b"c")
    with pytest.raises(CheckpointError, match=r"b has changed .its SHA-256"):
        check_manifest(tmp_path)
    check_manifest(tmp_path, share=0, num_shares=2)  # another rank looks at b
    with pytest.raises(CheckpointError, match="b has changed"):
        check_manifest(tmp_path, share=1, num_shares=2)
    (tmp_path / "b").unlink()
    with pytest.raises(CheckpointError, match="b cannot be read"):
        check_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text("{}")
    with pytest.raises(CheckpointError, match="remove it, or convert again"):
        check_manifest(tmp_path)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "a/b", ""])
def test_only_files_of_the_folder_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / MANIFEST).write_bytes(encode({name: hashlib.sha256(b"x").hexdigest()}))
    with pytest.raises(CheckpointError, match="which is no file of the folder"):
        check_manifest(folder)


def test_what_a_link_leads_to_elsewhere_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a").symlink_to(tmp_path / "secret")
    (folder / MANIFEST).write_bytes(encode({"a": hashlib.sha256(b"x").hexdigest()}))
    with pytest.raises(CheckpointError, match=r"a cannot be read: it leads to .*secret, outside of"):
        check_manifest(folder)
