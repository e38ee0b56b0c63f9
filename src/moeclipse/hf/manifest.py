"""SHA-256 of the files that we wrote into a Hugging Face folder, in a file beside them.

Others ignore it. Where it is there, a folder is verified before a weight is taken from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from moeclipse.core.errors import CheckpointError

MANIFEST = "moeclipse.json"


def encode(files: Mapping[str, str]) -> bytes:
    return json.dumps({"sha256": dict(sorted(files.items()))}, indent=1).encode() + b"\n"


def check_manifest(path: Path, share: int = 0, num_shares: int = 1) -> None:
    """Nothing without a manifest; with one, CheckpointError names the first file of a share that has
    changed."""
    try:
        files = dict(json.loads((path / MANIFEST).read_bytes())["sha256"])
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}/{MANIFEST} cannot be read: {error!r}; remove it, or convert again"
        ) from None
    for name, expected in sorted(files.items())[share::num_shares]:
        try:
            with (path / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{path}: {name} cannot be read: {error.strerror}; convert again") from None
        if found != expected:
            raise CheckpointError(
                f"{path}: {name} has changed (its SHA-256 differs from that in {MANIFEST}); convert again"
            )
