"""`python -m tests.advisor.refit` fits the formulas to all published steps anew, and writes the shipped file."""

from __future__ import annotations

import msgspec

from analysis.advisor.fit import PublishedFit, fitted_to, place
from analysis.advisor.measurements import joined_evidence, read_measured, shipped_files
from launch.sweep.compose import NOTHING
from launch.verbs.advice_errors import measured_steps


def refitted() -> PublishedFit:
    files = [file for source in ("vtrain", "llm_foundry") for file in shipped_files(source)]
    measured = [read_measured(file) for file in files]
    evidence = joined_evidence([measured_steps(each, [], NOTHING) for each in measured])
    return fitted_to(evidence, [name or "a100_80gb" for each in measured for name in each.accelerators])


if __name__ == "__main__":
    place().write_bytes(msgspec.json.format(msgspec.json.encode(refitted())) + b"\n")
