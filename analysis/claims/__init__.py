"""Claims of publications, judged by runs: `judge_all(runs)`. Each publication is a YAML file; see `claim`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analysis.claims.claim import Claim, Publication, publications
from analysis.claims.verdict import Case, Judgement, judge, judge_together
from parallelbench.errors import ConfigError, choices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.runs.reader import Runs

__all__ = [
    "Case",
    "Claim",
    "Judgement",
    "Publication",
    "judge",
    "judge_all",
    "publications",
    "require_claims",
]


def judge_all(runs: Runs, of: Sequence[Publication] | None = None, *, names: Sequence[str] = ()) -> list[Judgement]:
    """The verdicts on the claims of these publications (default: the suite's own), in their order.

    `names`: return only those. All are judged in any case, so that naming a claim doesn't change its verdict: intervals
    allow for all verdicts.
    """
    of = publications() if of is None else of
    judged = judge_together(runs, [(publication.seed, claim) for publication in of for claim in publication.claims])
    return [judgement for judgement in judged if not names or judgement.claim.name in names]


def require_claims(names: Sequence[str], of: Sequence[Publication] | None = None) -> None:
    """Raise `ConfigError` for a name that is no claim of these publications (default: the suite's own)."""
    valid = [claim.name for publication in (publications() if of is None else of) for claim in publication.claims]
    for name in names:
        if name not in valid:
            raise ConfigError(f"{name} is no claim: {choices(name, valid)}")
