"""Random numbers as a pure function of a key and an index.

There is no generator and no state: the number for (seed, step, layer, token) is the same on any rank,
in any layout and after any resume. Integers are hashed with the splitmix64 finaliser, which torch can
compute on every device because its int64 arithmetic wraps.
"""

from __future__ import annotations

import hashlib
import math

import torch

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
CHUNK = 1 << 22  # elements generated at a time: bounds the float64 temporaries


def key_of(*parts: int | str) -> int:
    """A 64-bit key from anything that names a use of randomness."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniform(key: int, index: torch.Tensor) -> torch.Tensor:
    """float64 in (0, 1), one for each int64 index."""
    x = scramble(index * signed(GOLDEN) + signed(key))
    return (shift_right(x, 11).to(torch.float64) + 0.5) * 2.0**-53


def scramble(x: torch.Tensor) -> torch.Tensor:
    """The finaliser: every bit of an int64 reaches every other."""
    x = (x ^ shift_right(x, 30)) * signed(MIX_1)
    x = (x ^ shift_right(x, 27)) * signed(MIX_2)
    return x ^ shift_right(x, 31)


def normal(key: int, index: torch.Tensor) -> torch.Tensor:
    """Standard normal float64, one for each int64 index (Box-Muller)."""
    radius = torch.sqrt(-2.0 * torch.log(uniform(key, 2 * index)))
    return radius * torch.cos(2 * math.pi * uniform(key, 2 * index + 1))


@torch.no_grad()
def fill_normal(tensor: torch.Tensor, key: int, std: float) -> torch.Tensor:
    """Overwrite `tensor` with std x normal numbers that depend on `key` and the element's place alone."""
    if tensor.is_meta:  # no numbers to fill, but as many calls to make of them
        return tensor
    flat = tensor.view(-1)
    for start in range(0, flat.numel(), CHUNK):
        stop = min(start + CHUNK, flat.numel())
        index = torch.arange(start, stop, device=tensor.device)
        flat[start:stop] = (std * normal(key, index)).to(tensor.dtype)
    return tensor


def signed(value: int) -> int:
    """The int64 with the bits of this unsigned 64-bit number."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's >> on int64 would copy the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
