"""Write the table of docs/families.md: what every family of transformers does with our experts.

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
    return (
        before
        + BEGIN
        + "\n"
        + HEAD
        + "".join(checked(name).line() for name in families())
        + "\n"
        + END
        + after
    )


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
