"""Orders and keys: everything random about the data is a pure function of integers."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np


def derive_key(*parts: Any) -> int:
    """63 bits that depend on every part (plain JSON data), the same in every process and on every machine."""
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def digest(*parts: Any) -> str:
    """16 hex digits that depend on every part (plain JSON data)."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def permutation(n: int, key: int) -> list[int]:
    """0 .. n-1 in an order that `key` decides. For few items: memory grows with n (see `Feistel`)."""
    return Feistel(n, key).map(np.arange(n)).tolist() if n else []


class Feistel:
    """A keyed permutation of 0 .. n-1 that needs no memory: item i is computed, not looked up.

    A balanced Feistel network (Luby and Rackoff 1988) over the smallest even number of bits that holds n - 1, with
    cycle walking (Black and Rogaway 2002) for what falls outside. Any n up to 2**62.
    """

    ROUNDS = 6

    def __init__(self, n: int, key: int) -> None:
        if n < 1:
            raise ValueError(f"a permutation of {n} items")
        self.n = n
        self._half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = [np.uint64(derive_key(key, n, index)) for index in range(self.ROUNDS)]

    def __call__(self, i: int) -> int:
        """Where item i goes."""
        return int(self.map(np.asarray([i]))[0])

    def map(self, items: np.ndarray) -> np.ndarray:
        """Where each of `items` (ints in 0 .. n-1) goes, int64."""
        x = self._encrypt(items.astype(np.uint64))
        outside = x >= self.n
        while outside.any():
            x[outside] = self._encrypt(x[outside])
            outside = x >= self.n
        return x.astype(np.int64)

    def _encrypt(self, x: np.ndarray) -> np.ndarray:
        left, right = x >> self._half, x & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right + key) & self._mask)
        return (left << self._half) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele et al. 2014): every bit of the output depends on every bit of the input."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
