"""Which type rows have: autocast's, the weights', or an error that says what to do."""

from __future__ import annotations

import pytest
import torch

from moeclipse.core.errors import ConfigError
from moeclipse.moe.experts.autocast import is_on, off, rows_for

CPU = torch.device("cpu")


def test_rows_have_the_type_that_linears_would_compute_in() -> None:
    narrow, wide, widest = (torch.ones(2, 3, dtype=t) for t in (torch.bfloat16, torch.float32, torch.float64))
    assert rows_for(wide, wide) is wide
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert is_on(CPU)
        assert rows_for(wide, wide).dtype == torch.bfloat16
        assert rows_for(narrow, wide) is narrow
        assert rows_for(widest, widest) is widest, "autocast never touches float64"
        with off(CPU):
            assert not is_on(CPU)
    for x, weight in ((narrow, wide), (wide, narrow), (wide, widest)):
        with pytest.raises(ConfigError, match="or give both one type"):
            rows_for(x, weight)
