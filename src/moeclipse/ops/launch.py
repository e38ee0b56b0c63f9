"""Launches of Triton's kernels, where a launch like an earlier one is one look into a table.

    launch(kernel, (grid,), x, out, length, BLOCK=128)        kernel[(grid,)](x, out, length, BLOCK=128)

Both do the same. Triton asks in each call which compiled kernel the operands mean, 15 to 20 microseconds of
Python; a layer of experts has sixteen launches. Here what decides it is the key of a table: types of
operands, whether an address is a multiple of 16, whether a number is 1, a multiple of 16 or wider than 32
bits, the block of a descriptor, constants, the device. A key that is new goes Triton's way.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from moeclipse.ops.private_torch import raw_stream_function


class LaunchEntry:
    """What a key stands for: the compiled kernel, once there is one, and constants behind its operands."""

    kernel: Any = None
    """Kept alive: no other one gets its identity."""
    compiled: Any = None
    behind: tuple[Any, ...] = ()


@functools.lru_cache(maxsize=1 << 14)
def _kept(*_key: Any) -> LaunchEntry:
    return LaunchEntry()


def launch(kernel: Any, grid: tuple[int, ...], *operands: Any, **constants: Any) -> None:
    if not _has_device() or is_watched():
        kernel[grid](*operands, **constants)
        return
    device = torch.cuda.current_device()
    kept = _kept(id(kernel), device, *_kinds(operands), *constants, *constants.values())
    compiled = kept.compiled
    if compiled is None:
        _keep(kept, kernel, kernel[grid](*operands, **constants), len(operands), constants)
        return
    x, y, z = (*grid, 1, 1)[:3]
    stream, function, packed = _raw_stream()(device), compiled.function, compiled.packed_metadata
    compiled.run(x, y, z, stream, function, packed, None, None, None, *operands, *kept.behind)


def _kinds(operands: tuple[Any, ...]) -> list[Any]:
    """Of each operand what decides which kernel is meant."""
    found: list[Any] = []
    add = found.append
    for each in operands:
        kind = type(each)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            add(each.dtype)
            add(each.data_ptr() & 15)
        elif kind is int:
            add("one" if each == 1 else (each & 15 == 0, each >> 31))
        elif each is None:
            add(None)
        elif isinstance(each, torch.Tensor):  # of a class of somebody else's
            add((each.dtype, each.data_ptr() & 15))
        else:
            add(getattr(each, "kind", kind))
    return found


def _keep(kept: LaunchEntry, kernel: Any, compiled: Any, num_operands: int, given: dict[str, Any]) -> None:
    """Where a kernel's operands come first and its constants behind them; else Triton launches each call.

    None was compiled: by the interpreter.
    """
    names, called = kernel.arg_names, ("run", "function", "packed_metadata")
    behind = [given[name] for name in names[num_operands:] if name in given]
    if len(behind) + num_operands == len(names) and all(hasattr(compiled, each) for each in called):
        kept.kernel, kept.compiled, kept.behind = kernel, compiled, tuple(behind)


def is_watched() -> bool:
    """Whether a profiler of Triton's wants to see each launch."""
    hook = _runtime().launch_enter_hook
    return bool(getattr(hook, "calls", hook))


@functools.cache
def _runtime() -> Any:
    from triton import knobs

    return knobs.runtime


@functools.cache
def _has_device() -> bool:
    return torch.cuda.is_available()


@functools.cache
def _raw_stream() -> Any:
    return raw_stream_function()
