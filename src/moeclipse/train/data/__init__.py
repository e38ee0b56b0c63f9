"""From documents to samples and batches."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    """What stood here in version 0.1 (docs/compatibility.md), loaded when it is asked for."""
    if name in ("Batches", "Samples"):
        from moeclipse.train.data import samples

        return getattr(samples, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
