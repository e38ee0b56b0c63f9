"""A shuffle that needs no memory: a keyed permutation of range(n), computed index by index.

Idea. Write an index as two digits (left, right) of bases a and b with a * b just above n. A round adds
to one digit a hash of the other, modulo its base: that can be undone, so any number of rounds is a
permutation of range(a * b). An index that lands at n or above is sent through again until it falls
inside ("cycle walking"); because a * b - n < a, that is rare.

Contract. `permute` maps distinct indices below n to distinct indices below n and depends on nothing but
(index, n, key). Hazard: changing a constant below changes the order of samples, and with it what a resumed
run sees; a test pins the values.
"""

from __future__ import annotations

import hashlib
from math import isqrt

import numpy as np

ROUNDS = 8
# Finaliser of a 64-bit hash: odd multipliers with an irregular bit pattern.
MULTIPLY_1 = np.uint64(0x9FB21C651E98DF25)
MULTIPLY_2 = np.uint64(0xD6E8FEB86659FD93)
SHIFT = np.uint64(32)


def shuffle_key(seed: int, epoch: int | str) -> np.ndarray:
    """One 64-bit number per round, [ROUNDS], from the seed and the epoch, or what else is shuffled."""
    digest = hashlib.blake2b(
        f"moeclipse shuffle, seed {seed}, epoch {epoch}".encode(), digest_size=64
    ).digest()
    return np.frombuffer(digest, dtype="<u8", count=ROUNDS).astype(np.uint64)


def permute(index: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """Where the permutation of range(n) under `key` sends each of `index` (int64, any shape)."""
    result = np.array(index, dtype=np.int64)
    if n <= 0 or (result.size and not (result.min() >= 0 and result.max() < n)):
        raise IndexError(f"indices must be at least 0 and below {n}")
    flat = result.reshape(-1)
    a = isqrt(n - 1) + 1
    b = -(-n // a)
    outside = np.arange(flat.size)
    while outside.size:
        flat[outside] = _permute_digits(flat[outside], a, b, key)
        outside = outside[flat[outside] >= n]
    return result


def _permute_digits(index: np.ndarray, a: int, b: int, key: np.ndarray) -> np.ndarray:
    left: np.ndarray = (index // b).astype(np.uint64)
    right: np.ndarray = (index % b).astype(np.uint64)
    for number in range(0, ROUNDS, 2):
        left = (left + _mix(right, key[number]) % np.uint64(a)) % np.uint64(a)
        right = (right + _mix(left, key[number + 1]) % np.uint64(b)) % np.uint64(b)
    return (left * np.uint64(b) + right).astype(np.int64)


def _mix(x: np.ndarray, key: np.uint64) -> np.ndarray:
    """A 64-bit hash of x under one round's key; unsigned arithmetic wraps around on purpose."""
    x = x ^ key
    x = (x ^ (x >> SHIFT)) * MULTIPLY_1
    x = (x ^ (x >> SHIFT)) * MULTIPLY_2
    return x ^ (x >> SHIFT)
