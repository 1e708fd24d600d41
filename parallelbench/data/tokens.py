"""Made-up tokens of a Markov chain whose entropy is known: the loss has a floor that training can reach."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from parallelbench.config.components import Arrays
from parallelbench.data.generated import fingerprint_of
from parallelbench.data.markov import MOST_BRANCHES, chain, entropy
from parallelbench.data.sequences import Sequences
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

GENERATOR = "tokens-1"
"""Names how tokens are made: options and this give the same tokens on every machine."""


class Tokens(Sequences, frozen=True, kw_only=True):
    """Sequences of a chain in which each token has a few successors of known probability (`data.markov.chain`).

    The label of each position is the token after it. No model has a smaller expected loss than `floor`. All randomness
    is the raw bit stream of PCG64, which NumPy keeps stable over its versions. The test set is of the same chain.
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
        """Labels are tokens."""
        return self.vocabulary

    @property
    def floor(self) -> float:
        """The least expected cross entropy: the chain's entropy, in nats per token."""
        return entropy(self.branches)

    def missing_files(self, data_dir: Path) -> list[Path]:
        """Always empty: nothing is read."""
        return []

    def fingerprint(self, data_dir: Path) -> str:
        """sha256 of the options and of GENERATOR, which must change with the tokens."""
        return fingerprint_of(self, GENERATOR)

    def load(self, data_dir: Path) -> Arrays:
        """Make the sequences."""
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
