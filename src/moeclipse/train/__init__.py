"""Data, optimizer, checkpoints, metrics and the loop; called, it trains (`train/one_call`).

moeclipse.train("tiny", run={"steps": 20}, data={"files": ["corpus.txt"]})
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """A package that can be called: `moeclipse.train` is the name of a room, and what one wants of it."""

    def __call__(self, *source: Any, **sections: Any) -> dict[str, Any]:
        from moeclipse.train.one_call import train

        return train(*source, **sections)


sys.modules[__name__].__class__ = _Room
