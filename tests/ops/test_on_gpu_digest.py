"""Digests on a CUDA device are those of a CPU, for rows and tensors of any length."""

from __future__ import annotations

import pytest
import torch

from moeclipse.ops.digest import CHUNK, SPAN, digest, digest_rows

HAS_GPU = torch.cuda.device_count() > 0  # through NVML: asking CUDA itself would spoil forked ranks
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(1,), (7, 3), (3, SPAN + 5), (2 * CHUNK + 1,)])
def test_the_number_of_a_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.randint(0, 200, shape).to(dtype)
    assert int(digest(values.cuda())) == int(digest(values))
    if values.ndim == 2:
        assert digest_rows(values.cuda()).tolist() == digest_rows(values).tolist()
