"""What this program is called from the shell that started it: commands that are printed can be pasted.

`make` installs it beside a Python of its own, which no shell looks into unless somebody has activated it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

NAME = "moeclipse"


def command(*words: object) -> str:
    """This program with these words behind it, as a shell takes them."""
    return f"{program()} {shlex.join(map(str, words))}"


def program() -> str:
    """`moeclipse` where a shell finds it; else its path, or this Python and the module."""
    beside = Path(sys.executable).parent / NAME
    if shutil.which(NAME) is not None:
        return NAME
    if not beside.is_file():
        return f"{shlex.quote(sys.executable)} -m {NAME}"
    try:
        near = Path(os.path.relpath(beside))
    except (OSError, ValueError):  # the folder that this began in is gone
        return shlex.quote(str(beside))
    return shlex.quote(str(beside if near.parts[0] == os.pardir else near))
