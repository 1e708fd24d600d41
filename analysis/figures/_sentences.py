"""The sentences below the figures: one per group of like work."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import polars as pl

from analysis import text
from analysis.comparison.baseline import unlike_groups

if TYPE_CHECKING:
    from collections.abc import Callable

    from analysis.reader import Runs


def ranked(runs: Runs, rows: pl.DataFrame, sentence: Callable[[pl.DataFrame], str], *, by: str = "group") -> str:
    """`per_group` of sentences that rank configurations. Those of which others disturbed runs are told of behind the
    others, so that they are neither first nor last; each sentence says why it ranks nothing.
    """
    unlike, marked = unlike_groups(runs), pl.col("disturbed").fill_null(False)

    def with_refusal(members: pl.DataFrame) -> str:
        issue = next((unlike[group] for group in members["group"] if group in unlike), None)
        parts = [part for part in (members.filter(~marked), members.filter(marked)) if part.height]
        told = "; apart from these, ".join(filter(None, map(sentence, parts)))
        disturbed = members.filter(marked)["configuration"].to_list()
        why = issue or (disturbed and f"others disturbed runs of {text.listed(disturbed)}")
        return told + (f"; this does not rank them, since {why}" if told and why else "")

    return per_group(rows, with_refusal, by=by, every=True)


MOST = 4
"""Groups that have a sentence of their own."""


def per_group(
    rows: pl.DataFrame, sentence: Callable[[pl.DataFrame], str], *, by: str = "group", every: bool = False
) -> str:
    """The sentence about the rows of each group, but for empty ones; of several groups each gets a line with its name.

    Empty where there is no sentence. `every`: no group's sentence is empty, so those that are not shown are not made.
    """
    groups = rows[by].n_unique() if rows.height else 0
    of_groups = ((str(group), sentence(members)) for (group,), members in rows.group_by(by, maintain_order=True))
    sentences = [(group, words) for group, words in islice(of_groups, MOST if every else None) if words]
    if len(sentences) == 1:
        return sentences[0][1][:1].upper() + sentences[0][1][1:] + "."
    more = (groups if every else len(sentences)) - MOST
    lines = [f"{group}: {words}." for group, words in sentences[:MOST]]
    return "\n".join(lines + ([f"The others: see the table ({more})."] if more > 0 else []))
