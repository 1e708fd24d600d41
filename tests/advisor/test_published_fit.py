"""The fit that comes with the suite is what fitting the published steps gives."""

from __future__ import annotations

import pytest

from analysis.advisor.fit import published_fit
from tests.advisor.refit import refitted


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_shipped_fit_is_that_of_the_published_steps() -> None:
    ours, shipped = refitted(), published_fit()
    assert (ours.rows, ours.accelerators) == (shipped.rows, shipped.accelerators)
    assert ours.parameters == pytest.approx(shipped.parameters, rel=1e-3)
    assert ours.without_width.keys() == shipped.without_width.keys()
    for width, parameters in ours.without_width.items():
        assert parameters == pytest.approx(shipped.without_width[width], rel=1e-3)
    assert ours.most_devices == shipped.most_devices
    assert ours.half_width == pytest.approx(shipped.half_width, rel=1e-3)
    assert ours.across_half_width == pytest.approx(shipped.across_half_width, rel=1e-3)
