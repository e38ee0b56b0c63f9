"""Data, optimizer, checkpoints, metrics and the loop; called, it trains (`train/one_call`).

moeclipse.train("tiny", run={"steps": 20}, data={"files": ["corpus.txt"]})
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moeclipse.train.config import TrainConfig
    from moeclipse.train.observe.run_figures import RunSummary


class _Room(ModuleType):
    """A package that can be called: `moeclipse.train` is the name of a room, and what one wants of it."""

    def __call__(
        self,
        source: TrainConfig | str | Path = "",
        /,
        *,
        resume: str = "off",
        **sections: Mapping[str, object],
    ) -> RunSummary:
        from moeclipse.train.one_call import train

        return train(source, resume=resume, **sections)


sys.modules[__name__].__class__ = _Room
