"""Private names of torch that this room needs are there, or fail as their users expect."""

from __future__ import annotations

import pytest
import torch

from moeclipse.ops.private_torch import raw_stream_function


def test_the_stream_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False)
    assert raw_stream_function()(2) == 102


def test_a_torch_without_cuda_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ops/peer_reduce` then launches through Triton, as for other errors of this kind."""
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    with pytest.raises(AttributeError):
        raw_stream_function()
