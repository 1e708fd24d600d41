"""Memory per GPU: claims compare one quantity on both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis import load
from analysis.claims import judge
from analysis.claims.verdict import Judgement
from analysis.report.claims import table
from parallelbench.results.folder import RunFolder
from tests.analysis.factory import MIB, Fake, config, published
from tests.analysis.test_claims import REPEATS, claim

pytestmark = pytest.mark.slow

NEW = "peak_memory_device_bytes"
LEANER: dict[str, Any] = {
    "metric": NEW,
    "contrasts": [{"from": {"strategy": "single", "devices": 1}, "to": {"strategy": "model_parallel"}}],
    "expect": {"below": 1, "by": 0.02},
}
WIDE = {"single": "100", "model_parallel": "60,40"}
"""MiB of tensors on each GPU: the fullest has 0.6 of what one GPU alone has."""


def one(root: Path, strategy: str, repeat: int) -> RunFolder:
    """One process that drives all GPUs of its strategy; each holds a little more in later repeats."""
    each = [(int(mib) + repeat) * MIB for mib in WIDE[strategy].split(",")]
    fake = Fake(
        device_type="cuda",
        processes=1,
        peak_allocated_bytes=lambda epoch, rank: sum(each),
        peak_allocated_bytes_by_device=lambda epoch, rank: ",".join(map(str, each)),
    )
    return published(config(root, strategy=strategy, devices=len(each), repeat=repeat, device="cuda"), fake)


def judged(root: Path) -> Judgement:
    for repeat in REPEATS:
        for strategy in WIDE:
            one(root, strategy, repeat)
    return judge(load(root), claim(**LEANER), seed="000")


@pytest.mark.exhaustive
def test_what_tensors_hold_on_the_fullest_gpu_decides(tmp_path: Path) -> None:
    finding = judged(tmp_path)
    (case,) = finding.cases
    assert finding.verdict == "reproduced"
    assert case.effects == tuple((repeat, (60 + repeat) / (100 + repeat)) for repeat in REPEATS)
    assert table([finding]).rows["metric"].to_list() == [NEW]


def test_memory_of_processes_is_not_held_against_that_of_tensors(tmp_path: Path) -> None:
    for repeat in REPEATS:
        published(config(tmp_path, repeat=repeat))
        gpu = Fake(device_type="cuda", peak_allocated_bytes=lambda epoch, rank: 90 * MIB)
        published(config(tmp_path, repeat=repeat, device="cuda"), gpu)
    contrast = {"from": {"device_type": "cpu"}, "to": {"device_type": "cuda"}}
    for metric in ("peak_memory_sum_bytes", NEW):
        asked = claim(metric=metric, contrasts=[contrast], expect={"below": 0.9})
        finding = judge(load(tmp_path), asked, seed="000")
        assert (len(finding.cases), finding.verdict) == (1, "inconclusive")
        assert finding.why.startswith("memory is not compared")
