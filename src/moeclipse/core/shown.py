"""Words of others, shown so that they drive no terminal and forge no line.

    visible(text)               one line: what drives a terminal is written as Python does, \\x1b or \\n
    visible(text, lines=True)   ends of lines and tabs stay what they are
    say(text)                   prints it so; `error=True`: to stderr
    warn(text)                  Python's warning of it, for calls from Python

Idea. A file's name, a key of its JSON, the message of a chat template may hold escape sequences, which move
the cursor, colour what follows or put words on the clipboard, and ends of lines, behind which anything can
pose as ours. Errors have their text through here when they are made (`core/errors`), tables and notes when
they are drawn (`cli/terminal`), all other lines by `say` and `warn`; `make lint` finds who prints elsewhere.

Contract. What is returned can be encoded: half a surrogate pair, which is how Python reads names that are not
UTF-8, is written out, too.
"""

from __future__ import annotations

import re
import sys
import warnings

MOST = 4000
"""Characters of one sentence: more is somebody's file."""
SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
DRIVES = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, ends of lines, what turns the direction of writing, halves of surrogate pairs."""


def visible(text: str, *, lines: bool = False) -> str:
    if text.isprintable():
        return text
    return DRIVES.sub(lambda found: found[0] if lines and found[0] in "\n\t" else _escaped(found[0]), text)


def _escaped(char: str) -> str:
    code = ord(char)
    return SHORT.get(char) or (f"\\x{code:02x}" if code < 1 << 8 else f"\\u{code:04x}")


def sentence(text: str) -> str:
    """One line of an error: its middle is left out where it is longer than anybody reads."""
    text = visible(text)
    return text if len(text) <= MOST else f"{text[: MOST // 2]} ... {text[-MOST // 4 :]}"


def say(text: str, *, error: bool = False) -> None:
    print(visible(text, lines=True), file=sys.stderr if error else sys.stdout, flush=True)


def warn(text: str, kind: type[Warning] = UserWarning, *, stacklevel: int = 2) -> None:
    """`stacklevel` as in `warnings.warn`, counted from the caller."""
    warnings.warn(visible(text), kind, stacklevel=stacklevel + 1)
