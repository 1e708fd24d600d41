"""CITATION.cff: how results are cited, in version 1.2.0 of the Citation File Format."""

from __future__ import annotations

import os
import pwd
from typing import TYPE_CHECKING, Any

import yaml

from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

CFF_VERSION = "1.2.0"


def citation(*, title: str, authors: Sequence[str], day: str, version: str) -> str:
    """The file's text. `day`: of the last measurement, as 2026-11-23. `version`: the suite's."""
    suite: dict[str, Any] = {
        "type": "software",
        "title": "parallelbench",
        "version": version,
        "authors": [{"name": "The parallelbench authors"}],
    }
    content: dict[str, Any] = {
        "cff-version": CFF_VERSION,
        "message": "If you use these results, please cite them as below.",
        "type": "dataset",
        "title": title,
        "authors": [_author(name) for name in authors],
        "date-released": day,
        "references": [suite],
    }
    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def _author(name: str) -> dict[str, str]:
    """ "Family, Given" is a person; a name without a comma is given as it is: a group, say."""
    if not all(part.strip() for part in name.split(",")) or name.count(",") > 1:
        raise ConfigError(f'--author {name!r}: expected a name, or "Family, Given"')
    family, comma, given = (part.strip() for part in name.partition(","))
    return {"family-names": family, "given-names": given} if comma else {"name": family}


def usual_author() -> str:
    """The full name of this account, or its login."""
    try:
        account = pwd.getpwuid(os.getuid())
    except KeyError:  # containers may have no such entry
        return f"user {os.getuid()}"
    full_name = account.pw_gecos.partition(",")[0].strip()
    return full_name or account.pw_name
