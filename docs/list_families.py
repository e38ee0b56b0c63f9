"""Write the table of docs/families.md: what every family of transformers does with our experts; those that
do the same share a row.

    python docs/list_families.py

Two ranks compute each family; it takes a minute or two. A test computes all rows again and compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent / "tests" / "hf"), str(DOCS.parent / "tests")]

from every_family import families  # noqa: E402
from test_every_family import PAGE, checked  # noqa: E402

BEGIN, END = "<!-- families -->\n", "<!-- end of families -->\n"
HEAD = (
    "| folder of transformers | experts computed by | output and gradients of `eager` | `share_experts` | "
    "adapters of peft |\n|---|---|---|---|---|\n"
)


def with_table(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    alike: dict[str, list[str]] = {}
    for name in families():
        alike.setdefault(checked(name).cells(), []).append(f"`{name}`")
    most_first = sorted(alike.items(), key=lambda row: -len(row[1]))
    rows = [f"| {', '.join(names)} | {cells} |\n" for cells, names in most_first]
    return before + BEGIN + "\n" + HEAD + "".join(rows) + "\n" + END + after


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
