"""The calls of the CUDA driver that torch does not offer, and the one place where its library is opened.

    driver = cuda_driver()                        # opened by the first caller, kept by the process
    driver.copy(stream, to, source, num_bytes)    # every call raises what the driver says against it

`SIGNATURES` is all that is used of the library. A function that an old driver lacks is an error where it is
called and not before, because hardly anybody needs all of them.

Hazard: addresses are numbers here. Who passes one keeps the memory behind it alive, and what is put into a
stream reads it later.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache, cached_property
from typing import Any

from moeclipse.core.errors import CommError

LIBRARY = "libcuda.so.1"
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ: compares modulo 2^32
LOW = 0xFFFFFFFF


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle: bytes, not characters, which would end at the first zero."""

    _fields_ = [("bytes", c_ubyte * 64)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("num_attributes", c_uint),
    ]


ADDRESS, STREAM, FLAGS = c_uint64, c_void_p, c_uint
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuIpcCloseMemHandle": (ADDRESS,),
    "cuIpcGetMemHandle": (POINTER(IpcHandle), ADDRESS),
    "cuIpcOpenMemHandle_v2": (POINTER(ADDRESS), IpcHandle, FLAGS),
    "cuLaunchKernelEx": (POINTER(LaunchConfig), c_void_p, POINTER(c_void_p), POINTER(c_void_p)),
    "cuMemGetAddressRange_v2": (POINTER(ADDRESS), POINTER(c_size_t), ADDRESS),
    "cuMemHostGetDevicePointer_v2": (POINTER(ADDRESS), c_void_p, FLAGS),
    "cuMemcpyAsync": (ADDRESS, ADDRESS, c_size_t, STREAM),
    "cuStreamWaitValue32_v2": (STREAM, ADDRESS, c_uint32, FLAGS),
    "cuStreamWaitValue32": (STREAM, ADDRESS, c_uint32, FLAGS),
    "cuStreamWriteValue32_v2": (STREAM, ADDRESS, c_uint32, FLAGS),
    "cuStreamWriteValue32": (STREAM, ADDRESS, c_uint32, FLAGS),
}
"""What each takes; all return a code, zero for success."""
AS_PREPARED = ("cuLaunchKernelEx",)
"""Called with ctypes values that were made once: to convert them in every call takes longer than the call."""


class DriverError(CommError):
    """A call of the CUDA driver failed; `status` is the driver's code."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class CudaDriver:
    def __init__(self, library: Any) -> None:
        self._library = library

    # contexts

    def enter(self, device: int) -> None:
        """Give the calling thread the context that torch uses on a device, if it has none yet."""
        context = c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        if not context.value:
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._call("cuCtxSetCurrent", context)

    # addresses

    def allocation_of(self, address: int) -> int:
        """Where the allocation begins that holds this address of a device."""
        base, size = ADDRESS(), c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        return base.value

    def device_address(self, host_address: int) -> int:
        """Of host memory that was registered, as the device sees it."""
        there = ADDRESS()
        self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(there), host_address, 0)
        return there.value

    # allocations of other processes

    def ipc_handle(self, allocation: int) -> bytes:
        """Names an allocation to other processes."""
        handle = IpcHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), allocation)
        return bytes(handle.bytes)

    def open_ipc(self, handle: bytes) -> int:
        """Where the allocation of that name is seen from here."""
        opened, name = ADDRESS(), IpcHandle((c_ubyte * 64)(*handle))
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(opened), name, LAZY_PEER_ACCESS)
        return opened.value

    def close_ipc(self, address: int) -> None:
        """What `open_ipc` opened. Its owner may have ended already, so the code says nothing."""
        self._function("cuIpcCloseMemHandle")(address)

    # streams

    def copy(self, stream: int, to: int, source: int, num_bytes: int) -> None:
        """Between any two memories: addresses say where they are."""
        status = self._copy(to, source, num_bytes, stream)
        if status:
            raise self.failure("cuMemcpyAsync", status)

    def wait(self, stream: int, address: int, value: int) -> None:
        """What stands behind it in the stream waits until the word there is at least `value`."""
        status = self._wait(stream, address, value & LOW, AT_LEAST)
        if status:
            raise self.failure("cuStreamWaitValue32", status)

    def write(self, stream: int, address: int, value: int) -> None:
        """Behind a fence of the device: what stands before it is visible to whoever sees the value."""
        status = self._write(stream, address, value & LOW, 0)
        if status:
            raise self.failure("cuStreamWriteValue32", status)

    @cached_property
    def launch(self) -> Callable[..., int]:
        """cuLaunchKernelEx itself: who calls it looks at the code, see `failure`."""
        return self._function("cuLaunchKernelEx")

    @cached_property
    def _copy(self) -> Callable[..., int]:
        return self._function("cuMemcpyAsync")

    @cached_property
    def _wait(self) -> Callable[..., int]:
        return self._function("cuStreamWaitValue32_v2", "cuStreamWaitValue32")

    @cached_property
    def _write(self) -> Callable[..., int]:
        return self._function("cuStreamWriteValue32_v2", "cuStreamWriteValue32")

    def failure(self, call: str, status: int) -> DriverError:
        text = c_char_p()
        self._function("cuGetErrorString")(status, ctypes.byref(text))
        words = f", {text.value.decode()}" if text.value else ""
        return DriverError(f"{call} failed with code {status}{words}", status)

    def _call(self, name: str, *arguments: Any) -> None:
        status = self._function(name)(*arguments)
        if status:
            raise self.failure(name.removesuffix("_v2"), status)

    def _function(self, *names: str) -> Callable[..., int]:
        """The first of these that the library has, with its signature; older ones come last."""
        for name in names:
            found = getattr(self._library, name, None)
            if found is not None:
                if name not in AS_PREPARED:
                    found.argtypes = SIGNATURES[name]
                return found
        raise DriverError(f"this CUDA driver has no {names[-1]}")


@cache
def cuda_driver() -> CudaDriver:
    """OSError where there is none."""
    return CudaDriver(ctypes.CDLL(LIBRARY))
