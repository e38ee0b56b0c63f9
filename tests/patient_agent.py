"""Lets torch's agent, which gives ranks half a minute to end before it kills them, give them an hour.

Who ends within a test's time was ended by us, however slow the machine. In a `sitecustomize.py`:
`sys.meta_path.insert(0, PatientAgent())`.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from typing import Any

AGENT = "torch.distributed.elastic.multiprocessing.api"


class PatientAgent(importlib.abc.MetaPathFinder):
    """Changes the agent's module once it is imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name != AGENT:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def patient(module: Any) -> None:
            execute(module)
            assert module.PContext.close.__defaults__ == (None, 30)
            module.PContext.close.__defaults__ = (None, 3600)

        spec.loader.exec_module = patient  # type: ignore[method-assign]
        return spec
