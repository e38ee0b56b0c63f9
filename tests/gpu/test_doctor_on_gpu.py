"""What doctor measures of the experts' kernels on a real device."""

from __future__ import annotations

import pytest

from moeclipse.cli.kernels import kernels


@pytest.mark.gpu
def test_kernels_agree_with_plain_torch_and_are_measured() -> None:
    (item,) = kernels()
    print(item)
    assert item.state == "works", item
    assert "TFLOP/s forward and backward" in item.value
