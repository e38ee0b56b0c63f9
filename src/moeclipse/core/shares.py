"""Even shares of a whole."""

from __future__ import annotations


def even_bounds(total: int, parts: int) -> list[int]:
    """Cut `total` into `parts` contiguous shares that differ by at most one; the first are larger."""
    share, more = divmod(total, parts)
    return [part * share + min(part, more) for part in range(parts + 1)]
