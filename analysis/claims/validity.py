"""Whether an effect may decide a claim: what forbids it, and what a reader must know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analysis.claims.grammar import LEARNING, OF_SAMPLES, Claim
from analysis.comparison.pairing import Pairing, RepeatPair, compared_runs
from analysis.comparison.policy import Blocker, Issue

if TYPE_CHECKING:
    from analysis.claims.effects import Effect
    from analysis.reader import Runs


def blockers(runs: Runs, claim: Claim, effect: Effect) -> list[Issue]:
    """Why the effect decides nothing, whatever it is."""
    unreached = []
    if effect.missed:
        repeats = len(effect.missed | effect.values.keys())
        unreached.append(Issue(Blocker.UNREACHED, {f"{claim.target:g}": (len(effect.missed), repeats)}))
    of_times, per_epoch = claim.metric not in LEARNING, claim.metric in OF_SAMPLES
    return [*unreached, *_pairing(runs, effect).blockers(of_times=of_times, per_epoch=per_epoch)]


def caveats(runs: Runs, claim: Claim, effect: Effect) -> list[Issue]:
    """What may be in the effect besides what is compared."""
    return list(_pairing(runs, effect).caveats(of_times=claim.metric not in LEARNING))


def _pairing(runs: Runs, effect: Effect) -> Pairing:
    known = compared_runs(runs)
    pairs = [RepeatPair(repeat, tuple(known[run_id] for run_id in ids)) for repeat, ids in effect.runs.items()]
    return Pairing(tuple(pairs))
