"""What an engine does: take an Arrow table in, carry out the recipe, give an Arrow table out.

Each engine is a module, which loads its library only in the process that uses it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import pyarrow as pa

    from parallelbench.config.task import Task


class Engine(ABC):
    """An engine in its own process, with a number of threads."""

    package: ClassVar[str]
    """The distribution whose version is recorded."""

    def __init__(self, task: Task, threads: int) -> None:
        self.task, self.threads = task, threads

    @abstractmethod
    def take_in(self, table: pa.Table) -> Any:
        """The table in the engine's own form."""

    @abstractmethod
    def compute(self, data: Any) -> Any:
        """Carry out the recipe."""

    @abstractmethod
    def give_out(self, result: Any) -> pa.Table:
        """The result as an Arrow table."""

    def shared(self, data: Any) -> set[int] | None:
        """Addresses of the buffers that the engine's own form consists of; None: the engine doesn't say."""
        return None
