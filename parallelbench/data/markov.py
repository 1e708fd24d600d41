"""A Markov chain over tokens whose entropy is known, made of whole numbers: every machine gets the same tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST_BRANCHES = 8
"""A byte decides which successor follows, so no probability is below 2⁻⁷."""


def chain(samples: int, length: int, *, vocabulary: int, branches: int, source: tuple[int, int]) -> NDArray[np.int32]:
    """Sequences of the chain, of shape (samples, length). `source`: the chain's seed, and the sequences' stream.

    Each token has `branches` successors, with the probabilities 1/2, 1/4, … of which the last comes twice. The j-th
    successor of token v is p[(v + j) mod vocabulary], where p is a permutation from the seed. So every branch leads to
    each token from one other: all tokens are equally frequent, and sequences begin with any of them.
    """
    import numpy as np

    permutation = np.argsort(np.random.PCG64([source[0], 0]).random_raw(vocabulary), kind="stable").astype(np.int32)
    bits = np.random.PCG64([*source])
    tokens = np.empty((length, samples), dtype=np.int32)
    tokens[0] = bits.random_raw(samples) % vocabulary
    for place in range(1, length):
        zeros = _trailing_zeros(bits.random_raw(-(-samples // 8)).astype("<u8").view("u1")[:samples])
        tokens[place] = permutation[(tokens[place - 1] + np.minimum(zeros, branches - 1)) % vocabulary]
    return np.ascontiguousarray(tokens.T)


def entropy(branches: int) -> float:
    """Nats per token of the chain, the least mean cross entropy of the next token: (2 − 2^(2 − branches)) · ln 2."""
    return (2.0 - 2.0 ** (2 - branches)) * math.log(2.0)


def _trailing_zeros(values: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Zeros at the end of each byte's binary digits: j or more with probability 2⁻ʲ."""
    import numpy as np

    table = np.array([8, *((byte & -byte).bit_length() - 1 for byte in range(1, 256))], dtype=np.int32)
    counted: NDArray[np.int32] = table[values]
    return counted
