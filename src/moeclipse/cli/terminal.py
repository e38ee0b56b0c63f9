"""The console that all commands draw on: text of others neither drives it nor is read as markup.

Rich draws texts of our own and of others alike: a run's name, an expert's layer, a note about a column. What
a piece of text may do to a terminal is decided where all of them pass, behind the layout and before colours
are put around them; what rich itself sends, colours and the cursor of a progress bar, goes through.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from moeclipse.core.shown import visible


class Terminal(Console):
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(visible(text, lines=True), style)


def terminal(**more: Any) -> Terminal:
    """On stdout; lines are not broken where they meet the edge, unless asked for."""
    return Terminal(**{"file": sys.stdout, "highlight": False, "markup": False, "soft_wrap": True, **more})
