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
TILE_M, TILE_N = 128, 256
"""Of the output, that one processor computes at a time."""
SHARE = 1024
"""Least inner dimension of a tile that is shared."""
INNER = 64.0
"""Inner dimension that the ends of a tile cost: 588 of 665 TFLOP/s at 512 (8192 x 8192, cuBLAS on Hopper)."""
GROUPED, GROUPED_INNER = 0.85, 400.0
"""Of a plain product, and what ends cost of the inner dimension: 616, 580, 501, 484 and 379 of 773 TFLOP/s
forward and backward at 7168 x 2048, 4096 x 14336, 2048 x 1024, 2048 x 768 and 1536 x 256 (H200, torch)."""
FP8 = 0.55
"""Of the fp8 peak in a large product, scales included: so DeepSeek-V3's experts take the 4.60 ms a layer of
their published trace (4,096 tokens, 112 of 132 processors)."""
STREAM = 0.9
"""Of memory bandwidth: 4.3 of 4.8 TB/s, copies on an H200."""
ATTENTION_F, ATTENTION_B = 0.55, 0.45
"""Of the bf16 peak, causal, 4k: what FlashAttention-3 publishes for H100, roughly."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    device: Device
    launch: float = 4e-6
    """Between the end of a small kernel and the next one's start."""

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
        each = rows / groups
        tiles = math.ceil(each / TILE_M) * groups
        full = rows / (tiles * TILE_M)
        waves = self._waves(tiles * math.ceil(n / TILE_N))
        whole = self._peak(dtype) * GROUPED * full * self._ends(k, GROUPED_INNER) * waves
        moved = (rows * k + groups * k * n) * WIDTH[dtype] + rows * n * 2.0
        return max(2.0 * rows * n * k / whole, self.stream(moved)) + self.launch

    def grouped_weights(self, rows: float, groups: float, n: float, k: float, dtype: Type = "bf16") -> float:
        """The gradient of all groups' weights, added up in fp32."""
        if not rows * n * k:
            return 0.0
        tiles = groups * math.ceil(n / TILE_N) * math.ceil(k / TILE_M)
        whole = self._peak(dtype) * GROUPED * self._ends(rows / groups, GROUPED_INNER) * self._waves(tiles)
        moved = rows * (n + k) * WIDTH[dtype] + 8.0 * groups * n * k
        return max(2.0 * rows * n * k / whole, self.stream(moved)) + self.launch

    def efficiency(self, m: float, n: float, k: float) -> float:
        """Of what large products reach. Few rows have lower tiles, few tiles share the inner dimension."""
        height = TILE_M if m >= TILE_M else max(16.0, 2.0 ** math.ceil(math.log2(m)))
        tiles = math.ceil(m / height) * math.ceil(n / TILE_N)
        full = m * n / (tiles * height * TILE_N)
        shares = max(min(self.device.processors // tiles, k // SHARE), 1)
        return full * self._ends(k / shares) * self._waves(tiles * shares)

    def stream(self, num_bytes: float) -> float:
        return num_bytes / (self.device.memory_bandwidth * STREAM)

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
        rate = self.device.flops * (ATTENTION_B if backward else ATTENTION_F)
        return flops / rate + self.launch

    def _peak(self, dtype: Type) -> float:
        if dtype == "fp8" and self.device.fp8_flops:
            return self.device.fp8_flops * FP8
        return self.device.flops * self.device.efficiency

    @staticmethod
    def _ends(k: float, cost: float = INNER) -> float:
        return k / (k + cost)

    def _waves(self, tiles: float) -> float:
        waves = tiles / self.device.processors
        return waves / math.ceil(waves)


def keys_seen(sequence: int, window: int = 0) -> float:
    """On average over the tokens of a sequence, each of which sees itself and what stands before it."""
    most = min(window or sequence, sequence)
    return (most * (most + 1) / 2 + (sequence - most) * most) / sequence
