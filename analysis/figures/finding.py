"""What a figure shows, in a sentence per kind of work, with the numbers of these runs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import polars as pl

from analysis import text
from analysis.comparison.baseline import unlike_groups
from analysis.comparison.summary import summary

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from analysis.comparison.notes import Note
    from analysis.runs.reader import Runs

NOT_RANKED = "this does not rank them"
"""What withdraws the ranking of a sentence before."""
MOST_TOLD = 4
"""Configurations in order that one sentence names; of more, the first three and the last one."""


@dataclass(frozen=True, kw_only=True)
class Sentence:
    """A finding that says something of each configuration, one sentence for each group."""

    rows: Callable[[Runs], pl.DataFrame] = summary
    """A row per configuration."""
    by: str | None = None
    """The column that orders them, the smallest first; those without it are left out. None: they are in order."""
    descending: bool = False
    each: Callable[[dict[str, Any]], str]
    """What is said of a row."""
    whole: str | Callable[[pl.DataFrame], str]
    """The sentence, with {} where what is said of the rows stands."""
    nothing: str
    """Where there is no row."""
    sep: str = "; "
    group: str = "group"
    ranks: bool = True
    """Whether the order says which is better: then the sentence says where it may not, and why."""
    footnote: str = ""
    """A line below the sentences."""
    more: Callable[[Runs], list[str]] = lambda runs: []
    """Further lines, also where there is no row."""

    def __call__(self, runs: Runs) -> str:
        """The finding about these runs."""
        rows = self.rows(runs)
        rows = rows if self.by is None else rows.drop_nulls(self.by)
        told = per_group(rows, self._ranked if self.ranks else self._of, by=self.group, every=True)
        works = rows[self.group].n_unique()
        why = _not_ranked(unlike_groups(runs), rows, by=self.group) if told and self.ranks else {}
        for reason, groups in why.items():
            of = "each kind of work" if len(groups) == works else text.listed(groups, sep="; ")
            where = f"Of {of}, " if works > 1 else "But "
            told += f"\n{where}{NOT_RANKED}, since {reason} (see the warnings)."
        lines = [told, self.footnote if told else "", *self.more(runs)]
        return "\n".join(filter(None, lines)) or self.nothing

    def _of(self, rows: pl.DataFrame) -> str:
        if self.by is not None:
            rows = rows.sort(self.by, descending=self.descending, maintain_order=True)
        whole = self.whole if isinstance(self.whole, str) else self.whole(rows)
        each = [self.each(row) for row in rows.iter_rows(named=True)]
        if self.by is None or len(each) <= MOST_TOLD:
            return whole.format(text.listed(each, most=MOST_TOLD if self.by else 3, sep=self.sep))
        return whole.format(f"{text.listed(each[:-1], sep=self.sep)}{self.sep}at the other end {each[-1]}")

    def _ranked(self, rows: pl.DataFrame) -> str:
        """Configurations of which others disturbed runs are told of behind the others, so that they are neither first
        nor last.
        """
        marked = pl.col("disturbed").fill_null(False)
        parts = [part for part in (rows.filter(~marked), rows.filter(marked)) if part.height]
        return "; apart from these, ".join(filter(None, map(self._of, parts)))


def _not_ranked(unlike: Mapping[str, Note], rows: pl.DataFrame, *, by: str) -> dict[str, list[str]]:
    """Why configurations are not ranked → the groups of which that is true, among those that have a sentence."""
    found: dict[str, list[str]] = defaultdict(list)
    for (group,), members in islice(rows.group_by(by, maintain_order=True) if rows.height else (), MOST_SENTENCES):
        disturbed = members.filter(pl.col("disturbed").fill_null(False))["configuration"].to_list()
        issue = next((unlike[each] for each in members["group"] if each in unlike), None)
        if issue is not None or disturbed:
            found[issue.brief if issue else f"others disturbed runs of {text.listed(disturbed)}"].append(str(group))
    return found


MOST_SENTENCES = 4
"""Groups that have a sentence of their own."""


def per_group(
    rows: pl.DataFrame, sentence: Callable[[pl.DataFrame], str], *, by: str = "group", every: bool = False
) -> str:
    """The sentence about the rows of each group, but for empty ones; of several groups each gets a line with its name.

    Empty where there is no sentence. `every`: no group's sentence is empty, so those that are not shown are not made.
    """
    groups = rows[by].n_unique() if rows.height else 0
    of_groups = ((str(group), sentence(members)) for (group,), members in rows.group_by(by, maintain_order=True))
    sentences = [(group, words) for group, words in islice(of_groups, MOST_SENTENCES if every else None) if words]
    if len(sentences) == 1:
        return sentences[0][1][:1].upper() + sentences[0][1][1:] + "."
    more = (groups if every else len(sentences)) - MOST_SENTENCES
    lines = [f"{group}: {words}." for group, words in sentences[:MOST_SENTENCES]]
    return "\n".join(lines + ([f"The others: see the table ({more})."] if more > 0 else []))
