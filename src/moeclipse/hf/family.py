"""A family of Hugging Face models: one row of the tables in `hf/families` and `hf/dense_families`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moeclipse.hf.derive import Values
from moeclipse.hf.names import EACH, Names


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the table."""

    title: str
    model_type: str
    architecture: str
    keys: Mapping[str, str]
    """Ours -> theirs, besides those that all have in common."""
    defaults: Mapping[str, Any]
    """Theirs, where a file is silent."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Ours, alike in all models of the family."""
    rest: Callable[[Mapping[str, Any]], Values] = lambda _: {}
    needs: tuple[tuple[str, Any, str], ...] = ()
    """(their key, the value we have, what another would need)."""
    names: Names = EACH
    theta: float = 10000.0
    turns_windows: bool = False
    """Its file has rotary position twice: of layers with a window, and of the others."""
    dense: bool = False
    """It has no experts: a run makes some of its blocks (`train/weights/upcycle`)."""
    beside: Mapping[str, Any] = field(default_factory=dict)
    """Theirs, which say nothing of a model of ours and which a file of one must not be silent about."""

    def has_choice_bias(self, values: Values) -> bool:
        """Whether a bias moves the choice of experts in a model of these values of ours."""
        names = self.names
        return bool(names.choice_bias and (values["gate.kind"] == "sigmoid" or names.choice_bias_rows))

    def usual_needs(self) -> list[tuple[str, Any]]:
        """Their keys that have to have one value."""
        return [(key, value) for key, value, _ in self.needs]
