"""Write the list of mutants in docs/testing.md, from what `tests/mutants_of/` says of each.

    python docs/list_mutants.py

A test writes it again and compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "tests"))

from mutants_of import MUTANTS  # noqa: E402

PAGE = DOCS / "testing.md"
BEGIN, END = "<!-- mutants -->\n", "<!-- end of mutants -->\n"
HEAD = "| file | change | what would go wrong for the user | test |\n|---|---|---|---|\n"


def mutant_list() -> str:
    rows = []
    for mutant in MUTANTS:
        mark, test = " *" if mutant.survived else "", mutant.test.split("::")[1]
        rows.append(f"| `{mutant.file}` | {mutant.change}{mark} | {mutant.harm} | `{test}` |\n")
    return "\n" + HEAD + "".join(rows) + "\n"


def with_mutants(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + mutant_list() + END + after


if __name__ == "__main__":
    PAGE.write_text(with_mutants(PAGE.read_text()))
