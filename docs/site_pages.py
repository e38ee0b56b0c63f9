"""Pages of the site that are made from the code while it is built: keys, names, commands, files, the home.

    make docs

MkDocs calls `on_files`; the pages exist in the site alone, so nothing has to be kept in step by hand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import re
import runpy
from pathlib import Path
from typing import Any

import moeclipse
from moeclipse.cli.main import COMMANDS, main
from moeclipse.core.config import keys_of, to_flat
from moeclipse.core.toml import docs_of
from moeclipse.core.values import expected_text
from moeclipse.train.config import TrainConfig

ROOT = Path(__file__).parent.parent


def keys_page() -> str:
    """Every key of the configuration: what it takes, its default, what it is for."""
    lines = ["# Keys of the configuration", "", "All are flags, too: `gate.top_k` is `--gate.top-k`.", ""]
    kinds, usual = keys_of(TrainConfig), to_flat(TrainConfig())
    for section in dataclasses.fields(TrainConfig):
        kind: Any = type(getattr(TrainConfig(), section.name))
        docs = docs_of(kind)
        lines += ["", f"## {section.name}", "", "| key | takes | default | |", "|---|---|---|---|"]
        for name in (field.name for field in dataclasses.fields(kind)):
            key = f"{section.name}.{name}"
            cells = (f"`{key}`", expected_text(kinds[key]), f"`{usual[key]!r}`", docs.get(name, ""))
            lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def python_page() -> str:
    """Every public name with its signature and what it says of itself."""
    lines = ["# Python", ""]
    for name in sorted(set(moeclipse.__all__) - {"__version__"}):
        thing = getattr(moeclipse, name)
        try:
            signature = str(inspect.signature(thing))
        except (TypeError, ValueError):
            signature = ""
        own = getattr(thing, "__init__", None) if inspect.isclass(thing) else None
        told = [inspect.getdoc(thing) or "", (own and own.__doc__ and inspect.getdoc(own)) or ""]
        lines += [f"## moeclipse.{name}", "", "```python", f"{name}{shortened(signature)}", "```", ""]
        lines += ["```text", "\n\n".join(filter(None, told)), "```", ""] if any(told) else []
    return "\n".join(lines) + "\n"


def shortened(signature: str) -> str:
    """Without the rooms in front of types, and with a line for each argument where it is long."""
    text = re.sub(r"\b(?:moeclipse|torch|collections|typing|pathlib)(?:\.\w+)*\.(?=\w)", "", signature)
    return text if len(text) < 90 else text.replace(", ", ",\n    ").replace("(", "(\n    ", 1)


def commands_page() -> str:
    lines = ["# Commands", "", "Shells complete them: `moeclipse completion bash`, `zsh` or `fish`.", ""]
    for command in COMMANDS:
        with contextlib.redirect_stdout(io.StringIO()) as told, contextlib.suppress(SystemExit):
            main([command, "--help"])
        lines += [f"## moeclipse {command}", "", "```text", told.getvalue().rstrip(), "```", ""]
    return "\n".join(lines) + "\n"


def files_page() -> str:
    """Every file of the package with the first sentence of its docstring."""
    made: Any = runpy.run_path(str(ROOT / "docs" / "list_files.py"))
    return f"# Files\n\nHow they fit together: [design](design.md).\n\n{made['file_list']()}"


def home_page() -> str:
    """The README, with links as pages of the site see them."""
    text = (ROOT / "README.md").read_text()
    return re.sub(r"\]\(docs/", "](", re.sub(r"\]\((?!docs/|http|#)[^)]*\)", "](design.md)", text))


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    made = {"index": home_page, "reference-keys": keys_page, "reference-python": python_page}
    made |= {"reference-commands": commands_page, "reference-files": files_page}
    for name, page in made.items():
        files.append(File.generated(config, f"{name}.md", content=page()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The README is the home of the site."""
    return markdown.replace("](../README.md", "](index.md")
