"""SHA-256 of the files that we wrote into a Hugging Face folder, in a file beside them.

Others ignore it. Where it is there, a folder is verified before a weight is taken from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from moeclipse.core.errors import CheckpointError
from moeclipse.core.outside import open_file, read_table, table, told_of

MANIFEST = "moeclipse.json"


def encode(files: Mapping[str, str]) -> bytes:
    return json.dumps({"sha256": dict(sorted(files.items()))}, indent=1).encode() + b"\n"


def check_manifest(path: Path, share: int = 0, num_shares: int = 1) -> None:
    """Nothing without a manifest; with one, CheckpointError names the first file of a share that has
    changed."""
    try:
        files = table(read_table(path / MANIFEST, inside=path).get("sha256"))
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{told_of(path / MANIFEST, error)}; remove it, or convert again") from None
    for name in files:
        if Path(name).name != name or name in ("", ".", "..") or "\0" in name:
            raise CheckpointError(f"{path}/{MANIFEST} names {name!r}, which is no file of the folder")
    for name, expected in sorted(files.items())[share::num_shares]:
        try:
            with open_file(path / name, inside=path) as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{path}: {name} cannot be read: {error.strerror}; convert again") from None
        if found != expected:
            raise CheckpointError(
                f"{path}: {name} has changed (its SHA-256 differs from that in {MANIFEST}); convert again"
            )
