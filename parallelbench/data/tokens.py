"""Data sets of tokens, and made-up ones of a Markov chain of known entropy: a floor that the loss can reach."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta

from parallelbench.config.components import Arrays, Data, Kind
from parallelbench.data.content import fingerprint_of
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray


class Sequences(Data, frozen=True, kw_only=True):
    """Samples of `sequence` tokens, each labelled with the token after it."""

    mean: ClassVar[tuple[float, ...]] = ()
    std: ClassVar[tuple[float, ...]] = ()
    flip: ClassVar[bool] = False

    sequence: Annotated[int, Meta(ge=1, le=1_000_000)]
    """Tokens of a sample; of a text, bytes of a window."""

    @property
    def kind(self) -> Kind:
        return "tokens"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.sequence,)

    @property
    def label_shape(self) -> tuple[int, ...]:
        """The next token at each position."""
        return (self.sequence,)


GENERATOR = "tokens-1"
"""Names how tokens are made: options and this give the same tokens on every machine."""


class Tokens(Sequences, frozen=True, kw_only=True):
    """Sequences of a chain in which each token has a few successors of known probability (`chain`).

    The label of each position is the token after it. No model has a smaller expected loss than the chain's entropy,
    (2 − 2^(2 − branches)) · ln 2 nats per token. All randomness is the raw bit stream of PCG64, which NumPy keeps
    stable over its versions. The test set is of the same chain.
    """

    vocabulary: Annotated[int, Meta(ge=2, le=1_000_000)]
    """Different tokens."""
    branches: Annotated[int, Meta(ge=1, le=MOST_BRANCHES)]
    """Successors of each token, with the probabilities 1/2, 1/4, … of which the last comes twice; 1: one successor."""
    train_samples: Annotated[int, Meta(ge=1, le=10_000_000)]
    """Training samples in one epoch."""
    test_samples: Annotated[int, Meta(ge=1, le=10_000_000)]
    """Test samples."""
    data_seed: Annotated[int, Meta(ge=0, lt=2**31)]
    """Seed of the chain and of its sequences, apart from the run's seed: repeats see the same tokens."""

    def __post_init__(self) -> None:
        """Check what single fields can't say."""
        if self.branches > self.vocabulary:
            raise ConfigError(
                f"data.branches={self.branches} is more than data.vocabulary={self.vocabulary}: choose "
                f"data.branches={self.vocabulary} or fewer"
            )

    @property
    def num_classes(self) -> int:
        return self.vocabulary

    @property
    def loaded_bytes(self) -> int:
        """Tokens in int32, their successors in int64."""
        return (self.train_samples + self.test_samples) * (4 + 8) * self.sequence

    def fingerprint(self, data_dir: Path) -> str:
        """sha256 of the options and of GENERATOR, which must change with the tokens."""
        return fingerprint_of(self, GENERATOR)

    def load(self, data_dir: Path) -> Arrays:
        import numpy as np

        train, test = self._sequences(self.train_samples, stream=1), self._sequences(self.test_samples, stream=2)
        return Arrays(
            train_images=train[:, :-1],
            train_labels=train[:, 1:].astype(np.int64),
            test_images=test[:, :-1],
            test_labels=test[:, 1:].astype(np.int64),
        )

    def _sequences(self, samples: int, *, stream: int) -> NDArray[np.int32]:
        return chain(
            samples,
            self.sequence + 1,
            vocabulary=self.vocabulary,
            branches=self.branches,
            source=(self.data_seed, stream),
        )


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


def _trailing_zeros(values: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Zeros at the end of each byte's binary digits: j or more with probability 2⁻ʲ."""
    import numpy as np

    table = np.array([8, *((byte & -byte).bit_length() - 1 for byte in range(1, 256))], dtype=np.int32)
    counted: NDArray[np.int32] = table[values]
    return counted
