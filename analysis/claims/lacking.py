"""What is missing where no run decides a claim."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analysis import text
from analysis.claims.contrasts import is_unreached
from analysis.claims.grammar import UNTIMED, Claim, written
from analysis.claims.readings import unusable, usable
from analysis.configurations import facts
from analysis.metrics import resting_on_disturbed
from analysis.stats import ENOUGH_REPEATS

if TYPE_CHECKING:
    from analysis.reader import Runs


def missing(runs: Runs, claim: Claim) -> str:
    """Why there is nothing to compare, and which runs are needed."""
    if claim.gpus_only and not (facts(runs)["device_type"] == "cuda").any():
        return f"can't be decided on CPUs: {claim.gpus_only}; it needs {_sweeps(claim)} on GPUs"
    if is_unreached(runs, claim):
        return f"no repeat reaches {claim.target:g} on both sides: train more epochs, or choose another optimizer"
    with_all = f" {written(every)}" if (every := claim.where | claim.scope) else ""
    sides = "; or ".join(map(str, claim.contrasts)) + (f"; and with {claim.more}" if claim.more else "")
    lacks = f"needs runs of the same work{with_all} with {sides}; {ENOUGH_REPEATS} repeats each: {_sweeps(claim)}"
    return lacks + _excluded(runs, claim) + _disturbed(runs, claim)


def _disturbed(runs: Runs, claim: Claim) -> str:
    resting = resting_on_disturbed(runs).get(claim.metric, frozenset())
    count = len(resting & set(usable(runs, claim.metric)["run_id"].to_list())) if resting else 0
    return f"; others disturbed what {claim.metric} rests on in {text.number_of_runs(count)}" if count else ""


def _sweeps(claim: Claim) -> str:
    return " and ".join(f"sweep={name}" for name in claim.sweeps)


def _excluded(runs: Runs, claim: Claim) -> str:
    number, exclusions = (0, []) if claim.metric in UNTIMED else unusable(runs, claim.metric)
    verb = "doesn't" if number == 1 else "don't"
    return f" ({text.number_of_runs(number)} {verb} count: {text.listed(exclusions)})" if exclusions else ""
