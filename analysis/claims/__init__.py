"""Claims of publications, judged by runs: `judge_all(runs)`. Each publication is a YAML file; see `grammar`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from analysis.claims.grammar import Claim, Publication, publications
from analysis.claims.verdict import Case, Judgement, judge, judge_together
from parallelbench.errors import ConfigError, choices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.reader import Runs

__all__ = ["Case", "Claim", "Judgement", "Publication", "chosen", "judge", "judge_all", "publications"]


def judge_all(runs: Runs, of: Sequence[Publication] | None = None) -> list[Judgement]:
    """Judge every claim of these publications (default: the suite's own), in their order."""
    of = publications() if of is None else of
    return judge_together(runs, [(publication.seed, claim) for publication in of for claim in publication.claims])


def chosen(of: Sequence[Publication] | None, names: Sequence[str]) -> list[Publication]:
    """The publications (default: the suite's own), with only the claims of these names if any are given."""
    all_of = list(publications() if of is None else of)
    valid = [claim.name for publication in all_of for claim in publication.claims]
    for name in names:
        if name not in valid:
            raise ConfigError(f"{name} is no claim: {choices(name, valid)}")
    if not names:
        return all_of
    kept = [(publication, [c for c in publication.claims if c.name in names]) for publication in all_of]
    return [msgspec.structs.replace(publication, claims=claims) for publication, claims in kept if claims]
