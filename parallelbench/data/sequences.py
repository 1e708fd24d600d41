"""What data sets of tokens have in common."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from parallelbench.config.components import Data, Kind


class Sequences(Data, frozen=True, kw_only=True):
    """Samples of `sequence` tokens, each labelled with the token after it."""

    mean: ClassVar[tuple[float, ...]] = ()
    std: ClassVar[tuple[float, ...]] = ()
    flip: ClassVar[bool] = False

    sequence: Annotated[int, Meta(ge=1, le=1_000_000)]
    """Tokens of a sample; of a text, bytes of a window."""

    @property
    def kind(self) -> Kind:
        """Whole numbers, one per position."""
        return "tokens"

    @property
    def shape(self) -> tuple[int, ...]:
        """One token at each position."""
        return (self.sequence,)

    @property
    def label_shape(self) -> tuple[int, ...]:
        """The next token at each position."""
        return (self.sequence,)
