"""What a model is found to be when it is asked, by one step: `parallelbench.rank.model_traits`. Loads no torch."""

from __future__ import annotations

from typing import NamedTuple


class Traits(NamedTuple):
    """What strategies and checks must not assume of a model. The defaults are those of the suite's own models."""

    draws: bool = False
    """Whether it draws random numbers in training, as dropout does."""
    draws_in_evaluation: bool = False
    """Whether it draws them in evaluation, too."""
    mixes_samples: bool = False
    """Whether what it makes of a sample in training depends on the others of a batch, as in batch normalisation."""
    untouched: tuple[str, ...] = ()
    """Parameters that need a gradient, and that some step gives none."""
    scalars: tuple[str, ...] = ()
    """Parameters without a dimension."""
    empty: tuple[str, ...] = ()
    """Parameters without a value."""
    complex_parameters: tuple[str, ...] = ()
    complex_buffers: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()
    """Buffers of whole numbers that a step changes."""
    shared: tuple[tuple[str, ...], ...] = ()
    """Names of each parameter that several layers share."""


TRAITS = Traits()
"""Of a model that is not asked."""
