"""Numbers for the host: what they were when the reading began; nothing waits before they are wanted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fake_cuda import FakeCuda

from moeclipse.comm.async_ops.reading import Reading
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CommError


def begin(value: torch.Tensor, deadline_s: float = 0.1) -> Reading:
    watch = replace(Mesh.single().watch, deadline_s=deadline_s)
    return Reading(value, watch, "exchange of numbers", (0,))


def test_on_the_cpu_numbers_are_there() -> None:
    value = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    assert begin(value).get() == [[1.0, 2.0], [3.0, 4.0]]
    assert begin(torch.zeros(0)).get() == []


class OnDevice:
    """A tensor that says it is on a GPU."""

    is_cuda, dtype = True, torch.int64

    def __init__(self, value: torch.Tensor) -> None:
        self.value, self.shape = value, value.shape


def test_the_host_waits_for_the_copy_alone_and_no_longer_than_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, pin_memory: empty(shape, dtype=dtype))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda into, value, non_blocking: into.set_(value.value))
    reading = begin(OnDevice(torch.tensor([5, 7])))  # type: ignore[arg-type]
    assert [line for line in cuda.take() if "host" in line] == [], "nobody waits for the device"
    assert reading.get() == [5, 7]
    assert reading.get() == [5, 7], "again the same"
    cuda.ready = False
    with pytest.raises(CommError, match="exchange of numbers"):
        reading.get()
