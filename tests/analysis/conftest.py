"""What tests of several files only read."""

from __future__ import annotations

import pytest

from analysis.runs.reader import Runs
from tests.analysis.made_up import written


@pytest.fixture(scope="session")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The made-up sweep in which nothing is wrong; tests alter copies of its tables."""
    return written(tmp_path_factory.mktemp("usual"))
