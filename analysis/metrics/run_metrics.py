"""The derived columns of each run."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import polars as pl

from analysis.metrics.aggregates import aggregate, aggregates
from analysis.metrics.epoch_metrics import AS_TEXT, measured, numbered, run_and
from analysis.metrics.schema import per_run_columns, row_aggregates, run_aggregates
from analysis.metrics.token_metrics import in_nats, model_flop_per_token, peak_flop_per_s, perplexity
from analysis.published import TYPES, finite
from parallelbench.results.tables import CLOSING, Over

if TYPE_CHECKING:
    from analysis.reader import Runs
    from parallelbench.results.tables import Column


SECONDS_PER_HOUR = 3600
KINDS_SENT = ("gradient", "activation", "parameter")
"""What the bytes are that ranks send: see `parallelbench.measure.traffic.Kind`."""


@lru_cache(maxsize=8)
def per_run(runs: Runs) -> pl.DataFrame:
    """One row per run, in the order of `runs.run`: `run_id` and the columns that `per_run_columns` declares."""
    steady = ~pl.col("warm_up")
    slowest_s = pl.col("slowest_epoch_time_s")
    epochs = measured(runs).group_by("run_id").agg(
        *aggregates(run_aggregates(), steady=steady),
        pl.len().cast(pl.Int32).alias("epochs_finished"),
        slowest_s.filter(pl.col("epoch") == 1, pl.col("warm_up")).first().alias("first_epoch_time_s"),
        slowest_s.filter(pl.col("epoch") == 2, steady).first().alias("second_epoch_time_s"),
        (slowest_s / pl.col("steps")).filter(steady, pl.col("steps") > 0).median().alias("steady_step_time_s"),
        aggregate("slowest_epoch_time_s", Over.SUM).alias("total_training_time_s"),
        (pl.col("gpu_energy_j") / pl.col("train_samples")).filter(steady).median().alias("gpu_energy_per_sample_j"),
        pl.col("train_samples").filter(steady).median().alias("_samples"),
        pl.col("train_samples").sum().alias("_all_samples"),
        pl.col("test_accuracy").last().alias("final_test_accuracy"),
        pl.col("test_loss").last().alias("final_loss_per_token"),
        steady.sum().cast(pl.Int32).alias("steady_epochs"),
        _count_known(pl.col("disturbed").filter(steady)).alias("disturbed_epochs"),
        pl.col("lost_share").filter(steady).max().alias("largest_lost_share"),
    )  # fmt: skip
    joined = numbered(runs, "run", *(name for name in runs.run.columns if name != "run_id"))
    of_rows = [_over_rows(runs, table, pairs) for table, pairs in row_aggregates().items()]
    for part in (
        epochs,
        _prepared_again(runs),
        _memory(runs),
        _communication(runs),
        _parity(runs),
        _checks(runs),
        *of_rows,
    ):
        joined = joined.join(part, on="run_id", how="left", maintain_order="left")
    typed = (pl.col(column.name).cast(TYPES[column.type]) for column in per_run_columns())
    return finite(_derive(finite(joined)).select(AS_TEXT, *typed))


def _count_known(flags: pl.Expr) -> pl.Expr:
    """How many of these are true, as far as is known; null where nothing is."""
    return pl.when(flags.is_not_null().any()).then(flags.sum().cast(pl.Int32))


def _over_rows(runs: Runs, table: str, pairs: list[tuple[Column, Column]]) -> pl.DataFrame:
    """The plain aggregates over all of a run's rows."""
    sources = dict.fromkeys(source.name for source, _ in pairs)
    return numbered(runs, table, *sources).group_by("run_id").agg(aggregates(pairs))


def _derive(joined: pl.DataFrame) -> pl.DataFrame:
    """The columns that follow from one row."""
    complete = pl.col("epochs_finished") == pl.col("epochs")
    whole = ("total_training_time_s", "final_test_accuracy", "final_loss_per_token")
    derived = (
        joined.with_columns(pl.col("epochs_finished").fill_null(0))
        .with_columns(
            *(pl.when(complete).then(pl.col(name)).alias(name) for name in whole),
        )
        .with_columns(
            total_training_time_s=pl.when(pl.col("resumed_after").is_null()).then(pl.col("total_training_time_s")),
            throughput_samples_per_s=pl.col("_samples") / pl.col("steady_epoch_time_s"),
            # Null: there was no parity check, so nothing is subtracted.
            closed=pl.when("_unclosed")
            .then(pl.lit(False))
            .when(pl.col("closing_check_s").is_not_null())
            .then(pl.lit(True)),
            startup_without_parity_s=pl.col("startup_s") - pl.col("startup_parity_s").fill_null(0),
        )
        .with_columns(
            total_time_s=pl.when(pl.col("resumed_after").is_null()).then(
                pl.col("startup_without_parity_s") + pl.col("total_training_time_s") - pl.col("startup_first_step_s")
            )
        )
        .with_columns(
            end_to_end_time_s=pl.col("preprocess_time_s") - pl.col("_again_s").fill_null(0) + pl.col("total_time_s"),
            least_flop_per_s=pl.col("least_flop_per_sample") * pl.col("throughput_samples_per_s") / pl.col("devices"),
            throughput_with_startup_samples_per_s=pl.col("_all_samples") / pl.col("total_time_s"),
            gpu_hours=pl.when(pl.col("device_type") == "cuda").then(
                pl.col("devices") * pl.col("total_time_s") / SECONDS_PER_HOUR
            ),
        )
    )
    return _of_tokens(derived)


def _of_tokens(rows: pl.DataFrame) -> pl.DataFrame:
    """Add the columns of language models."""
    return rows.with_columns(
        tokens_per_s=pl.col("tokens_per_sample") * pl.col("throughput_samples_per_s"),
        model_flop_per_token=model_flop_per_token(),
        peak_flop_per_s=peak_flop_per_s(),
        final_loss_per_token=pl.when(in_nats()).then("final_loss_per_token"),
    ).with_columns(
        mfu=pl.col("model_flop_per_token") * pl.col("tokens_per_s") / (pl.col("devices") * pl.col("peak_flop_per_s")),
        final_perplexity=perplexity("final_loss_per_token"),
    )


def _prepared_again(runs: Runs) -> pl.DataFrame:
    """What a run's executions after the first took: training needs one."""
    again = numbered(runs, "preprocess", "execution", "execution_time_s", "write_s").filter(pl.col("execution") > 1)
    took_s = pl.col("execution_time_s") + pl.col("write_s").fill_null(0)
    return again.group_by("run_id").agg(took_s.sum().alias("_again_s"))


@lru_cache(maxsize=8)
def _per_rank(runs: Runs) -> pl.DataFrame:
    """One row per run and rank: its peaks over all epochs, and what it sent in them; null where one epoch's is."""
    peaks = ("peak_allocated_bytes", "host_peak_rss_bytes")
    kinds = [f"{kind}_bytes_sent" for kind in KINDS_SENT]

    def known(column: str, whole: pl.Expr) -> pl.Expr:
        return pl.when(pl.col(column).null_count() == 0).then(whole).alias(column)

    return (
        numbered(runs, "ranks", "rank", *peaks, *kinds)
        .lazy()
        .group_by(run_and("rank"))
        .agg(
            pl.col("run_id", "rank").first(),
            *(known(peak, pl.col(peak).max()) for peak in peaks),
            *(known(kind, pl.col(kind).sum()) for kind in kinds),
        )
        .collect(engine="streaming")
        .sort("_both")
        .with_columns(bytes_sent=pl.sum_horizontal(kinds, ignore_nulls=False))
    )


def _memory(runs: Runs) -> pl.DataFrame:
    """Peak memory per run: device memory of CUDA runs, host memory of CPU runs. Of devices see `_by_device`."""
    kind = pl.col("device_type").replace_strict({"cuda": "device", "cpu": "host"}, default=None)
    peak = pl.when(pl.col("memory_kind") == "device").then("peak_allocated_bytes").otherwise("host_peak_rss_bytes")
    known = pl.col("peak").null_count() == 0
    kinds = numbered(runs, "run", "device_type", "devices", "processes").select(
        "run_id", kind.alias("memory_kind"), shared=pl.col("processes") < pl.col("devices")
    )
    return (
        _per_rank(runs)
        .join(kinds, on="run_id")
        .with_columns(peak=peak)
        .group_by("run_id", "memory_kind", "shared")
        .agg(
            pl.when(known).then(pl.col("peak").max()).alias("peak_memory_max_bytes"),
            pl.when(known).then(pl.col("peak").sum()).alias("peak_memory_sum_bytes"),
        )
        .join(_by_device(runs), on="run_id", how="left", maintain_order="left")
        .with_columns(
            peak_memory_device_bytes=pl.when("shared").then("_on_device").otherwise("peak_memory_max_bytes"),
        )
        .drop("shared", "_on_device")
    )


def _by_device(runs: Runs) -> pl.DataFrame:
    """`run_id` and `_on_device`, the largest peak on any one device, of runs whose processes drive several.

    Null where any rank and epoch lacks it. Few runs are of this kind, so few texts are read.
    """
    shared = numbered(runs, "run", "devices", "processes").filter(pl.col("processes") < pl.col("devices"))
    name = "peak_allocated_bytes_by_device"
    each = pl.col(name).str.split(",").list.eval(pl.element().cast(pl.Int64)).list.max()
    rows = numbered(runs, "ranks", name) if shared.height else pl.DataFrame(schema=shared.schema | {name: pl.String})
    return (
        rows.join(shared, on="run_id", how="semi")
        .group_by("run_id")
        .agg(_on_device=pl.when(pl.col(name).null_count() == 0).then(each.max()))
    )


def _communication(runs: Runs) -> pl.DataFrame:
    """Bytes sent per optimizer step and run: by all ranks, and by the busiest; kinds add up in both."""
    steps = measured(runs).group_by("run_id").agg(pl.col("steps").sum())
    sent = pl.col("bytes_sent", *(f"{kind}_bytes_sent" for kind in KINDS_SENT))
    return (
        _per_rank(runs)
        .filter(pl.col("bytes_sent").is_not_null().all().over("run_id"))
        .group_by("run_id")
        .agg(
            sent.sum().name.suffix("_per_step_sum"),
            # Of several that send equally much, the first: its kinds, not each kind's largest, make the total.
            sent.get(pl.col("bytes_sent").arg_max()).name.suffix("_per_step_busiest"),
        )
        .join(steps, on="run_id")
        .select("run_id", pl.col("^.*_per_step_.*$") / pl.col("steps"))
    )


def _parity(runs: Runs) -> pl.DataFrame:
    differences = ("loss_difference", "gradient_difference", "parameter_difference", "evaluation_difference")
    parity = numbered(runs, "parity", *differences).group_by("run_id")
    return parity.agg(pl.max_horizontal(differences).max().alias("parity_difference"))


def _checks(runs: Runs) -> pl.DataFrame:
    """Names of the checks by what came of them."""
    rows = numbered(runs, "checks", "check", "passed", "detail")
    passed, failed = pl.col("passed").all().over("run_id", "check"), ~pl.col("passed").fill_null(True)
    names = rows.filter(pl.col("passed").is_not_null()).group_by("run_id", maintain_order=True).agg(
        failed=pl.col("check").filter(failed).unique(maintain_order=True),
        passed=pl.col("check").filter(passed).unique(maintain_order=True),
    )  # fmt: skip
    unknown = rows.filter(pl.col("passed").is_null()).group_by("run_id", maintain_order=True).agg(
        unknown=pl.format("{} ({})", "check", "detail").unique(maintain_order=True)
    )  # fmt: skip
    both = names.join(unknown, on="run_id", how="full", coalesce=True)
    parts: list[pl.Expr] = [
        pl.when(pl.col(name).list.len() > 0).then(pl.format(f"{name}: {{}}", pl.col(name).list.join(", ")))
        for name in ("failed", "passed")
    ]
    parts.append(pl.format("not compared: {}", pl.col("unknown").list.join(", ")))
    return both.select("run_id", checks_made=pl.concat_str(parts, separator="; ", ignore_nulls=True)).join(
        rows.group_by("run_id").agg(_unclosed=(pl.col("check") == CLOSING).any()), on="run_id", how="left"
    )


def staleness_histogram(runs: Runs) -> pl.DataFrame:
    """One row per run and staleness that occurred: `run_id`, `staleness`, `pushes` (how many had it), `share` of them.

    Over all workers and finished epochs; runs without pushes have no row.
    """
    counts = runs.pushes.group_by("run_id", "staleness").agg(pl.len().alias("pushes"))
    share = pl.col("pushes") / pl.col("pushes").sum().over("run_id")
    return counts.with_columns(share=share).sort("run_id", "staleness")
