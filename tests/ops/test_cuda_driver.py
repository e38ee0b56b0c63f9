"""The CUDA driver over a library that only pretends: what it is given, and what is said when it refuses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from moeclipse.core.errors import CommError
from moeclipse.ops import cuda_driver as driver_module
from moeclipse.ops.cuda_driver import SIGNATURES, CudaDriver, DriverError, IpcHandle, cuda_driver

BASE = 0x7F00_0000_0000


class Library:
    """Functions as ctypes has them: arguments are converted by the signatures that they were given."""

    def __init__(self, **functions: Callable[..., int]) -> None:
        for name, function in functions.items():
            kinds = [ctypes.c_int, *SIGNATURES[name]]
            setattr(self, name, ctypes.CFUNCTYPE(*kinds)(function))


def explain(_status: int, text: Any) -> int:
    text[0] = b"out of patience"
    return 0


def test_addresses_and_names_of_allocations() -> None:
    def range_of(base: Any, _size: Any, address: int) -> int:
        base[0] = address // 4096 * 4096
        return 0

    def name(handle: Any, base: int) -> int:
        handle[0].bytes[:8] = list(base.to_bytes(8, "little"))
        return 0

    def open_one(opened: Any, handle: IpcHandle, flags: int) -> int:
        assert flags == 1, "access between devices is switched on when it is needed"
        opened[0] = int.from_bytes(bytes(handle.bytes)[:8], "little") + (1 << 60)
        return 0

    closed: list[int] = []

    def close(address: int) -> int:
        closed.append(address)
        return 4  # the owner has gone: nothing to be said

    def on_device(there: Any, address: int, flags: int) -> int:
        there[0] = address + 8 * (flags + 1)
        return 0

    driver = CudaDriver(
        Library(
            cuMemGetAddressRange_v2=range_of,
            cuIpcGetMemHandle=name,
            cuIpcOpenMemHandle_v2=open_one,
            cuIpcCloseMemHandle=close,
            cuMemHostGetDevicePointer_v2=on_device,
        )
    )
    assert driver.allocation_of(BASE + 5000) == BASE + 4096
    handle = driver.ipc_handle(BASE)
    assert len(handle) == 64
    assert driver.open_ipc(handle) == BASE + (1 << 60)
    driver.close_ipc(BASE)
    assert closed == [BASE]
    assert driver.device_address(BASE) == BASE + 8


def test_what_goes_into_a_stream_keeps_all_its_bits() -> None:
    given: list[tuple[object, ...]] = []

    def note(*arguments: object) -> int:
        given.append(arguments)
        return 0

    driver = CudaDriver(
        Library(cuMemcpyAsync=note, cuStreamWaitValue32_v2=note, cuStreamWriteValue32_v2=note)
    )
    stream = BASE + 64
    driver.copy(stream, BASE + 1, BASE + 2, 3 << 32)
    driver.wait(stream, BASE, (5 << 32) + 7)
    driver.write(stream, BASE, 0x9_FFFF_FFFF)
    assert given == [
        (BASE + 1, BASE + 2, 3 << 32, stream),
        (stream, BASE, 7, 0),
        (stream, BASE, 0xFFFF_FFFF, 0),
    ]


@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("cuMemcpyAsync", lambda driver: driver.copy(0, 1, 2, 3)),
        ("cuStreamWaitValue32", lambda driver: driver.wait(0, 1, 2)),
        ("cuStreamWriteValue32", lambda driver: driver.write(0, 1, 2)),
        ("cuMemGetAddressRange", lambda driver: driver.allocation_of(1)),
        ("cuIpcGetMemHandle", lambda driver: driver.ipc_handle(1)),
        ("cuIpcOpenMemHandle", lambda driver: driver.open_ipc(bytes(64))),
        ("cuMemHostGetDevicePointer", lambda driver: driver.device_address(1)),
    ],
)
def test_a_refusal_is_said_in_words(function: str, call: Callable[[CudaDriver], object]) -> None:
    refusing = {name: lambda *_: 17 for name in SIGNATURES if name.removesuffix("_v2") == function}
    with pytest.raises(DriverError, match=rf"^{function} failed with code 17, out of patience$") as caught:
        call(CudaDriver(Library(cuGetErrorString=explain, **refusing)))
    assert caught.value.status == 17
    assert isinstance(caught.value, CommError)


def test_an_unknown_code_has_no_words() -> None:
    driver = CudaDriver(Library(cuGetErrorString=lambda *_: 1))
    assert str(driver.failure("the launch", 999)) == "the launch failed with code 999"


def test_older_names_serve_where_the_new_ones_are_missing() -> None:
    driver = CudaDriver(Library(cuStreamWaitValue32=lambda *_: 0))
    driver.wait(0, 1, 2)
    with pytest.raises(DriverError, match="this CUDA driver has no cuStreamWriteValue32"):
        driver.write(0, 1, 2)


def test_a_launch_is_called_as_it_was_prepared() -> None:
    launch = SimpleNamespace()
    assert CudaDriver(SimpleNamespace(cuLaunchKernelEx=launch)).launch is launch
    assert not hasattr(launch, "argtypes"), "converting arguments would cost every launch"
    with pytest.raises(RuntimeError, match="has no cuLaunchKernelEx"):
        _ = CudaDriver(SimpleNamespace()).launch


def test_the_library_is_opened_by_the_first_who_asks_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    cuda_driver.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(driver_module.ctypes, "CDLL", opened.append)
        assert cuda_driver() is cuda_driver()
    cuda_driver.cache_clear()
    assert opened == ["libcuda.so.1"]
