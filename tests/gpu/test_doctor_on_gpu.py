"""What doctor measures of the experts' kernels on a real device."""

from __future__ import annotations

import pytest
import torch

from moeclipse.cli.kernels import kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device"),
]


def test_kernels_agree_with_plain_torch_and_are_measured() -> None:
    (item,) = kernels()
    assert item.state == "works", item
    assert "TFLOP/s forward and backward" in item.value
