"""Seconds of kernels as a roofline with few constants.

    product       max(flops / (peak x efficiency), bytes / bandwidth) + launch
    efficiency    what large products reach, less whole tiles that are partly empty, a last wave that leaves
                  processors idle, and the ends of a short inner dimension
    grouped       the same with rows in groups: each group fills its own tiles
    stream        bytes / bandwidth: norms, rotary positions, permutation, activation, gate, loss, update
    attention     scores and their product with values, of d_qk and d_v; the mask leaves half, a window less

Constants are measured on an H200 or an H100 where that is said, and taken for other devices, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from moeclipse.cost.hardware import Device

Type = Literal["bf16", "fp8", "fp32"]
WIDTH: dict[str, float] = {"bf16": 2.0, "fp8": 1.0, "fp32": 4.0}
SHARE = 1024
"""Least inner dimension of a tile that is shared."""


@dataclass(frozen=True, kw_only=True)
class KernelConstants:
    """What kernels reach; `moeclipse measure` fits them to the machine at hand."""

    tile_m: float = 128
    tile_n: float = 256
    """Of the output, that one processor computes at a time."""
    inner: float = 64.0
    """Inner dimension that the ends of a tile cost: 588 of 665 TFLOP/s at 512 (8192 x 8192, H100)."""
    grouped: float = 0.85
    grouped_inner: float = 400.0
    """Of a plain product, and what ends cost of the inner dimension: 616, 580, 501, 484 and 379 of 773
    TFLOP/s there and back at 7168 x 2048, 4096 x 14336, 2048 x 1024, 2048 x 768 and 1536 x 256 (H200)."""
    fp8: float = 0.55
    """Of the fp8 peak in a large product, scales included: so DeepSeek-V3's experts take the 4.60 ms a layer
    of their published trace (4,096 tokens, 112 of 132 processors)."""
    stream: float = 0.9
    """Of memory bandwidth: 4.3 of 4.8 TB/s, copies on an H200."""
    attention_forward: float = 0.55
    attention_backward: float = 0.45
    """Of the bf16 peak, causal, 4k: what FlashAttention-3 publishes for H100, roughly."""
    launch: float = 4e-6
    """Seconds between the end of a small kernel and the next one's start."""
    inside: float = 1.04
    """What kernels take inside a step of ours over what they take alone: fitted on `5b`, 65,536 tokens,
    layers recomputed whole, 626 ms (H200)."""


MEASURED_ON_HOPPER = KernelConstants()
ON_CPU = KernelConstants(tile_m=1, tile_n=1, inner=16.0, grouped_inner=16.0, launch=2e-5, stream=1.0)
"""Products of any size fill a core; orders of magnitude, until they are measured."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    device: Device
    constants: KernelConstants = MEASURED_ON_HOPPER

    @property
    def launch(self) -> float:
        return self.constants.launch

    def product(self, m: float, n: float, k: float, dtype: Type = "bf16") -> float:
        if not m * n * k:
            return 0.0
        flops = 2.0 * m * n * k / (self._peak(dtype) * self.efficiency(m, n, k))
        moved = (m * k + k * n) * WIDTH[dtype] + m * n * 2.0
        return max(flops, self.stream(moved)) + self.launch

    def grouped(self, rows: float, groups: float, n: float, k: float, dtype: Type = "bf16") -> float:
        """`rows` in all, shared evenly by `groups`; whoever has more on one rank hands in more rows."""
        if not rows * n * k:
            return 0.0
        c, each = self.constants, rows / groups
        tiles = math.ceil(each / c.tile_m) * groups
        full = rows / (tiles * c.tile_m)
        waves = self._waves(tiles * math.ceil(n / c.tile_n))
        whole = self._peak(dtype) * c.grouped * full * self._ends(k, c.grouped_inner) * waves
        moved = (rows * k + groups * k * n) * WIDTH[dtype] + rows * n * 2.0
        return max(2.0 * rows * n * k / whole, self.stream(moved)) + self.launch

    def grouped_weights(self, rows: float, groups: float, n: float, k: float, dtype: Type = "bf16") -> float:
        """The gradient of all groups' weights, added up in fp32."""
        if not rows * n * k:
            return 0.0
        c = self.constants
        tiles = groups * math.ceil(n / c.tile_n) * math.ceil(k / c.tile_m)
        whole = (
            self._peak(dtype) * c.grouped * self._ends(rows / groups, c.grouped_inner) * self._waves(tiles)
        )
        moved = rows * (n + k) * WIDTH[dtype] + 8.0 * groups * n * k
        return max(2.0 * rows * n * k / whole, self.stream(moved)) + self.launch

    def efficiency(self, m: float, n: float, k: float) -> float:
        """Of what large products reach. Few rows have lower tiles, few tiles share the inner dimension."""
        c = self.constants
        height = c.tile_m if m >= c.tile_m else max(16.0, 2.0 ** math.ceil(math.log2(m)))
        tiles = math.ceil(m / height) * math.ceil(n / c.tile_n)
        full = m * n / (tiles * height * c.tile_n)
        shares = max(min(self.device.processors // tiles, k // SHARE), 1)
        return full * self._ends(k / shares) * self._waves(tiles * shares)

    def stream(self, num_bytes: float) -> float:
        return num_bytes / (self.device.memory_bandwidth * self.constants.stream)

    def attention(
        self, tokens: float, keys: float, heads: float, d_qk: float, d_v: float, *, backward: bool
    ) -> float:
        """`keys` that a token sees on average; backward computes scores again: five products for two."""
        flops = 2.0 * tokens * keys * heads * (d_qk + d_v)
        if not flops:
            return 0.0
        if backward:
            # dV, dP and the scores again; dQ and dK: 3 of d_qk and 2 of d_v
            flops = 2.0 * tokens * keys * heads * (3 * d_qk + 2 * d_v)
        rate = self.device.flops * (
            self.constants.attention_backward if backward else self.constants.attention_forward
        )
        return flops / rate + self.launch

    def _peak(self, dtype: Type) -> float:
        if dtype == "fp8" and self.device.fp8_flops:
            return self.device.fp8_flops * self.constants.fp8
        return self.device.flops * self.device.efficiency

    def _ends(self, k: float, cost: float | None = None) -> float:
        return k / (k + (self.constants.inner if cost is None else cost))

    def _waves(self, tiles: float) -> float:
        waves = tiles / self.device.processors
        return waves / math.ceil(waves)


def keys_seen(sequence: int, window: int = 0) -> float:
    """On average over the tokens of a sequence, each of which sees itself and what stands before it."""
    most = min(window or sequence, sequence)
    return (most * (most + 1) / 2 + (sequence - most) * most) / sequence
