"""The runs that a claim's effects compare, as the comparison room takes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from analysis.comparison.compared_run import ComparedRun, compared_runs
from analysis.comparison.pairing import Pairing, RepeatPair
from analysis.comparison.sweeps import in_one_sweep

if TYPE_CHECKING:
    from collections.abc import Mapping

    from analysis.reader import Runs

    Ids = Mapping[int, tuple[str, ...]]


@dataclass(frozen=True, eq=False)
class Behind:
    """The runs behind effects. Many claims compare the same runs: what follows from these is found once."""

    pairing: Pairing
    slugs: tuple[str, ...]
    """The names of their folders."""
    warnings: tuple[str, ...]
    """What they recorded themselves."""
    sweeps: tuple[str, ...]


def behind(runs: Runs, ids_of_repeats: Ids) -> Behind:
    """The runs of every repeat; of equal ones the same object."""
    known, key = _behind(runs), tuple(ids_of_repeats.items())
    if key not in known:
        told = _told(runs)
        rows = [told[run_id] for run_id in dict.fromkeys(run_id for ids in ids_of_repeats.values() for run_id in ids)]
        warnings = dict.fromkeys(warned for _, warned, _ in rows if warned)
        sweeps = sorted({sweep for *_, sweep in rows})
        slugs = tuple(slug for slug, *_ in rows)
        known[key] = Behind(pairing_of(runs, ids_of_repeats), slugs, tuple(warnings), tuple(sweeps))
    return known[key]


@lru_cache(maxsize=8)
def _behind(runs: Runs) -> dict[tuple[tuple[int, tuple[str, ...]], ...], Behind]:
    return {}


@lru_cache(maxsize=8)
def _told(runs: Runs) -> dict[str, tuple[str, str | None, str]]:
    """Run id → the name of its folder, its warnings, and its sweep."""
    rows = runs.run.select("run_id", "slug", "warnings", "sweep").rows()
    return {run_id: (slug, warned, sweep) for run_id, slug, warned, sweep in rows}


def pairing_of(runs: Runs, ids_of_repeats: Ids) -> Pairing:
    """The runs of every repeat, two and two as an effect compares them."""
    known = compared_runs(runs)
    of_repeats = ((repeat, tuple(known[run_id] for run_id in ids)) for repeat, ids in ids_of_repeats.items())
    return Pairing(tuple(RepeatPair(repeat, _as_paired(of_repeat)) for repeat, of_repeat in of_repeats))


def _as_paired(of_repeat: tuple[ComparedRun, ...]) -> tuple[ComparedRun, ...]:
    """The runs as their values were taken: two and two of one sweep."""
    couples = [of_repeat[at : at + 2] for at in range(0, len(of_repeat), 2)]
    return tuple(run for couple in couples for run in in_one_sweep(couple))


NO_CHOICE = Pairing(())


def choice_of(runs: Runs, ids_of_repeats: Ids) -> Pairing:
    """The candidates of every repeat that has all of them; those of the others stand alone."""
    if not ids_of_repeats:
        return NO_CHOICE
    known = compared_runs(runs)
    every = [RepeatPair(repeat, tuple(known[run_id] for run_id in ids)) for repeat, ids in ids_of_repeats.items()]
    kinds = {pair.repeat: [id(run.definition) for run in pair.runs] for pair in every}
    most = max(kinds.values(), key=len, default=[])
    whole = tuple(pair for pair in every if kinds[pair.repeat] == most)
    return Pairing(whole, alone=tuple(run for pair in every if pair not in whole for run in pair.runs))
