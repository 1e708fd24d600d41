"""How a run names files of the user's own in a published format: by their content and their sizes."""

from __future__ import annotations

import re
from typing import NamedTuple

from parallelbench.errors import ConfigError

CONTENT_DIGITS = 12
"""Hexadecimal digits of the content's sha256 that a name has."""
_NAME = re.compile(rf"([0-9a-f]{{{CONTENT_DIGITS}}})-([1-9][0-9]{{0,8}})-([1-9][0-9]{{0,8}})")


class OwnFiles(NamedTuple):
    """Files of one's own that were prepared; part of the run's id, which other files therefore change."""

    content: str
    """The first digits of the sha256 of the arrays."""
    train_samples: int
    test_samples: int

    @property
    def name(self) -> str:
        """What `data.files` is in a run, so that sizes are known before anything is read."""
        return f"{self.content}-{self.train_samples}-{self.test_samples}"

    @classmethod
    def named(cls, name: str, data: str) -> OwnFiles:
        """What a name says; raises `ConfigError` for anything else, such as the folder that only `prepare` takes."""
        if (found := _NAME.fullmatch(name)) is None:
            raise ConfigError(
                f"data.files={name} is no name of prepared files: run `parallelbench prepare data={data} "
                f"data.files={name}` first, with the folder that holds them; it prints the name that runs take"
            )
        return cls(found[1], int(found[2]), int(found[3]))


def is_name(text: str) -> bool:
    """Whether `data.files` is the name of prepared files, not a folder."""
    return _NAME.fullmatch(text) is not None
