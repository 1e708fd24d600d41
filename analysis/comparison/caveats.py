"""What blocks or limits several comparisons: said once, with the comparisons that it is true of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analysis import text
from analysis.comparison.policy import format_differences

if TYPE_CHECKING:
    from collections.abc import Iterable

    from analysis.comparison.policy import Issue


def said_once(issues: Iterable[tuple[str, Issue]], *, of: int | None = None) -> list[str]:
    """Issues of named comparisons in sentences, equal ones together.

    Each begins with the names that it is true of, unless it is true of all. `of`: how many comparisons there are; None:
    always with names.
    """
    named: dict[tuple[object, str], dict[str, Issue]] = {}
    for name, issue in issues:
        # Commands differ between comparisons: one is enough.
        named.setdefault((issue.kind, format_differences(issue.differences)), {})[name] = issue
    sentences = []
    for found in named.values():
        words = text.sentence(str(next(iter(found.values()))))
        sentences.append(words if len(found) == of else f"{text.listed(list(found))}: {words}")
    return sentences
