"""Random numbers that depend on (seed, position) and nothing else: Philox4x64-10, vectorised.

Takes arrays of seeds and positions, gives one uniform number for each, and keeps no state: preemption, batching and
speculation cannot change a draw.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Words = tuple[NDArray[np.uint64], ...]

_MULTIPLIERS = (np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157))
_KEY_STEPS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B))
_ROUNDS = 10
_LOW_HALF = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """Return float64 ``[n]`` in [0, 1), one number for each (seed, position).

    It is NumPy's ``Generator(Philox(key=seed, counter=position)).random()``. Seeds are 0 to 2**64 - 1, positions 0 to
    2**64 - 2.
    """
    zeros = np.zeros(len(seeds), dtype=np.uint64)
    # NumPy steps the counter before it computes a block, hence position + 1.
    counter = (np.array(positions, dtype=np.uint64) + np.uint64(1), zeros, zeros, zeros)
    word = _philox(counter, (np.array(seeds, dtype=np.uint64), zeros))[0]
    return (word >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _philox(counter: Words, key: Words) -> Words:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _KEY_STEPS[0], k1 + _KEY_STEPS[1]
    return c0, c1, c2, c3


def _multiply(a: NDArray[np.uint64], b: np.uint64) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the high and the low 64 bits of the 128-bit product, by halves of 32 bits."""
    a_high, a_low = a >> _HALF, a & _LOW_HALF
    b_high, b_low = b >> _HALF, b & _LOW_HALF
    low = a_low * b_low
    middle = a_high * b_low + (low >> _HALF)
    carry = a_low * b_high + (middle & _LOW_HALF)
    return a_high * b_high + (middle >> _HALF) + (carry >> _HALF), a * b
