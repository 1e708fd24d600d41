"""The page for an allocation: what a computing centre asks of a training, on two pages, as HTML and as LaTeX.

Strong and weak scaling with intervals, wall time and device-hours, memory, and how all of it was measured. What these
runs did not measure is named, and not estimated.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import polars as pl

from analysis import text
from analysis.comparison.baseline import BESIDE_SPEED_UPS, in_words, limits, refusals, stand_ins
from analysis.comparison.exclusions import disturbed_times, require_finished
from analysis.comparison.issues import FLAGS, is_quotable
from analysis.comparison.notes import write
from analysis.comparison.ratio import ERROR, FEWEST_REPEATS, Spread, ratio_median
from analysis.comparison.summary import displayed, facts, summary
from analysis.comparison.verdict import SpeedVerdict
from analysis.comparison.work import IS_PROGRAM, groups_across
from analysis.figures import svg
from analysis.figures.chart import named
from analysis.metrics.epochs import per_epoch
from analysis.report import latex
from analysis.text import DISTURBED_MARK
from parallelbench.errors import ConfigError, count_of
from parallelbench.measure.environment_match import flatten
from parallelbench.redaction import redacted
from parallelbench.results.files import storage_errors
from parallelbench.world.allowance import require_figures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import altair as alt

    from analysis.runs.reader import Runs


MOST_ROWS = {1: 20, 2: 10}
"""Tables of scaling → configurations of each: more would take a third page."""
PROGRAM_STEPS = 1000
"""Steps of a user's program whose costs are told, where nobody said how many: nobody knows its epochs."""
_SCALINGS = {
    "strong": "the global batch is fixed",
    "weak": "the batch per device is fixed",
}
_OF_STUDY = ("scaling", "batch_size")
"""Keys in which the works of one study may differ."""
_GIB = 2**30


class Work(NamedTuple):
    """How much is to be trained."""

    amount: int
    unit: str
    """ "epoch" or "step"."""

    def __str__(self) -> str:
        return count_of(self.amount, self.unit)


class Estimate(NamedTuple):
    """A median over repeats, and its 95 % interval, Student's t on logarithms; None below three repeats."""

    median: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Estimate | None:
        """None where a repeat has none, or where there is no repeat."""
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values) or min(known) <= 0:
            return None
        spread = Spread.of_ratios(known)
        return cls(ratio_median(known), *(spread.ends(ERROR) if spread else ()))

    def shown(self, number: Callable[[float], str]) -> str:
        """ "1.62 (1.55–1.70)"."""
        if self.low is None or self.high is None:
            return number(self.median)
        return f"{number(self.median)} ({number(self.low)}–{number(self.high)})"


@dataclass(frozen=True)
class Table:
    """A table of both documents; with a figure below it."""

    name: str
    """Of the figure's file, and of the label in LaTeX."""
    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    figure: str = ""
    """As SVG; empty: none."""
    figure_caption: str = ""


@dataclass(frozen=True)
class Page:
    """What both documents say."""

    title: str
    work: str
    """The data, the model, and what else tells it from others."""
    lead: tuple[str, ...]
    tables: tuple[Table, ...]
    method: tuple[tuple[str, str], ...]
    """What, and what is said of it."""
    unknown: tuple[str, ...] = field(default=())


def write_proposal(
    runs: Runs, out: Path | None = None, *, epochs: int | None = None, steps: int | None = None, work: str | None = None
) -> list[Path]:
    """Write `proposal.html`, `proposal.tex` and its figures as PDF to `out` (default: `proposal` in the folder of the
    runs); returns the two documents.

    `epochs` or `steps`: the training whose cost is told, by default that of the runs. `work`: words of its heading,
    where several works were measured. Raises `ConfigError` where there is nothing to tell, `StorageError`.
    """
    import vl_convert

    require_figures()
    require_finished(runs)
    page = page_of(_study(runs, work), epochs=epochs, steps=steps)
    to = out or runs.root / "proposal"
    documents = {"proposal.html": _html(page), "proposal.tex": _latex(page)}
    with storage_errors(to, option="--out DIR"):
        to.mkdir(parents=True, exist_ok=True)
        for table in page.tables:
            if table.figure:
                (to / f"{table.name}.pdf").write_bytes(vl_convert.svg_to_pdf(table.figure))
        for name, words in documents.items():
            (to / name).write_text(redacted(words), encoding="utf-8")
    return [to / name for name in documents]


def _study(runs: Runs, words: str | None) -> Runs:
    """The runs of one work, under both kinds of scaling and with any batch."""
    of_runs = groups_across(runs, _OF_STUDY)
    shown = set(displayed(runs)["run_id"])
    if not shown:
        raise ConfigError(f"{runs.root} holds no run that counts: `parallelbench report` says why")
    names = sorted({name for run_id, name in of_runs.items() if run_id in shown})
    chosen = names if words is None else named(words, names)
    if len(chosen) > 1:
        raise ConfigError(
            f"{len(chosen)} kinds of work, and a page for an allocation is of one: choose it by words of its name, "
            f"--work WORDS, of {text.listed(chosen, most=8, sep='; ')}"
        )
    return runs.only([run_id for run_id, name in of_runs.items() if name == chosen[0]])


def page_of(runs: Runs, *, epochs: int | None = None, steps: int | None = None) -> Page:
    """The page of runs of one work."""
    rows = summary(runs).filter(pl.col("repeats") + pl.col("disturbed").cast(pl.Int32) > 0)
    of_programs = bool(displayed(runs).select(IS_PROGRAM.all()).item())
    asked = _asked(runs, epochs=epochs, steps=steps, of_programs=of_programs)
    members = {key: some.to_dicts() for key, some in displayed(runs).group_by("group", "configuration")}
    chosen = {scaling: _widest(rows.filter(scaling=scaling)) for scaling in _SCALINGS if scaling in rows["scaling"]}
    shown = [(scaling, _few(of, MOST_ROWS[len(chosen)])) for scaling, of in chosen.items()]
    of_shown = [run for _, of in shown for row in of.to_dicts() for run in members[row["group"], row["configuration"]]]
    starts = all(_startup_s(run) is not None for run in of_shown)
    resources, missing = _resources_table(shown, members, asked, starts=starts)
    left = rows.height - sum(of.height for _, of in shown)
    return Page(
        title=f"Scaling and resources: {text.listed(sorted(set(runs.run['sweep'])))}",
        work=_heading(runs),
        lead=tuple(line for scaling, of in shown for line in _lead(scaling, of, members, asked, starts=starts)),
        tables=(*(_scaling_table(runs, of, members, of_programs=of_programs) for _, of in shown), resources),
        method=tuple(_method(runs, rows, of_programs=of_programs, left=left)),
        unknown=tuple(_unknown(runs, missing, of_programs=of_programs)),
    )


def _widest(rows: pl.DataFrame) -> pl.DataFrame:
    """Of several batches, the rows of the one that was measured on most counts of devices, then in most ways."""
    batches = rows.group_by("group", maintain_order=True).agg(counts=pl.col("devices").n_unique(), ways=pl.len())
    group = batches.sort("counts", "ways", descending=True, maintain_order=True)["group"][0]
    return rows.filter(group=group).sort("devices", "nodes", "configuration")


def _heading(runs: Runs) -> str:
    names = set(groups_across(runs, _OF_STUDY).values())
    return next(iter(names)) if len(names) == 1 else ""


def _asked(runs: Runs, *, epochs: int | None, steps: int | None, of_programs: bool) -> Work:
    """The training whose cost is told."""
    if epochs is not None and steps is not None:
        raise ConfigError("--epochs and --steps both say how much is trained: leave out one of the two")
    if epochs is not None and of_programs:
        raise ConfigError(f"--epochs {epochs}: nobody knows the epochs of a program; say how many steps: --steps N")
    if steps is not None or of_programs:
        return Work(steps or PROGRAM_STEPS, "step")
    own = Counter(displayed(runs)["epochs"].to_list()).most_common(1)[0][0]
    return Work(epochs or int(own), "epoch")


def _few(rows: pl.DataFrame, most: int) -> pl.DataFrame:
    """At most so many rows: the first one, and those of the variants that are fastest on the most devices."""
    if rows.height <= most:
        return rows
    first, others = rows.head(1), rows.slice(1)
    ranked = others.sort("devices", "steady_step_time_s", descending=[True, False], nulls_last=True)
    kept, room = [first], most - 1
    for variant in ranked["variant"].unique(maintain_order=True):
        of_variant = others.filter(variant=variant)
        if of_variant.height > room and len(kept) == 1:  # every second one, say, and the last
            of_variant = of_variant.reverse().gather_every(-(-of_variant.height // room)).reverse()
        if of_variant.height <= room:
            kept.append(of_variant)
            room -= of_variant.height
    return pl.concat(kept).sort("devices", "nodes", "configuration")


Members = dict[Any, list[dict[str, Any]]]
"""Group and configuration → the rows of `facts` that its numbers rest on."""


def _values(members: Members, row: dict[str, Any], column: str) -> list[float | None]:
    return [run[column] for run in members[row["group"], row["configuration"]]]


def _scaling_table(runs: Runs, rows: pl.DataFrame, members: Members, *, of_programs: bool) -> Table:
    """Times, throughput, speed-up and efficiency."""
    time = ("steady_step_time_s", "Step (ms)", 1e3) if of_programs else ("steady_epoch_time_s", "Epoch (s)", 1.0)
    rate = "tokens_per_s" if rows["tokens_per_s"].count() else "throughput_samples_per_s"
    head = ("Configuration", "Devices", "Nodes", "Repeats", time[1],
            "Tokens/s" if rate == "tokens_per_s" else "Samples/s", "Speed-up", "Efficiency")  # fmt: skip
    shown = []
    for row in rows.to_dicts():
        estimate = Estimate.of([None if (s := v) is None else s * time[2] for v in _values(members, row, time[0])])
        speed_up, efficiency = _gain(row)
        shown.append((
            row["variant"], str(row["devices"]), str(row["nodes"]), _repeats(members, row),
            estimate.shown(text.number) if estimate else text.MISSING,
            text.number(row[rate]),
            speed_up, efficiency,
        ))  # fmt: skip
    scaling, batch = rows["scaling"][0], rows["group"][0]
    baselines, of_baseline = _baselines(rows), _baseline_devices(rows)
    why = text.listed(_without_speed_up(rows))
    per = "devices" if of_baseline in (1, None) else f"(devices ÷ {of_baseline})"
    if baselines and of_baseline is None:
        per = "(devices ÷ the baseline's devices)"
    if baselines:
        lacking = f" ({text.MISSING}: {why})" if why else ""
        over = f"Speed-up is over {text.listed(baselines)}{lacking}; efficiency is speed-up ÷ {per}"
        if _without_efficiency(rows):
            over += ", of the baseline's own strategy alone: beside another one's, a ratio is not of devices alone"
    else:
        over = f"No speed-up: {why}" if why else "No speed-up"
    sizes = displayed(runs).filter(group=batch)["batch_size"].unique().sort().to_list()
    of_batch = "" if of_programs else f" ({', '.join(map(str, sizes))} samples)"
    caption = (
        f"{scaling.capitalize()} scaling: {_SCALINGS[scaling]}{of_batch}. Medians over repeats with 95 % intervals. "
        f"{over}."
    )
    if rows["disturbed"].any():
        caption += f" {DISTURBED_MARK} Other programs disturbed these runs: they are compared with nothing."
    drawn = _drawn(rows)
    figure = svg(_chart(drawn, runs, of_baseline).to_dict(validate=False)) if drawn["devices"].n_unique() > 1 else ""
    own = f" of {text.listed(baselines)}" if _without_efficiency(rows) else ""
    ideal = f"; grey: ideal{own}" if of_baseline else ""
    return Table(
        f"{scaling}-scaling",
        caption,
        *_without_empty(head, shown),
        figure=figure,
        figure_caption=f"{scaling.capitalize()} scaling, with 95 % intervals{ideal}." if figure else "",
    )


def _repeats(members: Members, row: dict[str, Any]) -> str:
    return f"{len(members[row['group'], row['configuration']])}{DISTURBED_MARK if row['disturbed'] else ''}"


def _baselines(rows: pl.DataFrame) -> list[str]:
    """What the speed-ups of these rows are over, in words."""
    names = rows.filter(pl.col("speed_up").is_not_null())["baseline"].drop_nulls().unique(maintain_order=True)
    return [in_words(name, named=len(names) > 1) for name in names]


def _without_efficiency(rows: pl.DataFrame) -> bool:
    """Whether a speed-up is over several devices of another strategy."""
    return not rows.filter(pl.col("speed_up").is_not_null(), pl.col("efficiency").is_null()).is_empty()


def _without_speed_up(rows: pl.DataFrame) -> list[str]:
    """Why rows have no speed-up, each reason once."""
    lacking = rows.filter(pl.col("speed_up").is_null(), pl.col("verdict").ne_missing(SpeedVerdict.BASELINE.value))
    return lacking["verdict"].fill_null("nothing to compare with").unique(maintain_order=True).to_list()


def _baseline_devices(rows: pl.DataFrame) -> int | None:
    """Devices of what the speed-ups are over; None where these are several counts, or none."""
    counts = rows.filter(pl.col("speed_up").is_not_null())["baseline_devices"].drop_nulls().unique().to_list()
    return int(counts[0]) if len(counts) == 1 else None


def _gain(row: dict[str, Any]) -> tuple[str, str]:
    """Speed-up and efficiency with their intervals; dashes where there are none."""
    if row["speed_up"] is None:
        return text.MISSING, text.MISSING
    low, high, share = row["speed_up_low"], row["speed_up_high"], row["efficiency"]
    whole = text.interval(row["speed_up"], low, high)
    if share is None:
        return whole, text.MISSING
    is_shown = low is not None and not text.is_wide(low, high)
    ends = f" ({100 * row['efficiency_low']:.1f}–{100 * row['efficiency_high']:.1f})" if is_shown else ""
    return whole, f"{100 * share:.1f}{ends} %"


def _lead(scaling: str, rows: pl.DataFrame, members: Members, asked: Work, *, starts: bool) -> list[str]:
    """The fastest configuration on the most devices: its speed-up, and what the training takes there."""
    most = rows.filter(pl.col("devices") == rows["devices"].max())
    row = most.sort("steady_step_time_s", nulls_last=True).row(0, named=True)
    wall, hours = _costs(members, row, asked, starts=starts)
    name = f"{row['variant']} on {count_of(row['devices'], 'device')}"
    told = []
    is_own = row["verdict"] == SpeedVerdict.BASELINE
    if row["speed_up"] is not None and not is_own and rows["devices"].n_unique() > 1:
        speed_up, efficiency = _gain(row)
        over = in_words(row["baseline"], named=len(_baselines(rows)) > 1)
        share = "" if row["efficiency"] is None else f", efficiency {efficiency}"
        told.append(f"{speed_up} times as fast as {over}{share}")
    if wall and hours:
        during = " (others disturbed these runs)" if _is_disturbed(members, row, asked) else ""
        told.append(f"{asked} take {wall.shown(text.number)} h, {hours.shown(text.number)} device-hours{during}")
    return [f"{scaling.capitalize()} scaling: {name}: {'; '.join(told)}."] if told else []


def _costs(
    members: Members, row: dict[str, Any], asked: Work, *, starts: bool
) -> tuple[Estimate | None, Estimate | None]:
    """Wall time and device-hours of the training, in hours: the first epoch, the others at the steady rate and, if
    `starts`, the start-up, which is then known of all runs of the page.
    """
    hours = [_hours(run, asked, starts=starts) for run in members[row["group"], row["configuration"]]]
    return Estimate.of(hours), Estimate.of([None if each is None else each * row["devices"] for each in hours])


def _is_disturbed(members: Members, row: dict[str, Any], asked: Work) -> bool:
    """Whether any of these costs rests on epochs that others disturbed. Steps are costed without the first epoch."""
    return row["disturbed"] or (asked.unit == "epoch" and any(_values(members, row, "first_disturbed")))


def _startup_s(run: dict[str, Any]) -> float | None:
    """From the launch to the first step, which belongs to the first epoch."""
    whole_s, first_step_s = run["startup_without_parity_s"], run["startup_first_step_s"]
    return None if whole_s is None or first_step_s is None else whole_s - first_step_s


def _hours(run: dict[str, Any], asked: Work, *, starts: bool) -> float | None:
    start_s = (_startup_s(run) or 0.0) if starts else 0.0
    if asked.unit == "step":
        step_s = run["steady_step_time_s"]
        return None if step_s is None else (start_s + asked.amount * step_s) / 3600
    first_s, steady_s = run["first_epoch_time_s"], run["steady_epoch_time_s"]
    if first_s is None or (steady_s is None and asked.amount > 1):
        return None
    return float(start_s + first_s + (asked.amount - 1) * (steady_s or 0.0)) / 3600


def _resources_table(
    groups: Sequence[tuple[str, pl.DataFrame]], members: Members, asked: Work, *, starts: bool
) -> tuple[Table, list[str]]:
    """Wall time, device-hours, memory, MFU and energy; and the names of what nothing is known of."""
    on_gpus = any("device" in rows["memory_kind"].to_list() for _, rows in groups)
    memory = "Memory per device (GiB)" if on_gpus else "Memory per process (GiB)"
    head: tuple[str, ...] = (
        *("Scaling", "Configuration", "Devices", f"Wall time, {asked} (h)", f"Device-hours, {asked}", memory, "MFU"),
        "GPU energy (J per sample)",
    )
    shown: list[tuple[str, ...]] = []
    any_disturbed = False
    for scaling, rows in groups:
        for row in rows.with_columns(quotable=is_quotable()).to_dicts():
            wall, hours = _costs(members, row, asked, starts=starts)
            disturbed = _is_disturbed(members, row, asked)
            any_disturbed |= disturbed
            mark = DISTURBED_MARK if disturbed else ""
            peak = row["peak_memory_device_bytes" if on_gpus else "peak_memory_max_bytes"]
            shown.append((
                scaling, row["variant"], str(row["devices"]),
                wall.shown(text.number) + mark if wall else text.MISSING,
                hours.shown(text.number) + mark if hours else text.MISSING,
                text.MISSING if peak is None else text.number(peak / _GIB),
                text.percent(row["mfu"]),
                text.number(row["gpu_energy_per_sample_j"] if row["quotable"] else None),
            ))  # fmt: skip
    if len(groups) == 1:
        head, shown = head[1:], [row[1:] for row in shown]
    kept, rows_kept = _without_empty(head, shown)
    missing = [name.partition(" (")[0].partition(",")[0] for name in head if name not in kept]
    of_rows = [
        run for _, rows in groups for row in rows.to_dicts() for run in members[row["group"], row["configuration"]]
    ]
    caption = (
        f"Resources of a training of {asked}: {_counted_in(of_rows, asked, starts=starts)}. Without queueing, "
        f"{'' if starts else 'start-up, '}evaluation and checkpoints. Medians over repeats with 95 % intervals; memory "
        f"is the peak of the fullest one.{_unquoted(groups)}"
    )
    if any_disturbed:
        caption += f" {DISTURBED_MARK} Other programs disturbed epochs that these hours rest on."
    return Table("resources", caption, kept, rows_kept), missing


def _unquoted(groups: Sequence[tuple[str, pl.DataFrame]]) -> str:
    """Why energies that were measured are in no table."""
    left = pl.concat([rows.filter(~is_quotable()).drop_nulls("gpu_energy_per_sample_j") for _, rows in groups])
    flags = sorted({flag for found in left["energy_flags"] for flag in found.split()} & FLAGS.keys())
    why = "; ".join(f"{FLAGS[flag]} ({flag})" for flag in flags)
    return f" Without the energies of {count_of(left.height, 'configuration')}: {why}." if why else ""


def _counted_in(of_rows: Sequence[dict[str, Any]], asked: Work, *, starts: bool) -> str:
    """What the hours hold."""
    start_up = ["start-up"] if starts else []
    if asked.unit == "step":
        return text.listed([*start_up, "steps at the steady rate"])
    told = text.listed([*start_up, "the first epoch", "the others at the steady rate"])
    finished = sorted({run["epochs_finished"] for run in of_rows})
    if asked.amount <= finished[0]:
        return told
    measured = str(finished[0]) if len(finished) == 1 else f"{finished[0]} to {finished[-1]}"
    return f"{told}, extrapolated from {measured} measured"


def _without_empty(
    head: Sequence[str], rows: Sequence[tuple[str, ...]]
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Without columns that hold nothing, and without nodes where all have one."""
    kept = [
        n
        for n, name in enumerate(head)
        if {row[n] for row in rows} - {text.MISSING} and not (name == "Nodes" and {row[n] for row in rows} == {"1"})
    ]
    return tuple(head[n] for n in kept), tuple(tuple(row[n] for n in kept) for row in rows)


def _method(runs: Runs, rows: pl.DataFrame, *, of_programs: bool, left: int) -> Iterator[tuple[str, str]]:
    """How it was measured."""
    known = facts(runs)
    counted = displayed(runs)
    yield "Devices", _devices(counted)
    yield "Software", text.listed(_software(counted), most=12)
    yield "Sources", text.listed(_sources(counted), most=4)
    yield "Measured", _dates(runs)
    repeats = sorted(set(counted.group_by("group", "configuration").len()["len"].to_list()))
    spread = str(repeats[0]) if len(repeats) == 1 else f"{repeats[0]} to {repeats[-1]}"
    gone = Counter(known["exclusion"].drop_nulls())
    why = ", ".join(f"{count} {reason}" for reason, count in sorted(gone.items()))
    yield (
        "Repeats",
        f"{spread} of each configuration, {_order(rows)}"
        + (f"; {count_of(sum(gone.values()), 'run')} not counted ({why})" if gone else ""),
    )
    yield (
        "Times",
        (
            "windows of optimizer steps of the slowest rank, without the warm-up"
            if of_programs
            else "training windows of the slowest rank, median over the epochs without the first one; evaluation is "
            f"outside of them{_evaluation(runs, counted)}"
        ),
    )
    yield (
        "Intervals",
        f"95 %, Student's t on the logarithms of the repeats, from {FEWEST_REPEATS} repeats on; of speed-ups, on those "
        "of the ratios of runs of one repeat. They hold however often one looked and added repeats",
    )
    yield "Same training", _parity(known, of_programs=of_programs)
    if known["mfu"].count():
        yield "MFU", "model FLOP/s ÷ (devices × the rate of a matrix product that was measured on the device)"
    if saved := _checkpoints(runs):
        yield "Checkpoint", saved
    disturbed = write(disturbed_times(runs), brief=True)
    of_comparisons = write([*refusals(runs), *limits(runs, BESIDE_SPEED_UPS)], brief=True)
    if told := [*write(stand_ins(runs)), *of_comparisons, *disturbed]:
        yield "Limits", " ".join(told[:MOST_LIMITS]).rstrip(".")
    if left:
        yield "Left out", f"{count_of(left, 'configuration')}, for room: `parallelbench report` has all"
    yield "Tool", "parallelbench: the tables of each run lie in its folder, with checksums"


MOST_LIMITS = 3
"""Sentences on baselines, and on comparisons that are refused or limited."""


FEWEST_IN_TURN = 2
"""Pairs of runs: of one alone a side comes first."""


def _order(rows: pl.DataFrame) -> str:
    """Whether drifts of the machine can have favoured a side."""
    compared = rows.filter(pl.col("speed_up").is_not_null(), pl.col("verdict") != SpeedVerdict.BASELINE)
    apart = compared.filter(verdict=SpeedVerdict.NOT_INTERLEAVED).height
    if compared.is_empty():
        return "compared with nothing"
    if once := compared.filter(pl.col("speed_up_pairs") < FEWEST_IN_TURN).height:
        single = f"{count_of(once, 'configuration')} of {compared.height} beside one run of the baseline only"
        return f"{single}, {apart} not measured in turn with it" if apart else single
    if not apart:
        return "measured in turn with the baseline's"
    return f"{count_of(apart, 'configuration')} of {compared.height} not measured in turn with the baseline"


def _evaluation(runs: Runs, rows: pl.DataFrame) -> str:
    """How long an evaluation takes, which is in no other number of the page."""
    epochs = per_epoch(runs).join(rows.select("run_id"), on="run_id", how="semi")
    longest_s = epochs["slowest_evaluation_time_s"].max()
    return "" if longest_s is None else f" (at most {text.number(float(longest_s))} s after an epoch)"  # type: ignore[arg-type]


def _devices(rows: pl.DataFrame) -> str:
    names = rows["device_name"].drop_nulls().unique().sort().to_list() or ["unknown"]
    memory = sorted({f"{device['memory_bytes'] / _GIB:.0f} GiB" for each in _environments(rows)
                     for device in (each.get("cuda") or {}).get("devices") or ()})  # fmt: skip
    cores = rows["cores_per_device"].drop_nulls().unique().sort().to_list()
    of_cores = f", {'/'.join(map(str, cores))} core{'s' if cores != [1] else ''} each" if cores else ""
    of_memory = f" ({', '.join(memory)})" if memory else ""
    nodes = rows["nodes"].unique().sort().to_list()
    where = f"{count_of(nodes[0], 'node')}" if len(nodes) == 1 else f"{nodes[0]} to {nodes[-1]} nodes"
    return f"{text.listed(names)}{of_memory}{of_cores}; {where}"


def _environments(rows: pl.DataFrame) -> list[dict[str, Any]]:
    return [msgspec.json.decode(each) for each in rows["environment_json"].drop_nulls().unique(maintain_order=True)]


_VERSIONS = {
    "packages.torch": "torch",
    "packages.tensorflow": "TensorFlow",
    "cuda.version": "CUDA",
    "cuda.cudnn": "cuDNN",
    "cuda.nccl": "NCCL",
    "cuda.driver": "driver",
    "python": "Python",
    "platform": "",
    "packages.parallelbench": "parallelbench",
}
"""Entry of the environment → what it is called."""


def _software(rows: pl.DataFrame) -> list[str]:
    found: dict[str, dict[str, None]] = {}
    for each in _environments(rows):
        flat = flatten(each)
        for key, name in _VERSIONS.items():
            if flat.get(key):
                value = " ".join(dict.fromkeys(str(flat[key]).split()))
                found.setdefault(key, {})[f"{name} {value}".strip()] = None
    return [" and ".join(found[key]) for key in _VERSIONS if key in found] or ["not recorded"]


def _sources(rows: pl.DataFrame) -> list[str]:
    """Commits of what trained: of a program or plugin its own, then the suite's."""
    found: dict[str, None] = {}
    strategies = (msgspec.json.decode(each).get("strategy") or {} for each in rows["config_json"].unique())
    found |= {f"program {_short(each['sources'])}": None for each in strategies if each.get("sources")}
    for each in _environments(rows):
        plugin = each.get("plugin") or {}
        if plugin.get("sources"):
            found[f"plugin {_short(plugin['sources'])}"] = None
        git = each.get("git") or {}
        if git.get("commit"):
            changed = " and uncommitted changes" if git.get("dirty") else ""
            found[f"parallelbench {git['commit'][:12]}{changed}"] = None
    return list(found) or ["no commit was recorded"]


def _short(identity: str) -> str:
    """The first digits of hashes: a line of LaTeX does not break within one."""
    return re.sub(r"[0-9a-f]{13,}", lambda digits: digits[0][:12], identity)


def _dates(runs: Runs) -> str:
    low, high = runs.epochs.select(low=pl.col("finished_at").min(), high=pl.col("finished_at").max()).row(0)
    days = sorted({f"{datetime.fromtimestamp(at, tz=UTC):%Y-%m-%d}" for at in (low, high) if at is not None})
    return f"{' to '.join(days)} (UTC)" if days else "unknown"


def _parity(rows: pl.DataFrame, *, of_programs: bool) -> str:
    """Whether several devices train what one does."""
    if of_programs:
        return "not checked: whether several devices learn what one does is for the program's own losses to tell"
    checked = rows.drop_nulls("parity_passed")
    if checked.is_empty():
        return "not checked"
    return (
        f"first steps held against one device's, in {checked.height} runs: passed in "
        f"{int(checked['parity_passed'].sum())}; runs that fail are not counted"
    )


_MIB_OF_FP32 = 4 / 2**20


def _unknown(runs: Runs, missing: Sequence[str], *, of_programs: bool) -> Iterator[str]:
    """What a centre may ask, and these runs don't say."""
    if not _checkpoints(runs):
        yield f"Time and size of a checkpoint: no run saved one (launcher.checkpoint=always does){_weights(runs)}."
    if missing:
        yield f"Not measured, or not known: {text.listed(missing, most=8)}."
    if of_programs and displayed(runs)["global_batch_size"].null_count():
        yield "Samples per step: not known, so efficiencies hold only if each step does the same work on any devices."


def _checkpoints(runs: Runs) -> str:
    """What saving the state takes, of each configuration that saved one, the largest first; empty where none did."""
    saved = displayed(runs).drop_nulls("checkpoint_bytes")
    each = saved.group_by("configuration", maintain_order=True).agg(
        pl.col("checkpoint_bytes").max(), pl.col("checkpoint_save_s").median()
    )
    told = [
        f"{text.mebibytes(row['checkpoint_bytes'])} MiB in {text.seconds(row['checkpoint_save_s'])} with "
        f"{row['configuration']}"
        for row in each.sort("checkpoint_bytes", descending=True, maintain_order=True).to_dicts()
    ]
    return f"{text.listed(told, most=4)}, while training stands still" if told else ""


def _weights(runs: Runs) -> str:
    parameters = displayed(runs)["parameters"].drop_nulls().unique().to_list()
    if len(parameters) != 1:
        return ""
    size_mib = text.number(parameters[0] * _MIB_OF_FP32)
    return f"; its weights alone, {parameters[0]:,} parameters, are {size_mib} MiB in fp32"


def _drawn(rows: pl.DataFrame) -> pl.DataFrame:
    """What the figure shows: of each configuration speed-up and efficiency."""
    shares = ("efficiency", "efficiency_low", "efficiency_high")
    drawn = rows.filter(pl.col("speed_up").is_not_null()).select(
        *("group", "configuration", "variant", "strategy", "devices", "nodes"),
        *("speed_up", "speed_up_low", "speed_up_high"),
        *(pl.col(name) * 100 for name in shares),
    )
    return drawn.sort("variant", "devices")


def _chart(data: pl.DataFrame, runs: Runs, of_baseline: int | None) -> alt.HConcatChart:
    """Speed-up and efficiency over devices, beside each other; with the ideal, where all are over as many devices."""
    import altair as alt

    from analysis.figures.chart import INK, LEGEND, THEORY, scale, variants

    devices = sorted({*data["devices"], *([of_baseline] if of_baseline else [])})
    axis: dict[str, Any] = {"labelFontSize": 12, "titleFontSize": 12, "labelColor": INK, "titleColor": INK}
    axis |= {"titleFontWeight": "normal"}
    x = alt.X(
        "devices:Q",
        title="devices",
        scale=alt.Scale(type="log", base=2, nice=False, padding=12),
        axis=alt.Axis(values=devices, format=",d", grid=False, **axis),
    )
    colour = alt.Color("variant:N", scale=scale(variants(data, runs)), legend=LEGEND)
    ideal = pl.DataFrame(
        {
            "devices": devices,
            "speed_up": [each / (of_baseline or 1) for each in devices],
            "efficiency": [100.0] * len(devices),
        }
    )
    parts = []
    logarithmic = alt.Scale(type="log", base=2, nice=False, padding=12)
    for name, title, at in (
        ("speed_up", "speed-up (×)", logarithmic),
        ("efficiency", "efficiency (%)", alt.Scale(zero=True, nice=True)),
    ):
        ticks: dict[str, Any] = {"values": ideal["speed_up"].to_list(), "format": "~r"} if name == "speed_up" else {}
        y = alt.Y(f"{name}:Q", title=title, scale=at, axis=alt.Axis(gridColor="#e6e6e6", **axis, **ticks))
        base = alt.Chart(data)
        known = base.transform_filter(f"isValid(datum.{name}_low)")
        bars = known.mark_rule(strokeWidth=1.6).encode(
            x=x, y=alt.Y(f"{name}_low:Q", title=title, scale=at), y2=f"{name}_high:Q", color=colour
        )
        line = base.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour)
        points = base.mark_point(filled=True, size=55, opacity=1).encode(x=x, y=y, color=colour)
        theory = alt.Chart(ideal).mark_line(color=THEORY, strokeDash=[5, 3]).encode(x=x, y=y)
        layers = [theory, line, bars, points] if of_baseline else [line, bars, points]
        parts.append(alt.layer(*layers).properties(width=300, height=200))
    chart = alt.hconcat(*parts, spacing=30)
    chart.config = alt.Config(
        font="Arial, Helvetica, 'Liberation Sans', sans-serif",
        background="white",
        legend=alt.LegendConfig(labelFontSize=12, orient="top", columns=4, labelLimit=370, labelColor=INK),
        view=alt.ViewConfig(stroke=None),
    )
    return chart


def _html(page: Page) -> str:
    import jinja2

    templates = Path(__file__).parent / "templates"
    pages = jinja2.Environment(loader=jinja2.FileSystemLoader(templates), autoescape=True, trim_blocks=True)
    return pages.get_template("proposal.html.j2").render(page=page).replace(" %", "\u00a0%")


_PREAMBLE = r"""\documentclass[a4paper,10pt]{article}
\usepackage[T1]{fontenc}
\IfFileExists{lmodern.sty}{\usepackage{lmodern}}{}
\usepackage{textcomp,booktabs,array,graphicx}
\usepackage[margin=20mm]{geometry}
\setlength{\parindent}{0pt}\setlength{\parskip}{2pt}
\setlength{\intextsep}{4pt}\setlength{\textfloatsep}{4pt}\setlength{\floatsep}{4pt}\setlength{\abovecaptionskip}{2pt}
\renewcommand{\topfraction}{1}\renewcommand{\textfraction}{0}\setcounter{topnumber}{9}\setcounter{totalnumber}{9}
\pagestyle{plain}
\begin{document}
"""


def _latex(page: Page) -> str:
    """A document that compiles by itself, beside its figures."""
    parts = [_PREAMBLE, rf"\section*{{{latex.escape(page.title)}}}", latex.escape(page.work)]
    parts += ["", *(f"{latex.escape(line)}\\par" for line in page.lead), ""]
    for table in page.tables:
        named_columns = [n for n, name in enumerate(table.head) if name in ("Configuration", "Scaling")]
        shape = ["l" if n in named_columns else "r" for n in range(len(table.head))]
        rows = latex.Rows(shape, table.head, table.rows)
        parts.append(latex.floats([(table.caption, [rows])], name=table.name).removeprefix(latex.HEAD))
        if table.figure:
            parts += [
                r"\begin{figure}[htbp]\centering",
                rf"\includegraphics[width=\linewidth,height=46mm,keepaspectratio]{{{table.name}.pdf}}",
                rf"\caption{{{latex.escape(table.figure_caption)}}}\label{{fig:{table.name}}}",
                r"\end{figure}",
                "",
            ]
    parts += [r"\subsection*{How it was measured}"]
    parts += [
        rf"\textbf{{{latex.escape(name)}:}} {latex.escape(words.replace('`', ''))}.\par" for name, words in page.method
    ]
    parts += [r"\subsection*{What these runs do not say}"]
    parts += [rf"{latex.escape(line)}\par" for line in page.unknown]
    return "\n".join([*parts, r"\end{document}", ""]).replace(r" \%", r"~\%")
