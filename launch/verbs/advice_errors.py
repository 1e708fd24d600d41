"""`advise --check`: how wrong the advisor is on measured steps of a file, and on finished sweeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.sweep import one_run
from launch.sweep.compose import group_choices, parse
from launch.verbs.console import console, listing, say
from parallelbench.errors import ConfigError, choices, count_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from analysis.advisor.step_tables import Evidence, Measured
    from launch.sweep.compose import Extension
    from parallelbench.config.sites import Hardware


def advise(overrides: Sequence[str], extension: Extension, *, check: str, known: Sequence[str], as_json: bool) -> int:
    """Print the errors of what `advise` would have said of finished runs, or of a CSV file's measured steps."""
    if Path(check).expanduser().is_dir():
        return check_sweeps([check, *overrides], known, extension.plugin, as_json=as_json)
    from analysis.advisor.check import judged
    from analysis.advisor.fit import published_fit
    from analysis.advisor.step_tables import read_measured, reasons, shipped

    for override in parse(overrides, extension.conf):
        if override.key_or_group.partition(".")[0] != "site":
            raise ConfigError(f"{override.input_line} says nothing about measured steps: only site=… and site.… do")
    if known:
        raise ConfigError(f"--from {known[0]} changes nothing here: files are predicted by the fit that advises")
    measured = read_measured(Path(check).expanduser())
    fit, asked = published_fit(), measured_steps(measured, overrides, extension)
    summary = judged(asked, known=shipped(measured.source), fit=fit).summary()
    summary |= {
        "fitted_rows": fit.rows,
        "refused_rows": sum(map(len, measured.refused.values())),
        "refused": list(reasons(measured.refused)),
        "unused_columns": measured.unused,
    }
    if as_json:
        print(json.dumps(summary))
    else:
        _print(summary)
    return 0


def measured_steps(measured: Measured, overrides: Sequence[str], extension: Extension) -> Evidence:
    """Measured steps with the machines that the overrides name, or else the file.

    Those on what no site file describes go to the refused ones; raises `ConfigError` where all do.
    """
    import msgspec

    from analysis.advisor.machine import machines_of
    from analysis.advisor.step_tables import Evidence

    found: dict[str | None, Hardware] = {}
    for accelerator in dict.fromkeys(step.accelerator for step in measured.steps):
        try:
            found[accelerator] = _hardware(overrides or [_site_of(accelerator, measured.source, extension)], extension)
        except ConfigError as error:
            lines = [step.line for step in measured.steps if step.accelerator == accelerator]
            if overrides or (not found and len(lines) == len(measured.steps)):
                raise
            measured.refused[str(error)] = lines
    if not found:
        raise ConfigError(f"nothing can be predicted: {'; '.join(measured.refused)}")
    measured.steps[:] = [step for step in measured.steps if step.accelerator in found]
    hardware = [
        found[step.accelerator]
        if overrides or step.network_gbit_per_s is None
        else msgspec.structs.replace(found[step.accelerator], network_gbit_per_s=step.network_gbit_per_s)
        for step in measured.steps
    ]
    return Evidence(
        layouts=measured.layouts,
        machines=machines_of(hardware),
        accelerators=[each.accelerator for each in hardware],
        models=[step.model for step in measured.steps],
        time_s=measured.time_s,
    )


def _site_of(accelerator: str | None, source: str, extension: Extension) -> str:
    """The override that names an accelerator's site, or that of the publication."""
    name, sites = accelerator or source, group_choices(extension.conf)["site"]
    if name not in sites:
        raise ConfigError(
            f"no site file describes GPU={name}: name the most similar one with site=… ({choices(name, sites)}), or "
            "write a site file with its data sheet"
        )
    return f"site={name}"


def _hardware(overrides: Sequence[str], extension: Extension) -> Hardware:
    site = one_run(overrides, extension, instead="choose one site").run.site
    if site.hardware is None:
        raise ConfigError(
            f"site={site.name} has no hardware figures to predict from: choose a site that has, e.g. site=a100_80gb, "
            f"or write site.hardware into its file as conf/site/a100_80gb.yaml does"
        )
    return site.hardware


def _print(summary: Mapping[str, Any]) -> None:
    _print_table(_rows("all rows", summary, grouped=True))
    say(", ".join(_figures(summary)))
    repeated = sum(row["also_in_evidence"] for row in summary["predictions"])
    say(
        f"Judged: the formulas that `advise model=gpt` ranks by, fitted to {summary['fitted_rows']} published steps; "
        f"{count_of(repeated, 'row')} of a layout among these, predicted by a fit without its width of model."
    )
    if summary["refused_rows"]:
        say(f"not predicted: {count_of(summary['refused_rows'], 'row')}")
    for line in summary["refused"]:
        say(f"  {line}")
    if summary["unused_columns"]:
        say(f"not used: {count_of(len(summary['unused_columns']), 'column')}: {', '.join(summary['unused_columns'])}")


def _print_table(rows: Iterable[tuple[str, ...]]) -> None:
    console().print(listing(("what", "rows", "mean", "median", "p90", "max"), list(rows)), crop=False)


def _rows(what: str, errors: Mapping[str, Any], *, grouped: bool) -> Iterator[tuple[str, ...]]:
    """All errors, those of each group, and those of the baselines."""
    yield _cells(what, errors)
    for key in ("strategy", "model", "devices") if grouped else ():
        for value, of_group in errors[f"by_{key}"].items():
            yield _cells(f"  {key} {value}", of_group)
    for baseline, its_errors in errors["baselines"].items():
        if its_errors is not None:
            yield _cells(f"  baseline {baseline}", its_errors)


def _cells(what: str, errors: Mapping[str, Any]) -> tuple[str, ...]:
    shares = (f"{100 * errors[f'{name}_error']:.1f} %" for name in ("mean", "median", "p90", "max"))
    return (what, str(errors["rows"]), *shares)


TITLES = {
    "leave_one_strategy_out": "each strategy predicted by a fit without it",
    "leave_one_model_out": "each model predicted by a fit without it",
    "folds": "each fifth predicted by a fit without it",
}


def check_sweeps(words: Sequence[str], known: Sequence[str], plugin: str | None, *, as_json: bool) -> int:
    """Print the errors of predicted steps against the runs below some folders; `known` may hold a calibration.

    Raises `ConfigError` for overrides: what was run is known.
    """
    from analysis.advisor.check import checked
    from analysis.advisor.knowledge import read_knowledge

    if overrides := [text for text in words if "=" in text]:
        raise ConfigError(f"{overrides[0]} says nothing about finished runs: leave it out")
    knowledge = read_knowledge([Path(text).expanduser() for text in (*words, *known)], learn=False, plugin=plugin)
    assert knowledge.evidence is not None, "folders were given"
    summary = checked(knowledge.evidence, knowledge.figures)
    if as_json:
        print(json.dumps(summary))
        return 0
    _print_table(rows_of_sweeps(summary))
    for name, split in summary["splits"].items():
        say(f"{TITLES[name]}: {', '.join(_figures(split))}")
    for line in summary["refused"]:
        say(f"not predicted: {line}")
    say(
        "Judged are the formulas and factors that `advise --from` ranks by, fitted to "
        f"{count_of(summary['fitted_rows'], 'configuration')} less those left out; "
        f"{count_of(summary['excluded_runs'], 'run')} left out, by the rules of all comparisons."
    )
    if knowledge.figures is not None:
        for note in knowledge.figures.notes:
            say(note)
    return 0


def _figures(split: Mapping[str, Any]) -> Iterator[str]:
    named = {
        "intervals hold": split["coverage"],
        "rank correlation": split["rank_correlation"],
        f"regret of {split['choices']} choices, median": split["median_regret"],
        "max": split["max_regret"],
    }
    for name, value in named.items():
        yield f"{name} {'not known, too few rows' if value is None else f'{value:.3g}'}"


def rows_of_sweeps(summary: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The table: each split, its groups and its baselines."""
    for name, split in summary["splits"].items():
        yield from _rows(TITLES[name], split, grouped=name == summary["split"])
