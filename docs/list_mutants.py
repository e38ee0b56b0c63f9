"""What each mutant changes, whom it would hurt, and the test that must notice it.

    python docs/list_mutants.py              all of them
    python docs/list_mutants.py pipeline     those with this word in file or test

`tests/mutants_of/` holds them, and tests/mutants.py replays them. Those with a * survived, when they were
first made, every test of the file that bears their module's name.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from mutants_of import MUTANTS

HEAD = "| file | change | what would go wrong for the user | test |\n|---|---|---|---|\n"


def mutant_list(word: str = "") -> str:
    rows = []
    for mutant in MUTANTS:
        if word in mutant.file or word in mutant.test:
            mark, test = " *" if mutant.survived else "", mutant.test.split("::")[1]
            rows.append(f"| `{mutant.file}` | {mutant.change}{mark} | {mutant.harm} | `{test}` |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    print(mutant_list(*sys.argv[1:]), end="")
