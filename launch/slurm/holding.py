"""Keep others from submitting sweeps while their folders are looked at and changed."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from launch.slurm import record
from parallelbench.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


@contextmanager
def holding(sweeps: Iterable[Path]) -> Iterator[None]:
    """Nobody submits these sweeps meanwhile; raises `ConfigError` while somebody does."""
    with ExitStack() as locks:
        for sweep in sweeps:
            try:
                record.submissions(sweep)
            except ConfigError:
                continue  # another user's: its runs count as unknown, and nothing of them is changed
            with suppress(StorageError):  # on a full disk, which is a reason more to remove something
                locks.enter_context(record.lock(sweep))
        yield
