"""Devices and links as data: what arithmetic, memory and wires can do at best.

Peaks are for one device and one direction of a link. `efficiency` is the part of a peak that large
matrix products and long messages reach in practice; every number says where it comes from. What the machine
at hand does is written by `moeclipse measure`.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

from moeclipse.core.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Device:
    name: str
    flops: float
    """Dense multiply-adds per second, times two, at `dtype`."""
    dtype: str
    memory_bandwidth: float
    """Bytes per second."""
    memory: float
    """Bytes."""
    processors: int
    """Streaming multiprocessors, or cores."""
    launch: float
    """Seconds of host time per launched op."""
    efficiency: float
    source: str
    fp8_flops: float = 0.0
    """The same for 8-bit floats; 0: it has none."""


@dataclass(frozen=True, kw_only=True)
class Link:
    name: str
    bandwidth: float
    """Bytes per second in one direction."""
    latency: float
    """Seconds per message."""
    efficiency: float
    source: str

    def seconds(self, num_bytes: float, messages: int = 1) -> float:
        return messages * self.latency + num_bytes / (self.bandwidth * self.efficiency)


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            name="a100",
            flops=312e12,
            dtype="bf16",
            memory_bandwidth=2.039e12,
            memory=80e9,
            processors=108,
            launch=5e-6,
            efficiency=0.8,
            source="NVIDIA A100 80GB SXM data sheet; efficiency assumed",
        ),
        Device(
            name="h100",
            flops=989e12,
            dtype="bf16",
            memory_bandwidth=3.35e12,
            memory=80e9,
            processors=132,
            launch=5e-6,
            efficiency=0.68,
            fp8_flops=1979e12,
            source="NVIDIA H100 SXM data sheet (1979 TFLOP/s sparse, halved; fp8 3958); efficiency: 640 to "
            "670 TFLOP/s of cuBLAS and another kernel at 8192 x 8192 x 4096 and more (Triton 3.6, tutorial)",
        ),
        Device(
            name="h800",
            flops=989e12,
            dtype="bf16",
            memory_bandwidth=3.35e12,
            memory=80e9,
            processors=132,
            launch=5e-6,
            efficiency=0.68,
            fp8_flops=1979e12,
            source="an H100 with a narrower NVLink (DeepSeek-V3 technical report); efficiency as there",
        ),
        Device(
            name="h200",
            flops=989e12,
            dtype="bf16",
            memory_bandwidth=4.8e12,
            memory=141e9,
            processors=132,
            launch=5e-6,
            efficiency=0.78,
            fp8_flops=1979e12,
            source="NVIDIA H200 SXM data sheet; efficiency: 773 TFLOP/s measured on an 8192^3 bf16 product",
        ),
        Device(
            name="b200",
            flops=2250e12,
            dtype="bf16",
            memory_bandwidth=8e12,
            memory=180e9,
            processors=148,
            launch=5e-6,
            efficiency=0.75,
            fp8_flops=4500e12,
            source="NVIDIA DGX B200 data sheet (4.5 PFLOP/s sparse per GPU, halved); efficiency assumed",
        ),
        Device(
            name="gb200",
            flops=2500e12,
            dtype="bf16",
            memory_bandwidth=8e12,
            memory=186e9,
            processors=148,
            launch=5e-6,
            efficiency=0.75,
            fp8_flops=5000e12,
            source="NVIDIA GB200 NVL72 data sheet (360 PFLOP/s sparse, 72 GPUs, halved); efficiency assumed",
        ),
        Device(
            name="mi300x",
            flops=1307e12,
            dtype="bf16",
            memory_bandwidth=5.3e12,
            memory=192e9,
            processors=304,
            launch=5e-6,
            efficiency=0.55,
            fp8_flops=2614e12,
            source="AMD Instinct MI300X data sheet; efficiency assumed",
        ),
        Device(
            name="cpu",
            flops=1.2e11,
            dtype="fp32",
            memory_bandwidth=1.0e10,
            memory=8e9,
            processors=2,
            launch=2e-5,
            efficiency=0.8,
            source="two server cores, order of magnitude; `moeclipse measure` knows the machine at hand",
        ),
    )
}
LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        Link(
            name="nvlink4",
            bandwidth=450e9,
            latency=2e-6,
            efficiency=0.8,
            source="NVIDIA H100 SXM data sheet (900 GB/s both directions); latency and efficiency assumed",
        ),
        Link(
            name="nvlink5",
            bandwidth=900e9,
            latency=2e-6,
            efficiency=0.8,
            source="NVIDIA DGX B200 data sheet (1.8 TB/s both directions); latency and efficiency assumed",
        ),
        Link(
            name="nvlink3",
            bandwidth=300e9,
            latency=2e-6,
            efficiency=0.8,
            source="NVIDIA A100 SXM data sheet (600 GB/s both directions); latency and efficiency assumed",
        ),
        Link(
            name="nvlink-h800",
            bandwidth=200e9,
            latency=2e-6,
            efficiency=0.8,
            source="400 GB/s both directions, of which DeepSeek uses 160 GB/s one way; latency assumed",
        ),
        Link(
            name="infinity-fabric",
            bandwidth=448e9,
            latency=2e-6,
            efficiency=0.7,
            source="AMD Instinct MI300X platform: 7 links of 64 GB/s one way; latency and efficiency assumed",
        ),
        Link(
            name="hdr",
            bandwidth=25e9,
            latency=5e-6,
            efficiency=0.85,
            source="InfiniBand HDR (200 Gb/s), one port for each A100; latency and efficiency assumed",
        ),
        Link(
            name="infiniband",
            bandwidth=50e9,
            latency=5e-6,
            efficiency=0.85,
            source="NVIDIA ConnectX-7 NDR data sheet (400 Gb/s); latency and efficiency assumed",
        ),
        Link(
            name="pcie5",
            bandwidth=63e9,
            latency=3e-6,
            efficiency=0.45,
            source="PCI Express 5.0 x16 (32 GT/s, 128b/130b); efficiency: 27.4 GB/s measured, pinned memory",
        ),
        Link(
            name="host-copies",
            bandwidth=63e9,
            latency=1e-5,
            efficiency=0.73,
            source="PCI Express 5.0 x16, pinned memory and an H200: 46 GB/s each way measured, both ways at "
            "once (55 GB/s where only one direction works)",
        ),
        Link(
            name="loopback",
            bandwidth=2e9,
            latency=3e-5,
            efficiency=1.0,
            source="TCP on one host, order of magnitude; `moeclipse measure` knows the machine at hand",
        ),
    )
}


def device(name: str) -> Device:
    return _look_up(name, DEVICES, "device")


def link(name: str) -> Link:
    return _look_up(name, LINKS, "link")


def _look_up(name: str, table: dict[str, T], what: str) -> T:
    if name not in table:
        close = get_close_matches(name, table, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"unknown {what} {name!r}; {hint}choose one of {', '.join(table)}")
    return table[name]
