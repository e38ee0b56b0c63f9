"""What this program is called from the shell that started it: commands that are printed can be pasted.

`make` installs it beside a Python of its own, which no shell looks into unless somebody has activated it.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

NAME = "moeclipse"


def program() -> str:
    """`moeclipse` where a shell finds it; else its path, or this Python and the module."""
    beside = Path(sys.executable).parent / NAME
    if shutil.which(NAME) is not None:
        return NAME
    if not beside.is_file():
        return f"{sys.executable} -m {NAME}"
    try:
        near = Path(os.path.relpath(beside))
    except (OSError, ValueError):  # the folder that this began in is gone
        return str(beside)
    return str(beside if near.parts[0] == os.pardir else near)
