"""Fixtures of several test files."""

from __future__ import annotations

import fnmatch
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is marked with `cases`, only those are run by `make test`."""
    told: dict[str, list[bool]] = {}
    for item in items:
        for mark in item.iter_markers("cases"):
            test, _, name = item.nodeid.rstrip("]").partition("[")
            tells = any(fnmatch.fnmatchcase(name, pattern) for pattern in mark.args)
            told.setdefault(test, []).append(tells)
            if not tells:
                item.add_marker("exhaustive")
    for test, cases in told.items():
        if len(cases) > 1 and not any(cases):
            raise pytest.UsageError(f"{test}: no case is one of those that its mark names")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of its own, of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"can't mount a small disk here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)
