"""Whether a model fits in memory: made-up sweeps whose runs are out of memory or nearly so, with answers by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis import load, summary
from analysis.metrics.columns import page_columns
from analysis.report import answers
from analysis.report.page import matrix
from analysis.report.tables import cells
from tests.analysis.factory import Fake, config, failed, published, steady

GIB = 2**30
Ways = dict[tuple[str, int], float | None]
"""Strategy and devices → GiB that its fullest GPU took of 40; None: out of memory."""


def measured(root: Path, ways: Ways, *, repeats: range = range(6), **more: Any) -> None:
    for repeat in repeats:
        for (strategy, devices), took in ways.items():
            run = config(root, repeat=repeat, strategy=strategy, devices=devices, device="cuda", **more)
            if took is None:
                failed(
                    run, "oom", "CUDA out of memory. Tried to allocate 2 GiB", epochs=0, fake=Fake(device_type="cuda")
                )
            else:
                published(run, on_gpus(took))


def on_gpus(took_gib: float, *, limit_gib: float | None = 40, time_s: float = 10.0, retries: int = 0) -> Fake:
    return steady(
        time_s,
        device_type="cuda",
        peak_allocated_bytes=lambda epoch, rank: int(took_gib * GIB),
        memory_limit_bytes=None if limit_gib is None else int(limit_gib * GIB),
        allocator_retries=lambda epoch, rank: retries,
    )


def said(root: Path) -> str:
    lines = [line for line in answers.headline(load(root)) if line.startswith("Memory:")]
    return "".join(lines)


def fits(root: Path) -> dict[str, tuple[bool | None, int]]:
    rows = summary(load(root)).select("configuration", "fits", "oom_runs").rows()
    return {name: (fit, lost) for name, fit, lost in rows}


def test_a_run_that_counts_fits_one_that_is_out_of_memory_does_not_and_of_others_nothing_is_known(
    tmp_path: Path,
) -> None:
    measured(tmp_path, {("single", 1): None, ("fsdp", 2): 36.0, ("fsdp", 4): 28.4})
    for repeat in range(6):
        broken = config(tmp_path, repeat=repeat, strategy="ddp", devices=2, device="cuda")
        failed(broken, "error", "ValueError: made up", epochs=0, fake=Fake(device_type="cuda"))
    found = fits(tmp_path)
    assert found == {"single × 1": (False, 6), "ddp × 2": (None, 0), "fsdp × 2": (True, 0), "fsdp × 4": (True, 0)}


def test_the_sentence_names_the_devices_that_were_measured_and_how_full_they_were(tmp_path: Path) -> None:
    measured(tmp_path, {("single", 1): None, ("fsdp", 1): None, ("fsdp", 2): 36.0, ("fsdp", 4): 28.4})
    words = said(tmp_path).replace("\u202f", " ")
    assert "single does not fit on 1 device (out of memory in 6 of 6 runs)" in words
    assert "fsdp fits on 2 and 4 devices, but is out of memory on 1 (6 of 6 runs)" in words
    assert "at most 90.0 % of 40.0 GiB, on 2 (the device's memory)" in words


def test_what_fits_nowhere_is_said_with_the_most_devices_that_were_tried(tmp_path: Path) -> None:
    measured(tmp_path, {("ddp", 2): None, ("ddp", 4): None, ("fsdp", 4): 20.0})
    words = said(tmp_path)
    assert "ddp fits nowhere, on 4 devices at most (out of memory in 12 of 12 runs)" in words
    assert "fsdp fits on 4 devices; at most" in words


def test_where_some_repeats_are_out_of_memory_it_does_not_fit(tmp_path: Path) -> None:
    measured(tmp_path, {("single", 1): 30.0, ("ddp", 2): 30.0}, repeats=range(4))
    measured(tmp_path, {("ddp", 2): None}, repeats=range(4, 6))
    assert fits(tmp_path)["ddp × 2"] == (False, 2)
    (row,) = summary(load(tmp_path)).filter(configuration="ddp × 2").to_dicts()
    shown = {cell.column.name: cell.shown for cell in cells(row, page_columns("configurations"))}
    assert shown["fits"] == "no, in 2 of 6"
    assert "ddp is out of memory on 2 (2 of 6 runs)" in said(tmp_path)


@pytest.mark.parametrize(
    ("took", "limit", "told"),
    [(31.0, 40, False), (33.0, 40, True), (33.0, None, False)],
    ids=["22.5 % left", "17.5 % left", "limit unknown"],
)
def test_without_a_run_out_of_memory_only_little_headroom_is_told(
    tmp_path: Path, took: float, limit: float | None, told: bool
) -> None:
    for repeat in range(3):
        for strategy, devices, gib in (("single", 1, 10.0), ("ddp", 2, took)):
            run = config(tmp_path, repeat=repeat, strategy=strategy, devices=devices, device="cuda")
            published(run, on_gpus(gib, limit_gib=limit))
    words = said(tmp_path)
    assert ("ddp fits on 2 devices; at most 82.5" in words) is told
    assert "single fits" not in words
    assert words.startswith("Memory: Everything fits") is not told


def test_the_matrix_says_what_is_out_of_memory_and_what_nearly_is(tmp_path: Path) -> None:
    measured(tmp_path, {("single", 1): 20.0, ("ddp", 2): None, ("fsdp", 2): 38.0})
    measured(tmp_path, {("single", 1): 20.0, ("ddp", 2): 20.0, ("fsdp", 2): 20.0}, batch_size=64)
    found = matrix(load(tmp_path))
    assert found is not None
    told = {
        (row, column): cell.memory for row, of in found.rows for column, cell in zip(found.columns, of, strict=True)
    }
    assert sorted(filter(None, told.values())) == ["5.0\u202f% of memory left", "in 6 of 6"]
