"""The verb `advise`: how wrong the advisor is on measured steps that its fit has not seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.sweep import one_run
from launch.sweep.compose import group_choices, parse
from launch.verbs.checking_sweeps import check_sweeps
from launch.verbs.console import console, say
from launch.verbs.listing import listing
from parallelbench.errors import ConfigError, choices

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from analysis.advisor.evidence import Evidence
    from analysis.advisor.measurements import Measured
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
    from analysis.advisor.evidence import joined_evidence, shipped_files
    from analysis.advisor.measurements import read_measured
    from analysis.advisor.prediction_errors import judged

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

    from analysis.advisor.evidence import Evidence
    from analysis.advisor.machines import machines_of

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
