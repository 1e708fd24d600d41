"""The verbs that read results: `report`, `claims`, `compare` and `history`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launch.verbs.console import console, existing, listing, print_claims, print_comparison, print_history
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from analysis import Comparison, Runs
    from launch.sweep.compose import Extension


def report(
    folder: str,
    extension: Extension,
    *,
    out: str | None,
    target: float | None,
    baseline: str | None = None,
    figure: str | None = None,
    panel: str | None = None,
    width: int | None = None,
    sentence: bool = False,
    proposal: bool = False,
    epochs: int | None = None,
    steps: int | None = None,
    work: str | None = None,
) -> int:
    """Write figures, tables and the page; print the answers, the summary, and what limits them.

    Or one figure for a paper, and print its sentence; or print what a paper may say, as sentences and as a table; or
    write the page for an allocation.
    """
    from analysis import format_exclusions, load, summary_table
    from analysis.claims.figures import is_reproduction
    from analysis.comparison.baseline import refusals
    from analysis.comparison.campaign import campaign, require_baseline
    from analysis.comparison.notes import write
    from analysis.comparison.summary import unreached
    from analysis.metrics.runs import require_accuracy
    from analysis.report.answers import headline
    from analysis.report.claims import at_a_glance, judged
    from analysis.report.page import write_report_of

    require_accuracy(target)
    for option, value in (("--panel", panel), ("--width", width)):
        if figure is None and value is not None:
            raise ConfigError(f"{option} {value} is of one figure: name it with --figure NAME")
    for option, value in (("--figure", figure), ("--out", out)):
        if sentence and value is not None:
            raise ConfigError(f"--sentence prints, and writes no {option} {value}: leave out one of the two")
    for option, given in (("--epochs", epochs), ("--steps", steps), ("--work", work)):
        if given is not None and not proposal:
            raise ConfigError(f"{option} {given} is of the page for an allocation: add --proposal")
    if proposal and figure is not None:
        raise ConfigError(f"--proposal and --figure {figure} are two documents: leave out one of the two")
    if proposal and sentence:
        raise ConfigError("--proposal writes a page and --sentence prints: leave out one of the two")
    runs = replace(load(existing(folder), plugin=extension.plugin), target=target, baseline=baseline)
    if baseline is not None:
        require_baseline(campaign(runs), baseline)
    if proposal:
        from analysis.report.proposal import write_proposal

        to = Path(out).expanduser() if out else None
        for document in write_proposal(runs, to, epochs=epochs, steps=steps, work=work):
            print(document)
        return 0
    if sentence:
        return _sentences(runs)
    if figure is not None:
        return _paper(runs, figure, panel=panel, width_mm=width, out=out)
    page = write_report_of(runs, out)
    claimed = [at_a_glance(judged(runs))] if is_reproduction(runs) else []
    *found, next_step = headline(runs, with_refused=False)
    for line in filter(None, (*found, *claimed)):
        console().print(line, markup=False, highlight=False)
    console().print()
    console().print(summary_table(runs))
    _remark([*write([*unreached(runs), *refusals(runs)]), *format_exclusions(runs)])
    console().print(next_step, markup=False, highlight=False, soft_wrap=True)
    print(page)
    return 0


def _paper(runs: Runs, name: str, *, panel: str | None, width_mm: int | None, out: str | None) -> int:
    from analysis.comparison.exclusions import require_finished
    from analysis.report.figure import COLUMN_MM, write_figure

    require_finished(runs)
    to = Path(out).expanduser() if out else runs.root / "paper"
    figure, files = write_figure(runs, name, panel=panel, width_mm=width_mm or COLUMN_MM, out=to)
    _remark([figure.finding])
    for file in files:
        print(file)
    return 0


def _sentences(runs: Runs) -> int:
    from analysis.comparison.exclusions import require_finished
    from analysis.report.sentence import latex_table, sentences

    require_finished(runs)
    for each in sentences(runs):
        print(each.text or f"{each.configuration} ({each.group}): no sentence: {each.reason}.")
    print()
    print(latex_table(runs), end="")
    return 0


def claims(folder: str, extension: Extension, *, names: Sequence[str], file: str | None, as_json: bool) -> int:
    """Claims of publications, compared with the runs below a folder: all in one table, or the named ones in full."""
    from analysis import format_exclusions, load
    from analysis.claims import Publication, judge_all, require_claims
    from analysis.claims.table import details, judgements_table
    from analysis.comparison.exclusions import require_finished

    root = existing(folder)
    of = [Publication.read(Path(file))] if file else None
    require_claims(names, of)
    runs = load(root, plugin=extension.plugin)
    require_finished(runs)
    judgements = judge_all(runs, of, names=names)
    if as_json:
        print_claims(judgements, format_exclusions(runs))
        return 0
    for shown in map(details, judgements) if names else [judgements_table(judgements, root)]:
        console().print(shown)
    _remark(format_exclusions(runs))
    return 0


def compare(
    folders: Sequence[str],
    extension: Extension,
    *,
    by: str | None,
    across: str,
    fail_if_slower: str | None,
    as_json: bool,
) -> int:
    """Print the comparison of the second side with the first; the exit code is 0, or the gate's with a margin."""
    from analysis.comparison import printed
    from analysis.comparison.gate import gate, percentage

    margin = None if fail_if_slower is None else percentage(fail_if_slower)
    roots = [str(existing(folder)) for folder in folders]
    comparison = _comparison(roots, extension, by=by, across=tuple(filter(None, across.split(","))))
    passed = None if margin is None else gate(comparison, margin=margin)
    if as_json:
        print_comparison(comparison, printed.notes(comparison), passed)
    else:
        console().print(listing(*printed.table(comparison)), crop=False)
        _remark(printed.notes(comparison))
        if passed:
            print(passed.message)
    return passed.code if passed else 0


def history(
    folders: Sequence[str],
    extension: Extension,
    *,
    metric: str,
    where: Sequence[str],
    since: str | None,
    csv: str | None,
    figure: str | None,
    as_json: bool,
) -> int:
    """Print a metric of one configuration over the states of its sources; the exit code says whether it is worse."""
    from analysis.comparison import history as of_history
    from analysis.report import history as shown

    found = of_history.history([existing(each) for each in folders], metric, where=where, plugin=extension.plugin)
    judged = of_history.outcome(found, since=since)
    files = [(Path(name).expanduser(), write) for name, write in ((csv, shown.write_csv), (figure, shown.write_figure))
             if name]  # fmt: skip
    for path, write in files:
        write(found, path)
    if as_json:
        print_history(found, judged)
        return judged.code
    console().print(f"{metric}: {found.configuration}", style="italic", markup=False, highlight=False)
    console().print(listing(*shown.table(found)), crop=False)
    _remark(found.notes)
    print(judged.message)
    for path, _ in files:
        print(path)
    return judged.code


def _remark(lines: Iterable[str]) -> None:
    for line in lines:
        console().print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


def _comparison(folders: Sequence[str], extension: Extension, *, by: str | None, across: Sequence[str]) -> Comparison:
    import analysis

    if by is not None:
        (folder,) = folders if len(folders) == 1 else ("",)
        if not folder:
            raise ConfigError("--by compares runs of one folder: name one DIR, or leave out --by")
        runs = analysis.load(folder, plugin=extension.plugin)
        return analysis.by(runs, *_choice(by, runs), across=across)
    if len(folders) != 2:
        raise ConfigError("compare takes two folders, or one and --by KEY=A,B, e.g. --by strategy=ddp,fsdp")
    one, other = (analysis.load(folder, plugin=extension.plugin) for folder in folders)
    if one.root.resolve() == other.root.resolve():
        raise ConfigError(f"{folders[0]} and {folders[1]} are the same folder: a comparison needs two")
    return analysis.compare(one, other, across=across)


def _choice(by: str, runs: Runs) -> tuple[str, str, str]:
    """The key and its two values, e.g. of `strategy=ddp,fsdp`. Values may have commas, too."""
    from analysis.comparison.sides import as_recorded, run_ids_by

    if not by.strip().isprintable():
        raise ConfigError(f"--by {by!r} holds a line end or a tab, which no key or value has: leave it out")
    key, _, values = by.strip().partition("=")
    splits = [(values[:at].strip(), values[at + 1 :].strip()) for at, letter in enumerate(values) if letter == ","]
    if len(splits) > 1:
        known = run_ids_by(runs, key)
        splits = [split for split in splits if known.keys() >= {as_recorded(value, known) for value in split}]
    one, other = splits[0] if len(splits) == 1 else ("", "")
    if not (key and one and other) or one == other:
        found = f"; values of {key} here: {', '.join(sorted(run_ids_by(runs, key)))}" if key else ""
        raise ConfigError(f"--by {by}: expected a key and two values of it, e.g. --by strategy=ddp,fsdp{found}")
    return key, one, other
