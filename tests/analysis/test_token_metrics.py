"""Metrics of language models by hand: rates, utilisation with the peak it rests on, loss per token, perplexity."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import polars.selectors as cs
import pytest

from analysis import figures, load, per_epoch, per_run, summary, write_report
from analysis.figures.bars import token_rates
from analysis.metrics.columns import OF_TOKENS
from analysis.report import page as page_module
from analysis.report.tables import summary_table
from parallelbench import cli
from parallelbench.measure.layer_records import LayerCount
from parallelbench.results.folder import RunFolder
from parallelbench.results.tables import TABLES_VERSION
from tests.analysis.factory import Fake, config, published
from tests.analysis.test_compact import rewrite
from tests.faults import fault

WINDOW, LAYERS, WIDTH, VOCABULARY = 64, 4, 64, 256
MATRICES = LAYERS * 12 * WIDTH**2 + WIDTH * VOCABULARY
"""Parameters of gpt_tiny's attention, perceptrons and head: what a token is multiplied with."""
PER_TOKEN = 6 * MATRICES + 12 * LAYERS * WIDTH * WINDOW
"""N, and L·H·Q·T with H·Q as the width."""
PEAK = 5e10
NAMES = [column.name for column in OF_TOKENS]


def layer(name: str, product_flop: float, parameters: int) -> LayerCount:
    nothing: dict[str, Any] = dict.fromkeys(LayerCount.__struct_fields__, 0)
    known = {"name": name, "product_flop": product_flop, "parameters": parameters, "kernels": {}}
    return msgspec.convert(nothing | known, LayerCount)


PARAMETERS = 402442
"""Of the model as results hold them, all of them trained."""
COUNTED = msgspec.json.encode(
    [
        layer("embed", 0.0, PARAMETERS - MATRICES),
        *(
            layer(f"block{i}", WINDOW * (2 * 12 * WIDTH**2 + 4 * WIDTH * WINDOW), 12 * WIDTH**2)
            for i in range(1, LAYERS + 1)
        ),
        layer("head", WINDOW * 2 * WIDTH * VOCABULARY, WIDTH * VOCABULARY),
    ]
).decode()
"""As torch counts them: two per multiply-add of a matrix, and two products of attention."""
SPEEDS: dict[str, Any] = {
    "layers_json": COUNTED,
    "probed_start_matmul_flop_per_s": 0.9 * PEAK,
    "probed_end_matmul_flop_per_s": PEAK,
}


def language_model(
    root: Path, *, speeds: dict[str, Any] = SPEEDS, trained: int = PARAMETERS, **changes: Any
) -> RunFolder:
    """A run of four epochs, each of which takes 2 s but for the first, which takes 5."""
    run = config(root, **({"model": "gpt_tiny", "data": "tokens", "epochs": 4} | changes))
    losses = {1: 5.0, 2: 3.0, 3: 2.0, 4: 1.25}
    kind: dict[str, Any] = {"device_type": run.device} if run.device == "cuda" else {}
    fake = Fake(
        epoch_time_s=lambda epoch, rank: 5.0 if epoch == 1 else 2.0,
        test_loss=losses.__getitem__,
        speeds=speeds,
        parameters=trained,
        **kind,
    )
    return published(run, fake)


@pytest.mark.exhaustive
@fault(
    "numbers",
    "Numbers that are not finite",
    injection="NaN and infinities in all tables of a result, epochs of no length, a loss that overflows",
    outcome="they are shown as not measured, in page, figures, tables, terminal and JSON; the report is whole",
)
@pytest.mark.slow
def test_numbers_that_are_not_finite_end_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for repeat in range(3):
        for strategy, devices in (("single", 1), ("ddp", 2)):
            run = config(tmp_path, model="gpt_tiny", data="tokens", epochs=4, repeat=repeat, strategy=strategy)
            run = msgspec.structs.replace(run, devices=devices)
            time_s = 0.0 if repeat == 2 else 2.0
            fake = Fake(epoch_time_s=lambda epoch, rank, s=time_s: s, test_loss=lambda epoch: 1e6, speeds=SPEEDS)  # type: ignore[misc]
            folder = published(run, fake)
            if repeat == 1:
                rewrite(folder, TABLES_VERSION, _not_finite)
    runs = load(tmp_path)
    for frame in (per_run(runs), per_epoch(runs), *runs.tables.values()):
        assert all(column.is_finite().all() for column in frame.select(cs.float()))
    assert columns_of(tmp_path)["final_perplexity"] is None
    drawn = figures.draw(runs)
    for figure in drawn:
        json.dumps(figure.chart and figure.chart.to_dict(), allow_nan=False)
    monkeypatch.setattr(page_module, "drawn", lambda runs: drawn)
    page = write_report(tmp_path, tmp_path / "report")
    assert not re.search(r"\b(inf|nan)\b", "".join(path.read_text() for path in page.parent.rglob("*.[ct][se][vx]")))
    summary_table(runs)
    assert cli.main(["compare", str(tmp_path), "--by", "configuration=single × 1,ddp × 2", "--json"]) in (0, 1, 2)
    json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def _not_finite(tables: dict[str, pl.DataFrame]) -> dict[str, pl.DataFrame]:
    """NaN, infinity and its negative in turn, in place of all numbers with a fraction."""
    odd = pl.Series([math.nan, math.inf, -math.inf])
    return {
        table: frame.with_columns(
            odd.gather(np.arange(frame.height) % 3).alias(name) for name in frame.select(cs.float()).columns
        )
        for table, frame in tables.items()
    }


def columns_of(root: Path) -> dict[str, Any]:
    return per_run(load(root)).select(NAMES).row(0, named=True)


@pytest.mark.slow
def test_they_are_those_by_hand(tmp_path: Path) -> None:
    language_model(tmp_path, strategy="ddp", devices=2)
    rate = 4096 * WINDOW / 2.0  # 4,096 windows fill 32 batches of 128
    assert columns_of(tmp_path) == pytest.approx(
        {
            "tokens_per_s": rate,
            "model_flop_per_token": PER_TOKEN,
            "peak_flop_per_s": PEAK,
            "mfu": PER_TOKEN * rate / (2 * PEAK),
            "final_loss_per_token": 1.25,
            "final_perplexity": math.exp(1.25),
        }
    )
    epochs = per_epoch(load(tmp_path))
    assert epochs["perplexity"].to_list() == pytest.approx([math.exp(each) for each in (5.0, 3.0, 2.0, 1.25)])
    row = summary(load(tmp_path)).row(0, named=True)
    assert (row["tokens_per_s"], row["final_perplexity"]) == pytest.approx((rate, math.exp(1.25)))


@pytest.mark.slow
def test_images_have_none_of_them(tmp_path: Path) -> None:
    published(config(tmp_path), Fake(speeds=SPEEDS))
    assert set(columns_of(tmp_path).values()) == {None}
    assert per_epoch(load(tmp_path))["perplexity"].null_count() == 3
    assert token_rates.figure(load(tmp_path)) is None
    assert token_rates.finding(load(tmp_path)) == "No run that counts trains on tokens and has a steady state."


@pytest.mark.parametrize(
    ("loss", "known"),
    [
        ({"name": "cross_entropy"}, True),
        ({"name": "cross_entropy", "label_smoothing": 0.1}, False),
        ({"name": "mse"}, False),
    ],
)
def test_only_nats_have_a_perplexity(loss: dict[str, Any], known: bool, tmp_path: Path) -> None:
    language_model(tmp_path, loss=loss)
    row = columns_of(tmp_path)
    assert [row[name] is not None for name in ("final_loss_per_token", "final_perplexity")] == [known] * 2
    assert (per_epoch(load(tmp_path))["perplexity"].count() == 4) is known
    assert row["tokens_per_s"] is not None


def test_a_loss_beyond_all_numbers_has_no_perplexity(tmp_path: Path) -> None:
    published(config(tmp_path, model="gpt_tiny", data="tokens"), Fake(test_loss=lambda epoch: 1e4, speeds=SPEEDS))
    row = columns_of(tmp_path)
    assert (row["final_loss_per_token"], row["final_perplexity"]) == (1e4, None)


@pytest.mark.parametrize(
    ("device", "precision", "known"),
    [
        *(("cpu", precision, precision == "fp32") for precision in ("fp32", "bf16", "fp64")),
        *(("cuda", precision, precision in ("fp16", "bf16")) for precision in ("fp32", "tf32", "fp16", "bf16")),
    ],
)
def test_utilisation_is_of_a_peak_in_the_runs_arithmetic_or_null(
    device: str, precision: str, known: bool, tmp_path: Path
) -> None:
    language_model(tmp_path, device=device, precision=precision)
    row = columns_of(tmp_path)
    assert (row["peak_flop_per_s"] is not None, row["mfu"] is not None) == (known, known)


def test_what_was_not_measured_is_null(tmp_path: Path) -> None:
    language_model(tmp_path / "peak", speeds={"layers_json": COUNTED})
    row = columns_of(tmp_path / "peak")
    assert {name for name in NAMES if row[name] is None} == {"peak_flop_per_s", "mfu"}
    language_model(tmp_path / "work", speeds=SPEEDS | {"layers_json": None})
    row = columns_of(tmp_path / "work")
    assert {name for name in NAMES if row[name] is None} == {"model_flop_per_token", "mfu"}
    language_model(tmp_path / "frozen", trained=PARAMETERS - WIDTH * VOCABULARY)
    row = columns_of(tmp_path / "frozen")
    assert {name for name in NAMES if row[name] is None} == {"model_flop_per_token", "mfu"}
