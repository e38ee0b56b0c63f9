"""Numbers for the host: what they were when the reading began; nothing waits before they are wanted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fake_cuda import FakeCuda

from moeclipse.comm.async_ops import reading
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


class OnDevice(torch.Tensor):
    """A tensor that says it is on a GPU, and lies where it lies."""

    is_cuda = True


def on_device(value: torch.Tensor) -> torch.Tensor:
    return value.as_subclass(OnDevice)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Kernels see the memory of the host: here a view of it."""
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda shape, dtype, pin_memory=False, device=None: empty(shape, dtype=dtype)
    )
    monkeypatch.setattr(
        reading, "flat", lambda tensor, _: tensor.as_subclass(torch.Tensor).view(-1).view(torch.uint8)
    )
    return FakeCuda(monkeypatch)


def test_the_host_waits_for_the_copy_alone_and_no_longer_than_the_deadline(cuda: FakeCuda) -> None:
    begun = begin(on_device(torch.tensor([5, 7])))
    assert [line for line in cuda.take() if "host" in line] == [], "nobody waits for the device"
    assert begun.get() == [5, 7]
    assert begun.get() == [5, 7], "again the same"
    cuda.ready = False
    with pytest.raises(CommError, match="exchange of numbers"):
        begun.get()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_all_bytes_are_moved(cuda: FakeCuda, dtype: torch.dtype, count: int) -> None:
    del cuda
    value = torch.arange(count).to(dtype)
    assert begin(on_device(value)).tensor().equal(value)
    assert begin(on_device(value[None].expand(2, -1))).tensor().equal(value[None].expand(2, -1))


def test_pinned_memory_is_held_until_its_kernel_has_run(cuda: FakeCuda) -> None:
    reading.HELD.clear()
    cuda.ready = False
    for _ in range(3):
        begin(on_device(torch.tensor([1.0])))
    assert len(reading.HELD) == 3
    cuda.ready = True
    begin(on_device(torch.tensor([1.0])))
    assert len(reading.HELD) == 1
