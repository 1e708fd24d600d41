"""What others published of large runs, beside what the advisor says of them; none of it was fitted."""

from __future__ import annotations

import numpy as np

from tests.advisor.published_runs import LLAMA, MEGATRON, SELECTIVE, TITAN, TURING, errors, mean_error

DOCUMENTED = {MEGATRON: 0.04, SELECTIVE: 0.09, TURING: 0.18, LLAMA: 0.04, TITAN: 0.24}
"""Mean errors in docs/advisor-errors.md, rounded up."""


def test_published_runs_are_predicted_as_closely_as_the_docs_say() -> None:
    found = errors()
    assert {source: mean_error(rows) <= DOCUMENTED[source] for source, rows in found.items()} == dict.fromkeys(
        DOCUMENTED, True
    )
    assert np.mean([abs(said_s / took_s - 1) for rows in found.values() for _, took_s, said_s in rows]) <= 0.105
