"""The runs that a claim's effects compare, as the comparison room takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analysis.comparison.compared_run import ComparedRun, compared_runs
from analysis.comparison.pairing import Pairing, RepeatPair
from analysis.comparison.sweeps import in_one_sweep

if TYPE_CHECKING:
    from collections.abc import Mapping

    from analysis.reader import Runs


def pairing_of(runs: Runs, ids_of_repeats: Mapping[int, tuple[str, ...]]) -> Pairing:
    """The runs of every repeat, two and two as an effect compares them."""
    known = compared_runs(runs)
    of_repeats = ((repeat, tuple(known[run_id] for run_id in ids)) for repeat, ids in ids_of_repeats.items())
    return Pairing(tuple(RepeatPair(repeat, _as_paired(of_repeat)) for repeat, of_repeat in of_repeats))


def _as_paired(of_repeat: tuple[ComparedRun, ...]) -> tuple[ComparedRun, ...]:
    """The runs as their values were taken: two and two of one sweep."""
    couples = [of_repeat[at : at + 2] for at in range(0, len(of_repeat), 2)]
    return tuple(run for couple in couples for run in in_one_sweep(couple))


def choice_of(runs: Runs, ids_of_repeats: Mapping[int, tuple[str, ...]]) -> Pairing:
    """The candidates of every repeat that has all of them; those of the others stand alone."""
    known = compared_runs(runs)
    every = [RepeatPair(repeat, tuple(known[run_id] for run_id in ids)) for repeat, ids in ids_of_repeats.items()]
    kinds = {pair.repeat: [id(run.definition) for run in pair.runs] for pair in every}
    most = max(kinds.values(), key=len, default=[])
    whole = tuple(pair for pair in every if kinds[pair.repeat] == most)
    return Pairing(whole, alone=tuple(run for pair in every if pair not in whole for run in pair.runs))
