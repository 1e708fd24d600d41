"""What the report says first of users' own programs: why a step takes what it takes, and what was not checked."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import polars as pl

from analysis import text
from analysis.comparison.losses import how_near, partings, printed
from analysis.comparison.summary import displayed, summary
from analysis.comparison.work import IS_PROGRAM, configurations
from analysis.metrics.epochs import AS_TEXT, numbered
from parallelbench.errors import count_of
from parallelbench.frameworks.program.sources import Sources, changed_files

if TYPE_CHECKING:
    from analysis.runs.reader import Runs


NOTABLE_SHARE = 0.1
"""Share of a step above which a wait for data, or of an idle device, is a cause to look at first."""
GROWTH = 1.05
"""Memory in use in the last window ÷ that in the first one after the warm-up, above which it is said to grow."""


def times_of_programs(runs: Runs) -> list[str]:
    """Where a step's time goes, as far as it shows from outside; nothing where the suite's own runs were measured."""
    rows = displayed(runs).filter(IS_PROGRAM)
    return [] if rows.is_empty() else [*_waiting(runs), *_slowest(runs, rows), *_idle(runs, rows), _REST]


_REST = (
    "What else a program's step is spent on is not known: launch one run under `nsys profile` or `py-spy record`, or "
    "use torch.profiler in it."
)


def memory_of_programs(runs: Runs) -> list[str]:
    """That memory grows."""
    rows = displayed(runs).filter(IS_PROGRAM)
    return [] if rows.is_empty() else _growing(runs, rows)


def checks_of_programs(runs: Runs) -> list[str]:
    """Whether samples are what they are said to be, and whether losses part."""
    rows = displayed(runs).filter(IS_PROGRAM)
    return [] if rows.is_empty() else [*_samples(rows), *_sources(runs, rows), *_losses(runs)]


def in_windows(runs: Runs, words: str) -> str:
    """Words about epochs, of users' programs alone about windows of steps, which stand for them; the
    warm-up's has as many as program.warmup_steps says.
    """
    rows = displayed(runs)
    if rows.is_empty() or not rows.select(IS_PROGRAM.all()).item():
        return words
    after = runs.epochs.filter(pl.col("epoch") > 1).join(rows.select("run_id"), on="run_id", how="semi")
    steps = after["steps"].drop_nulls().unique().to_list()
    window = f"window of {count_of(int(steps[0]), 'step')}" if len(steps) == 1 else "window of steps"
    whole = {"per epoch": f"per {window}", "Per epoch": f"Per {window}", "an epoch": f"a {window}"}
    for of_epochs, of_windows in (whole | {"An epoch": f"A {window}", "epoch": "window", "Epoch": "Window"}).items():
        words = words.replace(of_epochs, of_windows)
    return words


def _samples(rows: pl.DataFrame) -> list[str]:
    """That the samples per step are unknown, or others than the program's DataLoaders gave."""
    said, given = pl.col("global_batch_size"), pl.col("loader_samples_per_step")
    of_each = rows.select("configuration", "global_batch_size", "loader_samples_per_step").unique(maintain_order=True)
    unlike = of_each.filter(said != given).rows()
    told = [f"{name}: {given:,}, not {said:,}" for name, said, given in unlike]
    lines = []
    if told:
        lines.append(
            f"Samples per step: the DataLoaders gave others than program.samples_per_step says ({text.listed(told)}), "
            "so samples per second and speed-ups are wrong where that is: is the command's batch size one per rank, or "
            "of all?"
        )
    if of_each.filter(said.is_null()).height:
        lines.append(
            "Samples per step are not known (program.samples_per_step), so there are times, but no samples per second, "
            "and speed-ups only if each step does the same work on any number of devices."
        )
    return lines


def _sources(runs: Runs, rows: pl.DataFrame) -> list[str]:
    """The files in which the sources of one program's runs differ, from each state to the next one measured."""
    lines = []
    of_runs = configurations(runs)
    for (name,), members in rows.sort("launched_at", nulls_last=True).group_by("model", maintain_order=True):
        nodes = [msgspec.json.decode(of_runs[run_id]["strategy"], type=_Program) for run_id in members["run_id"]]
        for before, after in itertools.pairwise({each.sources: each for each in nodes}.values()):
            names = changed_files(Path(after.folder or "."), before.state, after.state)
            changed = text.listed(names, most=3) if names else f"files ({before.sources}, then {after.sources})"
            lines.append(f"Several states of {name} were measured: {changed} changed between them.")
    return lines


class _Program(msgspec.Struct):
    """Of a run's strategy."""

    sources: str
    folder: str | None = None
    files: dict[str, str] = {}

    @property
    def state(self) -> Sources:
        return Sources(self.sources, self.files)


def _waiting(runs: Runs) -> list[str]:
    """The share of a step that goes by inside a DataLoader's `next`."""
    rows = summary(runs).drop_nulls("steady_data_wait_share")
    if rows.is_empty():
        return []
    of_share: dict[str, list[str]] = defaultdict(list)
    for row in rows.to_dicts():
        of_share[text.percent(row["steady_data_wait_share"])].append(row["configuration"])
    names = {share: "all" if len(of_share) == 1 < len(of) else text.listed(of) for share, of in of_share.items()}
    told = [f"{share} of a step with {of}" for share, of in names.items()]
    alike = ", alike, so they explain no difference" if len(of_share) == 1 < rows.height else ""
    much = rows.filter(pl.col("steady_data_wait_share") > NOTABLE_SHARE).height
    advice = ": try more workers of the DataLoader, faster decoding or storage, before more devices" if much else ""
    return [f"Waiting for data: {text.listed(told)}{alike}{advice}."]


def _slowest(runs: Runs, rows: pl.DataFrame) -> list[str]:
    """Configurations of which one rank comes last to the backward pass in most windows of most runs."""
    ranks = numbered(runs, "ranks", "epoch", "rank", "epoch_time_s", "forward_s").with_columns(AS_TEXT)
    known = ranks.filter(pl.col("epoch") > 1).drop_nulls("forward_s").sort("forward_s", descending=True)
    # Ranks wait for each other within the backward pass, so that all take equally long for a step.
    took = pl.col("forward_s")
    windows = known.group_by("run_id", "epoch", maintain_order=True).agg(
        last=pl.col("rank").first(),
        behind=(took.first() - took.get(1, null_on_oob=True)) / pl.col("epoch_time_s").max(),
        ranks=pl.len(),
    ).filter(pl.col("ranks") > 1)  # fmt: skip
    slow = windows.filter(pl.col("behind") > NOTABLE_SHARE)
    found = slow.join(rows.select("run_id", "configuration"), on="run_id").group_by("configuration", "last").agg(
        pl.len().alias("windows"), pl.col("behind").median()
    )  # fmt: skip
    every = dict(
        windows.join(rows.select("run_id", "configuration"), on="run_id").group_by("configuration").len().rows()
    )
    told = [
        f"rank {rank} with {name}, by {text.percent(behind)} of a step"
        for name, rank, count, behind in found.sort("configuration").rows()
        if count > every[name] / 2
    ]
    return [f"One rank is later than the others in most windows: {text.listed(told)}."] if told else []


def _idle(runs: Runs, rows: pl.DataFrame) -> list[str]:
    """GPUs in which no kernel ran for a part of the time."""
    steady = pl.col("gpu_utilization_mean").filter(pl.col("epoch") > 1).median()
    busy = (
        numbered(runs, "epochs", "epoch", "gpu_utilization_mean").with_columns(AS_TEXT).group_by("run_id").agg(steady)
    )
    found = rows.join(busy, on="run_id").group_by("configuration", maintain_order=True).agg(
        idle=1 - pl.col("gpu_utilization_mean").median()
    )  # fmt: skip
    told = [
        f"{text.percent(idle)} of the time with {name}" for name, idle in found.rows() if idle and idle > NOTABLE_SHARE
    ]
    return (
        [f"GPUs without a running kernel: {text.listed(told)}: the host launches too late, or waits."] if told else []
    )


def _growing(runs: Runs, rows: pl.DataFrame) -> list[str]:
    """Configurations of which every run used more memory of the node from window to window."""
    name = "host_memory_used_max_bytes"
    epochs = numbered(runs, "epochs", "epoch", name).with_columns(AS_TEXT).filter(pl.col("epoch") > 1)
    steadily = (pl.col(name).diff() > 0).all() & (pl.len() > 2)
    much = pl.col(name).last() > GROWTH * pl.col(name).first()
    grown = epochs.drop_nulls(name).sort("epoch").group_by("run_id").agg(grows=steadily & much)
    quiet = rows.filter(~pl.col("disturbed"))  # other programs' memory is in it
    found = quiet.join(grown, on="run_id").group_by("group", "configuration", maintain_order=True)
    names = found.agg(pl.col("grows").all()).filter("grows")["configuration"].unique(maintain_order=True).to_list()
    told = f"Memory in use on the node grows from window to window with {text.listed(names)}"
    return [f"{told}: is something kept in each step?"] if names else []


def _losses(runs: Runs) -> list[str]:
    """That learning is unchecked; and where two sides print unlike losses at the same steps of one repeat."""
    unchecked = "Whether the program learns the same on several devices was not checked"
    known = printed(runs)
    if known.is_empty():
        return [f"{unchecked}: its losses are yours to check (program.loss_pattern compares what it prints)."]
    parted = [
        f"{each.name} from {each.other} by {text.percent(each.apart)}, from step {each.step:,} on"
        for each in partings(runs)
    ]
    if parted:
        where = "(mean of the last window, median over repeats)"
        return [f"Printed losses part: {text.listed(parted)} {where}: do both do the same work?"]
    return [f"{unchecked}; {how_near(runs)}."]
