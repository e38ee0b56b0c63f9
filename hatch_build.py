"""The long description of a package: README, with links that lead somewhere outside of a checkout.

    MOECLIPSE_ADDRESS=https://HOST/OWNER/moeclipse python -m hatchling build

With the repository's address links become absolute, to the tag of this version, and the package gets its
project links. Without one their text stays, and pictures go: nothing in a package leads nowhere.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def described(text: str, address: str, tag: str) -> str:
    """README as it stands anywhere: code as it is, links absolute, or told without the link."""

    def link(found: re.Match[str]) -> str:
        if re.match(r"\w+:", found["target"]):
            return found[0]
        if not address:
            return "" if found["picture"] else found["text"]
        kind = "raw" if found["picture"] else "blob"
        return f"{found['picture']}[{found['text']}]({address.rstrip('/')}/{kind}/{tag}/{found['target']})"

    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def addresses(address: str, tag: str) -> dict[str, str]:
    """The project's links, as an index shows them."""
    if not address:
        return {}
    base = address.rstrip("/")
    pages = {
        "Documentation": f"blob/{tag}/docs/tutorial-1-first-run.md",
        "Changelog": f"blob/{tag}/CHANGELOG.md",
        "Issues": "issues",
    }
    return {"Repository": base} | {name: f"{base}/{page}" for name, page in pages.items()}


class Description(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        address, root = os.environ.get("MOECLIPSE_ADDRESS", ""), Path(self.root)
        (version,) = re.findall(
            r'^__version__ = "([^"]+)"', (root / "src/moeclipse/__init__.py").read_text(), re.MULTILINE
        )
        text = described((root / "README.md").read_text(encoding="utf-8"), address, f"v{version}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = addresses(address, f"v{version}")
