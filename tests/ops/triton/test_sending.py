"""All functions of these kernels took part in the comparison with their references."""

from __future__ import annotations

import pytest
from interpreted import assert_exchange_ran


def test_every_function_ran() -> None:
    pytest.importorskip("triton")
    from moeclipse.ops.triton import sending

    assert_exchange_ran(sending)
