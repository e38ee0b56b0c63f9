"""A launch that is like an earlier one asks Triton nothing, and one that is not always does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moeclipse.ops import launch as launches
from moeclipse.ops.launch import launch


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[tuple[Any, ...]] = []

    def run(self, *given: Any) -> None:
        self.calls.append(given)


class Kernel:
    """As Triton's: a call with a grid launches, and gives what was compiled."""

    def __init__(self, *arg_names: str) -> None:
        self.arg_names = list(arg_names)
        self.asked: list[tuple[Any, ...]] = []
        self.compiled: list[Compiled] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*operands: Any, **constants: Any) -> Compiled:
            self.asked.append((grid, operands, constants))
            self.compiled.append(Compiled(f"number {len(self.asked)}"))
            return self.compiled[-1]

        return call


@pytest.fixture(autouse=True)
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    launches._kept.cache_clear()
    monkeypatch.setattr(launches, "_has_device", lambda: True)
    monkeypatch.setattr(launches, "_raw_stream", lambda: lambda device: 700 + device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


ROWS = torch.zeros(64)


def test_the_second_launch_goes_to_what_the_first_one_compiled() -> None:
    kernel = Kernel("x", "count", "none", "BLOCK", "EVEN")
    for grid, count in (((4,), 32), ((8, 2), 48)):
        launch(kernel, grid, ROWS, count, None, EVEN=True, BLOCK=128, num_warps=4)
    assert len(kernel.asked) == 1
    # Constants stand where the kernel has them; options of the compiler are not among its arguments.
    head = (8, 2, 1, 700, "function", "metadata", None, None, None)
    assert kernel.compiled[0].calls == [(*head, ROWS, 48, None, 128, True)]


def test_whatever_could_mean_another_kernel_is_asked_for() -> None:
    kernel = Kernel("x", "count", "BLOCK")
    usual: tuple[Any, Any, int] = (ROWS, 32, 128)
    others = [
        (ROWS.double(), 32, 128),
        (ROWS[1:], 32, 128),  # begins 4 bytes behind a multiple of 16
        (None, 32, 128),
        (ROWS, 1, 128),
        (ROWS, 33, 128),
        (ROWS, 1 << 32, 128),
        (ROWS, 32.0, 128),
        (ROWS, 32, 256),
    ]
    for number, (x, count, block) in enumerate((usual, *others), 1):
        for _ in range(2):
            launch(kernel, (1,), x, count, BLOCK=block)
            assert len(kernel.asked) == number
    launch(Kernel("x", "count", "BLOCK"), (1,), ROWS, 32, BLOCK=128)
    assert len(kernel.asked) == len(others) + 1


def test_other_warps_and_devices_are_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel("x", "BLOCK")
    launch(kernel, (1,), ROWS, BLOCK=128, num_warps=4)
    launch(kernel, (1,), ROWS, BLOCK=128, num_warps=8)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launch(kernel, (1,), ROWS, BLOCK=128, num_warps=8)
    assert len(kernel.asked) == 3
    launch(kernel, (1,), ROWS, BLOCK=128, num_warps=8)
    assert kernel.compiled[2].calls[0][3] == 701
    assert len(kernel.asked) == 3


def test_a_profiler_of_triton_sees_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel("x")
    monkeypatch.setattr(launches, "is_watched", lambda: True)
    for number in range(1, 4):
        launch(kernel, (1,), ROWS)
        assert len(kernel.asked) == number


def test_hooks_are_what_a_profiler_sets() -> None:
    from triton import knobs

    def hook(_: Any) -> None:
        pass

    assert not launches.is_watched()
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        assert launches.is_watched()
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)


def test_constants_before_operands_leave_launches_to_triton() -> None:
    kernel = Kernel("BLOCK", "x", "EVEN")  # EVEN has a default
    for number in range(1, 4):
        launch(kernel, (1,), ROWS, BLOCK=128)
        assert len(kernel.asked) == number
