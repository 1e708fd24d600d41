"""What publications claim, held against runs: `judge_all(runs)`; one YAML file per publication, `grammar` says how."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from analysis.claims.grammar import Claim, Publication, publications
from analysis.claims.verdict import Case, Judgement, judge
from parallelbench.errors import ConfigError, choices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.reader import Runs

__all__ = ["Case", "Claim", "Judgement", "Publication", "chosen", "judge", "judge_all", "publications"]


def judge_all(runs: Runs, of: Sequence[Publication] | None = None) -> list[Judgement]:
    """Every claim of these publications, by default of those that the suite comes with, in their order."""
    return [
        judge(runs, claim, seed=publication.seed)
        for publication in (publications() if of is None else of)
        for claim in publication.claims
    ]


def chosen(of: Sequence[Publication] | None, names: Sequence[str]) -> list[Publication]:
    """The publications, by default those that the suite comes with, with only the claims of these names, if any."""
    all_of = list(publications() if of is None else of)
    valid = [claim.name for publication in all_of for claim in publication.claims]
    for name in names:
        if name not in valid:
            raise ConfigError(f"{name} is no claim: {choices(name, valid)}")
    if not names:
        return all_of
    kept = [(publication, [c for c in publication.claims if c.name in names]) for publication in all_of]
    return [msgspec.structs.replace(publication, claims=claims) for publication, claims in kept if claims]
