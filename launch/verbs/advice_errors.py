"""`advise --check`: how wrong the advisor is on measured steps that its fit has not seen, and on finished sweeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.sweep import one_run
from launch.sweep.compose import group_choices, parse
from launch.verbs.console import console, listing, say
from parallelbench.errors import ConfigError, choices, count_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from analysis.advisor.measurements import Evidence, Measured
    from launch.sweep.compose import Extension
    from parallelbench.config.sites import Hardware


def advise(
    overrides: Sequence[str],
    extension: Extension,
    *,
    check: str,
    known: Sequence[str],
    fit_up_to: int | None,
    as_json: bool,
) -> int:
    """Print the errors of predicted steps against a CSV file's measured ones.

    `known` are the files that are fitted to, by default the published ones of the same format. With `fit_up_to`, only
    rows on at most so many devices are, and those on more are judged.
    """
    if Path(check).expanduser().is_dir():
        return check_sweeps([check, *overrides], known, fit_up_to=fit_up_to, as_json=as_json)
    from analysis.advisor.check import judged
    from analysis.advisor.measurements import joined_evidence, read_measured, shipped_files

    for override in parse(overrides, extension.conf):
        if override.key_or_group.partition(".")[0] != "site":
            raise ConfigError(f"{override.input_line} says nothing about measured steps: only site=… and site.… do")
    measured = read_measured(Path(check).expanduser())
    files = [Path(each).expanduser() for each in known] or shipped_files(measured.source)
    evidence = joined_evidence(
        [measured_steps(read_measured(file), overrides if known else [], extension) for file in files]
    )
    asked = measured_steps(measured, overrides, extension)
    summary = judged(evidence, asked, measured.models, largest_fitted=fit_up_to).summary()
    if as_json:
        print(json.dumps(summary))
    else:
        _print(summary)
    return 0


def measured_steps(measured: Measured, overrides: Sequence[str], extension: Extension) -> Evidence:
    """Measured steps with the machines that the overrides name, or else the file."""
    import msgspec

    from analysis.advisor.machine import machines_of
    from analysis.advisor.measurements import Evidence

    pairs = list(zip(measured.accelerators, measured.network_gbit_per_s, strict=True))
    found: dict[tuple[str | None, float | None], Hardware] = {}
    for accelerator, network in set(pairs):
        hardware = _hardware(overrides or [_site_of(accelerator, measured.source, extension)], extension)
        if network is not None and not overrides:
            hardware = msgspec.structs.replace(hardware, network_gbit_per_s=network)
        found[accelerator, network] = hardware
    machines = machines_of([found[pair] for pair in pairs])
    return Evidence(layouts=measured.layouts, machines=machines, time_s=measured.time_s)


def _site_of(accelerator: str | None, source: str, extension: Extension) -> str:
    """The override that names an accelerator's site, or that of the publication."""
    name, sites = accelerator or source, group_choices(extension.conf)["site"]
    if name not in sites:
        raise ConfigError(f"no site file describes GPU={name}: name one that does with site=…: {choices(name, sites)}")
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
    console().print(listing(("what", "rows", "mean", "median", "p90", "max"), list(_error_rows(summary))), crop=False)
    rest = {
        "90 % intervals that hold the measurement": summary["coverage"],
        "rank correlation among layouts of the same work (median)": summary["rank_correlation"],
        f"regret of the choice, of {summary['choices']} (median)": summary["median_regret"],
        f"regret of the choice, of {summary['choices']} (max)": summary["max_regret"],
    }
    for text, value in rest.items():
        say(f"{text}: {'not known, too few rows' if value is None else f'{value:.3g}'}")
    repeated = sum(row["also_in_evidence"] for row in summary["predictions"])
    say(
        f"Fitted to {summary['fitted_rows']} rows; {repeated} of the rows above are among them, and each is predicted "
        "by a fit without its fold."
    )


def _error_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    yield _cells("all rows", summary)
    for name in ("model", "strategy", "devices"):
        for value, errors in summary[f"by_{name}"].items():
            yield _cells(f"{name} {value}", errors)
    for name, errors in summary["baselines"].items():
        yield _cells(f"baseline {name}", errors)


def _cells(what: str, errors: Mapping[str, Any]) -> tuple[str, ...]:
    shares = (f"{100 * errors[f'{name}_error']:.1f} %" for name in ("mean", "median", "p90", "max"))
    return (what, str(errors["rows"]), *shares)


TITLES = {
    "leave_one_strategy_out": "each strategy predicted by a fit without it",
    "leave_one_model_out": "each model predicted by a fit without it",
    "folds": "each fifth predicted by a fit without it",
}


def check_sweeps(words: Sequence[str], known: Sequence[str], *, fit_up_to: int | None, as_json: bool) -> int:
    """Print the errors of predicted steps against the runs below some folders; `known` may hold a calibration.

    Raises `ConfigError` for overrides: what was run is known.
    """
    from analysis.advisor.check import checked
    from analysis.advisor.knowledge import read_knowledge

    if overrides := [text for text in words if "=" in text]:
        raise ConfigError(f"{overrides[0]} says nothing about finished runs: leave it out")
    if fit_up_to is not None:
        raise ConfigError("--fit-up-to is for CSV files: runs are split by strategy and by model; leave it out")
    knowledge = read_knowledge([Path(text).expanduser() for text in (*words, *known)], learn=False)
    assert knowledge.evidence is not None, "folders were given"
    summary = checked(knowledge.evidence, knowledge.figures)
    if as_json:
        print(json.dumps(summary))
        return 0
    console().print(
        listing(("what", "rows", "mean", "median", "p90", "max"), list(rows_of_sweeps(summary))), crop=False
    )
    for name, split in summary["splits"].items():
        say(f"{TITLES[name]}: {', '.join(_figures(split))}")
    for line in summary["refused"]:
        say(f"not predicted: {line}")
    say(
        f"Fitted to {count_of(summary['fitted_rows'], 'configuration')}; "
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
        yield _cells(TITLES[name], split)
        if name == summary["split"]:
            for key in ("strategy", "model", "devices"):
                for value, errors in split[f"by_{key}"].items():
                    yield _cells(f"  {key} {value}", errors)
        for baseline, errors in split["baselines"].items():
            if errors is not None:
                yield _cells(f"  baseline {baseline}", errors)
