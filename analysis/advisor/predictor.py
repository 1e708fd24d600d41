"""Formulas with fitted parameters, bent where measurements are near."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from analysis.advisor.fitting import fit
from analysis.advisor.residuals import Residuals
from analysis.advisor.step_model import StepTime, step_time

if TYPE_CHECKING:
    from analysis.advisor.evidence import Evidence
    from analysis.advisor.layouts import Layouts, Values
    from analysis.advisor.machines import Machines
    from analysis.advisor.parameters import Fitted


@dataclass(frozen=True)
class Predictor:
    """What was learnt from measured steps."""

    fitted: Fitted
    residuals: Residuals

    @classmethod
    def of(cls, evidence: Evidence) -> Predictor:
        """Fit the parameters, then the errors that remain."""
        fitted = fit(evidence.layouts, evidence.machines, evidence.time_s)
        step_s = step_time(evidence.layouts, evidence.machines, fitted).step_s
        return cls(fitted, Residuals.of(evidence.layouts, evidence.machines, np.log(evidence.time_s / step_s)))

    def predict(self, layouts: Layouts, machines: Machines) -> tuple[StepTime, Values]:
        """Each row's phases, and the standard deviation of the log of their sum.

        A correction stretches all phases of a row alike.
        """
        phases = step_time(layouts, machines, self.fitted)
        correction, deviation = self.residuals.correction(layouts, machines)
        stretch = np.exp(correction)
        return StepTime(**{each.name: getattr(phases, each.name) * stretch for each in fields(phases)}), deviation
