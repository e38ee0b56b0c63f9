"""The machine at hand as a cluster file: what its products, its memory and its wires do, fitted in a minute.

    products   of several inner dimensions: 1 / rate is a line in 1 / k, its ends are peak and `inner`
    grouped    the same of the experts' own products
    attention  causal, forward and backward, of the peak
    memory     copies
    launch     of many small operations: what the host takes for each, and what lies between two on the device

Medians of a few repeats; on a machine that others use they say how fast it is beside them. What is not
measured (near and far links of a cluster, processors that an exchange takes) stays that of the named device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from moeclipse.core.host_memory import whole_memory
from moeclipse.model.flops import device_of
from moeclipse.ops.grouped_gemm import grouped_mm

REPEATS, SMALL_OPS = 7, 200
INNER = {"cuda": (512, 1024, 2048, 8192), "cpu": (64, 128, 256, 768)}
SIDE = {"cuda": 8192, "cpu": 512}
GROUPS = {"cuda": (32, 1024), "cpu": (8, 64)}
"""(groups, rows of each)."""
ATTENTION = {"cuda": (16, 4096, 128), "cpu": (4, 256, 32)}
"""(heads, tokens, width of a head)."""
COPIED = {"cuda": 1 << 30, "cpu": 1 << 26}
Table = dict[str, float]


class MachineClock:
    """Medians on one device; the host waits for it once a repeat."""

    def __init__(self, device: torch.device, repeats: int = REPEATS) -> None:
        self.device, self.repeats = device, repeats

    def __call__(self, work: Callable[[], object]) -> float:
        """Seconds."""
        times = []
        for _ in range(self.repeats + 1):  # the first one warms up
            self.settle()
            begun = time.perf_counter()
            work()
            self.settle()
            times.append(time.perf_counter() - begun)
        return statistics.median(times[1:])

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def line(inner: Sequence[float], rates: Sequence[float]) -> tuple[float, float]:
    """(rate without ends, inner dimension that ends cost) of rates at some inner dimensions."""
    slope, height = np.polyfit(1 / np.asarray(inner, dtype=float), 1 / np.asarray(rates, dtype=float), 1)
    if height <= 0 or slope < 0:  # noise, or no ends to speak of
        return float(max(rates)), 1.0
    return float(1 / height), float(max(slope / height, 1.0))


def measured_products(device: torch.device, dtype: torch.dtype, watch: MachineClock) -> tuple[float, float]:
    side, rates = SIDE[device.type], []
    for k in INNER[device.type]:
        a, b = (torch.ones(shape, device=device, dtype=dtype) for shape in ((side, k), (k, side)))
        rates.append(2.0 * side * side * k / watch(lambda a=a, b=b: a @ b))  # type: ignore[misc]
    return line(INNER[device.type], rates)


def measured_groups(device: torch.device, dtype: torch.dtype, watch: MachineClock) -> tuple[float, float]:
    groups, rows = GROUPS[device.type]
    width, rates = SIDE[device.type] // 2, []
    for k in INNER[device.type]:
        x = torch.ones(groups * rows, k, device=device, dtype=dtype)
        weight = torch.ones(groups, width, k, device=device, dtype=dtype)
        spent = watch(lambda x=x, weight=weight: grouped_mm(x, weight, [rows] * groups))  # type: ignore[misc]
        rates.append(2.0 * groups * rows * width * k / spent)
    return line(INNER[device.type], rates)


def measured_attention(device: torch.device, dtype: torch.dtype, watch: MachineClock) -> tuple[float, float]:
    """FLOP/s, forward and backward, of the pairs that a causal mask leaves."""
    heads, tokens, width = ATTENTION[device.type]
    shape = (1, heads, tokens, width)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    pairs = heads * tokens * (tokens + 1) / 2
    forward = watch(lambda: attend(q, k, v, is_causal=True))
    out = attend(q, k, v, is_causal=True)
    up = torch.ones_like(out)
    backward = watch(lambda: torch.autograd.grad(out, (q, k, v), up, retain_graph=True))
    return 4.0 * pairs * width / forward, 10.0 * pairs * width / backward


def measured_memory(device: torch.device, watch: MachineClock) -> float:
    block = torch.ones(COPIED[device.type] // 4, device=device)
    into = torch.empty_like(block)
    return 2.0 * block.nbytes / watch(lambda: into.copy_(block))


def measured_launch(device: torch.device, watch: MachineClock) -> tuple[float, float]:
    """Seconds of a small operation: (until the host has launched it, until the device is done with it)."""
    small = torch.ones(16, device=device)
    launched: list[float] = []

    def many() -> None:
        begun = time.perf_counter()
        for _ in range(SMALL_OPS):
            small.add_(1.0)
        launched.append(time.perf_counter() - begun)

    done = watch(many)
    return statistics.median(launched) / SMALL_OPS, done / SMALL_OPS


def measured_machine(device: torch.device, wire: tuple[float, float] | None = None) -> dict[str, object]:
    """Tables of a cluster file (`cost/cluster`); `wire`: (bytes a second, seconds a message) of two ranks."""
    watch = MachineClock(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    peak, inner = measured_products(device, dtype, watch)
    grouped, grouped_inner = measured_groups(device, dtype, watch)
    forward, backward = measured_attention(device, dtype, watch)
    moved, (launch, between) = measured_memory(device, watch), measured_launch(device, watch)
    known = device_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if known is not None:
        name, of_device = known.name, {"efficiency": peak / known.flops, "launch": launch}
        flops, bandwidth = known.flops, known.memory_bandwidth
    else:
        name, flops, bandwidth = ("h100" if device.type == "cuda" else "cpu"), peak, moved
        of_device = {"flops": peak, "efficiency": 1.0, "memory_bandwidth": moved, "launch": launch}
        of_device |= memory_of(device)
    kernels = {"inner": inner, "grouped": grouped / peak, "grouped_inner": grouped_inner}
    kernels |= {"attention_forward": forward / flops, "attention_backward": backward / flops}
    kernels |= {"stream": moved / bandwidth, "launch": between}
    found: dict[str, Any] = {"device": name, "measured": of_device, "kernels": kernels}
    if wire is not None:
        link = {"bandwidth": wire[0], "latency": wire[1], "efficiency": 1.0}
        found |= {"near": link} | ({"far": link} if device.type == "cpu" else {})
    return found


def memory_of(device: torch.device) -> Table:
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return {"memory": float(found.total_memory), "processors": found.multi_processor_count}
    whole = whole_memory()
    return {"memory": float(whole)} if whole else {}


def as_toml(tables: Mapping[str, Any], comment: str) -> str:
    """A cluster file."""
    lines = [f"# {comment}", f'device = "{tables["device"]}"']
    for name in ("near", "far"):
        if name in tables:
            numbers = ", ".join(f"{key} = {value:.6g}" for key, value in tables[name].items())
            lines.append(f"{name} = {{ {numbers} }}")
    for name in ("measured", "kernels"):
        if name in tables:
            lines += ["", f"[{name}]", *(f"{key} = {value:.6g}" for key, value in tables[name].items())]
    return "\n".join(lines) + "\n"
