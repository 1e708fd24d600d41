"""What others published, beside the advisor: steps, to which the shipped fit was made, and large runs."""

from __future__ import annotations

import pytest

from analysis.advisor.fit import published_fit
from tests.advisor.published_runs import LLAMA, MEGATRON, SELECTIVE, TITAN, TURING, errors, mean_error
from tests.advisor.refit import refitted


@pytest.mark.exhaustive
def test_the_shipped_fit_is_that_of_the_published_steps() -> None:
    ours, shipped = refitted(), published_fit()
    assert (ours.rows, ours.accelerators) == (shipped.rows, shipped.accelerators)
    assert ours.parameters == pytest.approx(shipped.parameters, rel=1e-3)
    assert ours.without_width.keys() == shipped.without_width.keys()
    for width, parameters in ours.without_width.items():
        assert parameters == pytest.approx(shipped.without_width[width], rel=1e-3)
    assert ours.most_devices == shipped.most_devices
    assert ours.kernels == pytest.approx(shipped.kernels, abs=1e-3)
    assert ours.half_widths == pytest.approx(shipped.half_widths, rel=1e-3)


DOCUMENTED = {MEGATRON: 0.08, SELECTIVE: 0.05, TURING: 0.29, LLAMA: 0.033, TITAN: 0.19}
"""Mean errors in docs/advisor-errors.md, rounded up."""


def test_published_runs_are_predicted_as_closely_as_the_docs_say() -> None:
    found = errors()
    assert {source: mean_error(rows) <= DOCUMENTED[source] for source, rows in found.items()} == dict.fromkeys(
        DOCUMENTED, True
    )
    every = [row for rows in found.values() for row in rows]
    assert mean_error(every) <= 0.105
    assert sum(row.holds for row in every) == 26, "of 29, as the docs say"
