"""Progress on a terminal: the present run, its epoch, the time left. Plain lines where there is no terminal."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from parallelbench.errors import count_of, duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import Console
    from rich.progress import TaskID

    from parallelbench.results.attempt import Outcome

_STYLES = {"ok": "green", "parity_failed": "yellow"}


class Display:
    """Shows a sweep's progress."""

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._sweep: TaskID | None = None
        self._total = self._started = 0
        self._begun_at = 0.0

    @contextmanager
    def sweep(self, *, total: int, done: int, failed: Mapping[str, int]) -> Iterator[None]:
        """A context around all runs. Those `done` are not started, nor those that `failed`: outcome → how many."""
        self._total, self._begun_at = total, time.monotonic()
        if done:
            verb = "is" if done == 1 else "are"
            self.console.print(f"{count_of(done, 'run')} {verb} done or running already; {total} to start")
        if failed:
            counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(failed.items()))
            self.console.print(f"not started: {counts} (--retry {','.join(sorted(failed))} tries again)")
        with self._progress:
            if total > 1:
                self._sweep = self._progress.add_task("sweep", total=total, note="")
            yield

    @contextmanager
    def run(self, name: str, *, epochs: int) -> Iterator[RunWatcher]:
        """A context around one run."""
        self._started += 1
        task = self._progress.add_task(name, total=epochs, note="starting")
        try:
            yield RunWatcher(self, name, task)
        finally:
            self._progress.remove_task(task)

    def update(self, task: TaskID, **changes: Any) -> None:
        """Change what a run's line shows."""
        self._progress.update(task, **changes)

    def report(self, name: str, outcome: Outcome, seconds: float, accuracy: float | None) -> None:
        """One lasting line per finished run."""
        style = _STYLES.get(outcome.outcome, "red")
        count = f"[{self._started}/{self._total}] " if self._total > 1 else ""
        result = f"test accuracy {accuracy:.1%}, " if accuracy is not None else ""
        reason = "" if outcome.outcome == "ok" else f"  {escape(outcome.reason)}"
        self.console.print(
            f"{count}[{style}]{outcome.outcome}[/] {name}  {result}{seconds:.1f} s{reason}", highlight=False
        )
        if self._sweep is not None:
            elapsed = time.monotonic() - self._begun_at
            left = elapsed / self._started * (self._total - self._started)
            self._progress.update(self._sweep, completed=self._started, note=f"about {duration(left)} left")


class RunWatcher:
    """Turns the journal of one run into its line of progress."""

    def __init__(self, display: Display, name: str, task: TaskID) -> None:
        self._display, self._name, self._task = display, name, task
        self._begun_at = time.monotonic()
        self._accuracy: float | None = None

    def event(self, event: dict[str, Any]) -> None:
        """A phase that begins, or an epoch that is done."""
        if event.get("table") == "epochs":
            row = event["row"]
            self._accuracy = row["test_accuracy"]
            self._display.update(self._task, completed=row["epoch"], note=self._note(row))
        elif event["event"] == "phase":
            epoch = f" {event['epoch']}/{event['epochs']}" if "epoch" in event else ""
            if self._accuracy is None:
                self._display.update(self._task, note=f"{event['phase']}{epoch}")

    def finished(self, outcome: Outcome) -> None:
        """The run is over."""
        self._display.report(self._name, outcome, time.monotonic() - self._begun_at, self._accuracy)

    @staticmethod
    def _note(row: dict[str, Any]) -> str:
        if row["test_loss"] is None or row["train_loss"] is None:
            return f"epoch {row['epoch']}: the loss is not finite"
        return f"epoch {row['epoch']}: test accuracy {row['test_accuracy']:.1%}, loss {row['test_loss']:.3f}"
