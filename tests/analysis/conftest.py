"""What tests of several files only read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.analysis.made_up import written

if TYPE_CHECKING:
    from analysis.runs.reader import Runs


@pytest.fixture(scope="session")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The made-up sweep in which nothing is wrong; tests alter copies of its tables."""
    return written(tmp_path_factory.mktemp("usual"))
