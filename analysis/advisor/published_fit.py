"""The fit to the published steps that come with the suite, kept in a file: predictions need no fitting and no torch.

`python -m tests.advisor.refit` fits anew and writes it; a test compares.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from analysis.advisor.fitting import fit
from analysis.advisor.intervals import half_width
from analysis.advisor.step_model import step_time

if TYPE_CHECKING:
    from pathlib import Path

    from analysis.advisor.evidence import Evidence

OTHER_ACCELERATOR = 1.5
"""How much wider intervals are on accelerators that nobody measured: an assumption."""
UNTRIED = 1.5
"""The same for layouts of a kind that no published step has, and for more devices than any: an assumption."""


class PublishedFit(msgspec.Struct, frozen=True, kw_only=True):
    """What the formulas alone learnt from all published steps."""

    parameters: dict[str, float]
    half_width: float
    """Half of the 90 % interval of log time, from fits that lacked a width of model: the error on unlike models."""
    across_half_width: float
    """The same of the rows on several nodes alone, which are few among those on one."""
    rows: int
    accelerators: list[str]


def fitted_to(evidence: Evidence, accelerators: list[str]) -> PublishedFit:
    """Fit all rows, and judge each width of model by a fit without it."""
    errors = np.zeros(len(evidence))
    for width in np.unique(evidence.layouts.hidden):
        left_out = evidence.layouts.hidden == width
        rest, asked = evidence.take(~left_out), evidence.take(left_out)
        parameters = fit(rest.layouts, rest.machines, rest.time_s)
        predicted_s = step_time(asked.layouts, asked.machines, parameters).step_s
        errors[left_out] = np.log(asked.time_s / predicted_s)
    width_of_all = half_width(errors)
    across = half_width(errors[evidence.layouts.devices > evidence.machines.devices_per_node])
    assert width_of_all is not None, "the published rows are hundreds"
    assert across is not None, "those on several nodes are dozens"
    parameters = fit(evidence.layouts, evidence.machines, evidence.time_s)
    return PublishedFit(
        parameters=parameters,
        half_width=width_of_all,
        across_half_width=across,
        rows=len(evidence),
        accelerators=sorted(set(accelerators)),
    )


def place() -> Path:
    """Where the file is."""
    from pathlib import Path

    return Path(str(resources.files("analysis"))) / "advisor" / "data" / "published_fit.json"


@cache
def published_fit() -> PublishedFit:
    """The shipped fit."""
    return msgspec.json.decode(place().read_bytes(), type=PublishedFit)
