"""Even shares of a whole."""

from __future__ import annotations

from collections.abc import Iterable


def even_bounds(total: int, parts: int) -> list[int]:
    """Cut `total` into `parts` contiguous shares that differ by at most one; the first are larger."""
    share, more = divmod(total, parts)
    return [part * share + min(part, more) for part in range(parts + 1)]


def bounds_of_all(totals: Iterable[int], parts: Iterable[int]) -> list[list[int]]:
    """Those of several, each cut into parts of its own."""
    return [
        [0, total] if number == 1 else even_bounds(total, number)
        for total, number in zip(totals, parts, strict=True)
    ]
