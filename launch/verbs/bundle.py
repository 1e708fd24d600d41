"""The verbs for a publication: `bundle` packs results with all that belongs to them, `rerun` trains them again."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from launch.verbs.console import console, existing, say
from parallelbench.config.identity import run_id
from parallelbench.errors import ConfigError, count_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from analysis.comparison.counterparts import Agreement
    from launch.sweep.compose import Extension


def bundle(
    folder: str, extension: Extension, *, out: str | None, title: str | None, authors: Sequence[str] | None
) -> int:
    """Write one archive of all runs below a folder; the last line printed is its path."""
    from analysis import load
    from analysis.comparison.exclusions import require_finished
    from analysis.report.page import write_report_of
    from launch.bundle import SUFFIX, contents, left_out, usual_author, without_secrets, write

    runs = load(existing(folder), plugin=extension.plugin)
    require_finished(runs)
    path = Path(out).expanduser() if out else Path(f"{runs.root.resolve().name}-bundle{SUFFIX}")
    _require_new(path, SUFFIX)
    sweeps = ", ".join(sorted(set(runs.run["sweep"])))
    names = authors or [usual_author()]
    with tempfile.TemporaryDirectory() as temporary:
        page = write_report_of(runs, Path(temporary) / "report")
        name, titled = path.name.removesuffix(SUFFIX), title or f"Measurements with parallelbench: {sweeps}"
        files, secrets = without_secrets(contents(runs, page.parent, name=name, title=titled, authors=names))
        checksum = write(path, files)
    for line in (*left_out(runs), *secrets):
        say(line)
    if not authors:
        say(f'CITATION.cff names {names[0]} as author: --author "Family, Given" names others')
    say(f"{count_of(len(files) + 1, 'file')}, sha256 {checksum}; publish the sha256 beside the bundle")
    say(f"next: parallelbench rerun {shlex.quote(str(path))}")
    print(path)
    return 0


def _require_new(path: Path, suffix: str) -> None:
    if not path.name.endswith(suffix) or path.name.startswith(".") or "\\" in path.name:
        raise ConfigError(
            f"--out {path}: a bundle is a file NAME{suffix}, without a dot before it or a backslash in it"
        )
    if path.exists():
        raise ConfigError(f"{path} exists: delete it, or name another file with --out FILE")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path.absolute().parent} is no folder: make it, or name another file with --out FILE")


def rerun(archive: str, extension: Extension, *, overrides: Sequence[str], out: str | None) -> int:
    """Train the runs of a bundle again, and print what agrees; 1 where something does not."""
    from analysis import load
    from analysis.comparison.counterparts import agreements
    from launch.bundle import RESULTS, SUFFIX, planned_again, require_known, require_readable, train, unpack
    from launch.local import EXIT_INTERRUPTED

    path = Path(archive).expanduser()
    results = Path(out).expanduser() if out else Path(f"{path.name.removesuffix(SUFFIX)}-rerun")
    with tempfile.TemporaryDirectory() as temporary:
        root = unpack(path, Path(temporary))
        require_known(root, path)
        bundled = load(root / RESULTS, plugin=extension.plugin)
        require_readable(bundled, path)
        plan = planned_again(bundled, results, overrides, extension)
        if others := bundled.run.height - len(plan):
            say(f"not trained again, since they did not train to their end: {count_of(others, 'run')} of the bundle")
        if (code := train(list(plan.values()), console())) == EXIT_INTERRUPTED:
            return code
        again = load(results, plugin=extension.plugin)
        found = agreements(bundled, again, {known: run_id(planned.run) for known, planned in plan.items()})
    console().print(_table(found))
    say(_summed_up(found))
    print(results)
    return 0 if all(each.agrees for each in found) else 1


def _table(found: Sequence[Agreement]) -> Table:
    """One row per run: what agrees, and both times."""
    from rich.table import Table

    from analysis import text

    shown = Table(box=None, pad_edge=False)
    for heading in ("run", "losses", "test accuracy", "parity", "time per epoch", "agrees"):
        shown.add_column(heading, overflow="fold")
    for each in found:
        if each.unfinished:
            shown.add_row(each.run, each.unfinished, "", "", "", "no")
            continue
        losses = each.losses.value if not each.difference else f"{each.losses.value} ({each.difference:.2g} apart)"
        accuracies, times = " → ".join(map(text.percent, each.accuracies)), " → ".join(map(text.seconds, each.times_s))
        within = "" if each.allowed_accuracy is None else f" (± {text.percent(each.allowed_accuracy)})"
        parity = " → ".join(map(text.parity, each.parity))
        data = "" if each.same_data else ", on other data"
        row = (each.run, losses + data, accuracies + within, parity, times, "yes" if each.agrees else "no")
        shown.add_row(*row)
    return shown


def _summed_up(found: Sequence[Agreement]) -> str:
    agreeing = sum(each.agrees for each in found)
    waiting = sum(bool(each.unfinished) for each in found)
    rest = f"; {waiting} have no result: the same command goes on" if waiting else ""
    return (
        f"Agreeing with the bundle in losses, accuracy and parity: {agreeing} of {count_of(len(found), 'run')}{rest}. "
        "Left is the bundle's, right is this machine's. Times are told, not judged."
    )
