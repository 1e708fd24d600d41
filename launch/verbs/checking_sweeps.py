"""`advise --check RESULTS…`: how wrong the advisor is on finished sweeps, printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.verbs.console import console, say
from launch.verbs.listing import listing
from parallelbench.errors import ConfigError, count_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

TITLES = {
    "leave_one_strategy_out": "each strategy predicted by a fit without it",
    "leave_one_model_out": "each model predicted by a fit without it",
    "folds": "each fifth predicted by a fit without it",
}


def check_sweeps(words: Sequence[str], known: Sequence[str], *, fit_up_to: int | None, as_json: bool) -> int:
    """Print the errors of predicted steps against the runs below some folders; `known` may hold a calibration.

    Raises `ConfigError` for overrides: what was run is known.
    """
    from analysis.advisor.knowledge import read_knowledge
    from analysis.advisor.suite_check import checked

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
    console().print(listing(("what", "rows", "mean", "median", "p90", "max"), list(error_rows(summary))), crop=False)
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


def error_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
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


def _cells(what: str, errors: Mapping[str, Any]) -> tuple[str, ...]:
    shares = (f"{100 * errors[f'{name}_error']:.1f} %" for name in ("mean", "median", "p90", "max"))
    return (what, str(errors["rows"]), *shares)
