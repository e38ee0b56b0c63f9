"""What people call a step: the third is step 3, and behind it 3 are done.

Progress, curves, checkpoints and whoever comes from torchtitan or from transformers (`global_step`) count so.
Records count from 0: `step` in metrics.jsonl, summary.json, load.npz and trace.json means what it always has,
and programs read it. So whatever is printed, drawn or said of a step of a record goes through here, once.
"""

from __future__ import annotations

import re

WINDOW = re.compile(r"steps (\d+) to (\d+)")
"""As a summary says it, in terms of records."""


def nth(step: int) -> int:
    """Of the step of a record."""
    return step + 1


def nth_window(text: str) -> str:
    """'steps 4 to 300' of a record's 'steps 3 to 299'; what is no window stays as it is."""
    return WINDOW.sub(lambda found: f"steps {nth(int(found[1]))} to {nth(int(found[2]))}", text)
