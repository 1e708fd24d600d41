"""The page for an allocation: what a computing centre asks of a training, on two pages, as HTML and as LaTeX.

Strong and weak scaling with intervals, wall time and device-hours, memory, and how all of it was measured. What these
runs did not measure is named, and not estimated.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import polars as pl

from analysis import text
from analysis.comparison.baseline import limited, refused
from analysis.comparison.configurations import displayed, facts, summary
from analysis.comparison.exclusions import require_finished
from analysis.comparison.ratio import ERROR, FEWEST_REPEATS, Spread, ratio_median
from analysis.comparison.work import IS_PROGRAM, groups_across
from analysis.figures import svg
from analysis.figures.chart import named
from analysis.report import latex
from parallelbench.errors import ConfigError, count_of
from parallelbench.measure.environment_match import flatten
from parallelbench.redaction import redacted
from parallelbench.results.files import storage_errors
from parallelbench.world.allowance import require_figures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import altair as alt

    from analysis.runs.reader import Runs


MOST_ROWS = 12
"""Configurations of a table: more would take a third page."""
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
    tables, told, lead = [], [], []
    kinds: Counter[str] = Counter()
    for (scaling, _), of_group in _few(rows).group_by("scaling", "group", maintain_order=True):
        kinds[str(scaling)] += 1
        number = f"-{kinds[str(scaling)]}" if kinds[str(scaling)] > 1 else ""
        of_group = of_group.sort("devices", "nodes", "configuration")
        tables.append(_scaling_table(runs, of_group, members, f"{scaling}-scaling{number}", of_programs=of_programs))
        lead += _lead(str(scaling), of_group, members, asked)
        told.append((str(scaling), of_group))
    left = rows.height - sum(of_group.height for _, of_group in told)
    resources, missing = _resources_table(told, members, asked)
    return Page(
        title=f"Scaling and resources: {' + '.join(sorted(set(runs.run['sweep'])))}",
        work=_heading(runs),
        lead=tuple(lead),
        tables=(*tables, resources),
        method=tuple(_method(runs, rows, of_programs=of_programs, left=left)),
        unknown=tuple(_unknown(runs, missing, of_programs=of_programs)),
    )


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


def _few(rows: pl.DataFrame) -> pl.DataFrame:
    """Of each group at most `MOST_ROWS`: of the variants that are fastest on the most devices."""
    kept = []
    for _, of_group in rows.group_by("group", maintain_order=True):
        if of_group.height > MOST_ROWS:
            last = of_group.sort("devices", "steady_epoch_time_s", descending=[True, False], nulls_last=True)
            room, chosen = MOST_ROWS, []
            ones = of_group.filter(pl.col("devices") == of_group["devices"].min()).head(1)
            for name in last["variant"].unique(maintain_order=True):
                size = of_group.filter(variant=name).height
                if size <= room - ones.height:
                    chosen.append(name)
                    room -= size
            of_group = pl.concat([ones, of_group.filter(pl.col("variant").is_in(chosen))]).unique(
                "configuration", maintain_order=True
            )
        kept.append(of_group)
    return pl.concat(kept)


Members = dict[Any, list[dict[str, Any]]]
"""Group and configuration → the rows of `facts` that its numbers rest on."""


def _values(members: Members, row: dict[str, Any], column: str) -> list[float | None]:
    return [run[column] for run in members[row["group"], row["configuration"]]]


def _scaling_table(runs: Runs, rows: pl.DataFrame, members: Members, name: str, *, of_programs: bool) -> Table:
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
            row["variant"], str(row["devices"]), str(row["nodes"]), str(row["repeats"] or row["runs"]),
            estimate.shown(text.number) if estimate else text.MISSING,
            text.number(row[rate]),
            speed_up, efficiency,
        ))  # fmt: skip
    scaling, batch = rows["scaling"][0], rows["group"][0]
    baselines = sorted({str(each) for each in _baselines(rows)})
    over = f"Speed-up is over {text.listed(baselines)}" if baselines else "No speed-up: nothing to compare with"
    sizes = displayed(runs).filter(group=batch)["batch_size"].unique().sort().to_list()
    of_batch = "" if of_programs else f" ({', '.join(map(str, sizes))} samples)"
    caption = (
        f"{scaling.capitalize()} scaling: {_SCALINGS[scaling]}{of_batch}. Medians over repeats with 95 % intervals. "
        f"{over}; efficiency is speed-up ÷ devices."
    )
    drawn = _drawn(rows)
    figure = svg(_specification(_chart(drawn, runs))) if drawn["devices"].n_unique() > 1 else ""
    return Table(
        name,
        caption,
        *_without_empty(head, shown),
        figure=figure,
        figure_caption=f"{scaling.capitalize()} scaling, with 95 % intervals; grey: ideal." if figure else "",
    )


def _baselines(rows: pl.DataFrame) -> Iterable[str]:
    """What the speed-ups of these rows are over."""
    if "baseline" in rows.columns:
        return rows.filter(pl.col("speed_up").is_not_null())["baseline"].drop_nulls()
    return ["one device"] if rows["speed_up"].count() else []


def _gain(row: dict[str, Any]) -> tuple[str, str]:
    """Speed-up and efficiency with their intervals; dashes where there are none."""
    if row["speed_up"] is None:
        return text.MISSING, text.MISSING
    low, high, share = row["speed_up_low"], row["speed_up_high"], row["efficiency"]
    whole = text.interval(row["speed_up"], low, high)
    if share is None:
        return whole, text.MISSING
    ends = "" if low is None else f" ({100 * _share(row, low):.1f}–{100 * _share(row, high):.1f})"
    return whole, f"{100 * share:.1f}{ends} %"


def _share(row: dict[str, Any], speed_up: float) -> float:
    """The efficiency of this speed-up, beside that of the median."""
    return float(row["efficiency"] * speed_up / row["speed_up"])


def _lead(scaling: str, rows: pl.DataFrame, members: Members, asked: Work) -> list[str]:
    """The fastest configuration on the most devices: its speed-up, and what the training takes there."""
    most = rows.filter(pl.col("devices") == rows["devices"].max())
    row = most.sort("steady_step_time_s", nulls_last=True).row(0, named=True)
    wall, hours = _costs(members, row, asked)
    name = f"{row['variant']} on {count_of(row['devices'], 'device')}"
    told = []
    if row["speed_up"] is not None and rows["devices"].n_unique() > 1:
        speed_up, efficiency = _gain(row)
        told.append(
            f"{speed_up} times as fast as {text.listed(sorted(set(_baselines(rows))))}, efficiency {efficiency}"
        )
    if wall and hours:
        told.append(f"{asked} take {wall.shown(text.number)} h, {hours.shown(text.number)} device-hours")
    return [f"{scaling.capitalize()} scaling: {name}: {'; '.join(told)}."] if told else []


def _costs(members: Members, row: dict[str, Any], asked: Work) -> tuple[Estimate | None, Estimate | None]:
    """Wall time and device-hours of the training, in hours: start-up, the first epoch, and the others at the steady
    rate.
    """
    hours = [_hours(run, asked) for run in members[row["group"], row["configuration"]]]
    return Estimate.of(hours), Estimate.of([None if each is None else each * row["devices"] for each in hours])


def _hours(run: dict[str, Any], asked: Work) -> float | None:
    start_s = run["startup_without_parity_s"] or 0.0
    if asked.unit == "step":
        step_s = run["steady_step_time_s"]
        return None if step_s is None else (start_s + asked.amount * step_s) / 3600
    first_s, steady_s = run["first_epoch_time_s"], run["steady_epoch_time_s"]
    if first_s is None or (steady_s is None and asked.amount > 1):
        return None
    # The first step is in the start-up and in the first epoch.
    again_s = run["startup_first_step_s"] or 0.0
    return float(start_s - again_s + first_s + (asked.amount - 1) * (steady_s or 0.0)) / 3600


def _resources_table(
    groups: Sequence[tuple[str, pl.DataFrame]], members: Members, asked: Work
) -> tuple[Table, list[str]]:
    """Wall time, device-hours, memory, MFU and energy; and the names of what nothing is known of."""
    on_gpus = any("device" in rows["memory_kind"].to_list() for _, rows in groups)
    memory = "Memory per device (GiB)" if on_gpus else "Memory per process (GiB)"
    head = ("Scaling", "Configuration", "Devices", f"Wall time, {asked} (h)", f"Device-hours, {asked}", memory, "MFU",
            "GPU energy (J per sample)")  # fmt: skip
    shown = []
    for scaling, rows in groups:
        for row in rows.to_dicts():
            wall, hours = _costs(members, row, asked)
            peak = row["peak_memory_device_bytes" if on_gpus else "peak_memory_max_bytes"]
            short = "short" in (row["energy_flags"] or "").split()
            shown.append((
                scaling, row["variant"], str(row["devices"]),
                wall.shown(text.number) if wall else text.MISSING,
                hours.shown(text.number) if hours else text.MISSING,
                text.MISSING if peak is None else text.number(peak / _GIB),
                text.percent(row["mfu"]),
                text.MISSING if short else text.number(row["gpu_energy_per_sample_j"]),
            ))  # fmt: skip
    if len(groups) == 1:
        head, shown = head[1:], [row[1:] for row in shown]
    kept, rows_kept = _without_empty(head, shown)
    missing = [name.partition(" (")[0].partition(",")[0] for name in head if name not in kept]
    extrapolated = {run["epochs_finished"] for of in members.values() for run in of}
    beyond = asked.unit == "epoch" and asked.amount > max(extrapolated)
    measured = f", extrapolated from {count_of(max(extrapolated), 'epoch')} that were measured" if beyond else ""
    what = (
        "start-up, the first epoch and the others at the steady rate"
        if asked.unit == "epoch"
        else "start-up and steps at the steady rate"
    )
    caption = (
        f"Resources of a training of {asked}: {what}{measured}; without queueing, evaluation and checkpoints. Medians "
        "over repeats with 95 % intervals; memory is the peak of the fullest one."
    )
    return Table("resources", caption, kept, rows_kept), missing


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
    repeats = counted.group_by("group", "configuration").len()["len"]
    fewest, most = int(repeats.min() or 0), int(repeats.max() or 0)  # type: ignore[call-overload]
    spread = str(fewest) if fewest == most else f"{fewest} to {most}"
    gone = Counter(known["exclusion"].drop_nulls())
    why = ", ".join(f"{count} {reason}" for reason, count in sorted(gone.items()))
    yield (
        "Repeats",
        f"{spread} of each configuration, in rounds of one run of each"
        + (f"; {count_of(sum(gone.values()), 'run')} not counted ({why})" if gone else ""),
    )
    yield (
        "Times",
        (
            "windows of optimizer steps of the slowest rank, without the warm-up"
            if of_programs
            else "training windows of the slowest rank, median over the epochs without the first one; evaluation is "
            "outside of them"
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
    limits = [*refused(runs, brief=True), *limited(runs, brief=True)][:3]
    if limits:
        yield "Limits", " ".join(limits)
    if left:
        yield "Left out", f"{count_of(left, 'configuration')}, for room: `parallelbench report` has all"
    yield "Tool", "parallelbench: the tables of each run lie in its folder, with checksums"


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
    found |= {f"program {each['sources']}": None for each in strategies if each.get("sources")}
    for each in _environments(rows):
        plugin = each.get("plugin") or {}
        if plugin.get("sources"):
            found[f"plugin {plugin['sources']}"] = None
        git = each.get("git") or {}
        if git.get("commit"):
            changed = " and uncommitted changes" if git.get("dirty") else ""
            found[f"parallelbench {git['commit'][:12]}{changed}"] = None
    return list(found) or ["no commit was recorded"]


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
    parameters = displayed(runs)["parameters"].drop_nulls().unique().to_list()
    size = (
        f"; its weights alone, {parameters[0]:,} parameters, are {text.number(parameters[0] * _MIB_OF_FP32)} MiB in fp32"
        if len(parameters) == 1
        else ""
    )
    yield f"Time and size of a checkpoint: not recorded{size}."
    if missing:
        yield f"Not measured, or not known: {text.listed(missing, most=8)}."
    if of_programs and displayed(runs)["global_batch_size"].null_count():
        yield "Samples per step: not known, so efficiencies hold only if each step does the same work on any devices."


def _drawn(rows: pl.DataFrame) -> pl.DataFrame:
    """What the figure shows: of each configuration speed-up and efficiency."""
    drawn = rows.filter(pl.col("speed_up").is_not_null()).select(
        "group", "configuration", "variant", "strategy", "devices", "nodes",
        "speed_up", "speed_up_low", "speed_up_high", "efficiency",
    )  # fmt: skip
    share = 100 * pl.col("efficiency")
    return drawn.with_columns(
        efficiency=share,
        efficiency_low=share * pl.col("speed_up_low") / pl.col("speed_up"),
        efficiency_high=share * pl.col("speed_up_high") / pl.col("speed_up"),
    ).sort("variant", "devices")


def _chart(data: pl.DataFrame, runs: Runs) -> alt.HConcatChart:
    """Speed-up and efficiency over devices, beside each other."""
    import altair as alt

    from analysis.figures.chart import INK, LEGEND, THEORY, scale, variants

    devices = sorted({1, *data["devices"]})
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
        {"devices": devices, "speed_up": list(map(float, devices)), "efficiency": [100.0] * len(devices)}
    )
    parts = []
    logarithmic = alt.Scale(type="log", base=2, nice=False, padding=12)
    for name, title, at in (
        ("speed_up", "speed-up (×)", logarithmic),
        ("efficiency", "efficiency (%)", alt.Scale(zero=True, nice=True)),
    ):
        ticks: dict[str, Any] = {"values": devices, "format": ",d"} if name == "speed_up" else {}
        y = alt.Y(f"{name}:Q", title=title, scale=at, axis=alt.Axis(gridColor="#e6e6e6", **axis, **ticks))
        base = alt.Chart(data)
        known = base.transform_filter(f"isValid(datum.{name}_low)")
        bars = known.mark_rule(strokeWidth=1.6).encode(
            x=x, y=alt.Y(f"{name}_low:Q", title=title, scale=at), y2=f"{name}_high:Q", color=colour
        )
        line = base.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour)
        points = base.mark_point(filled=True, size=55, opacity=1).encode(x=x, y=y, color=colour)
        theory = alt.Chart(ideal).mark_line(color=THEORY, strokeDash=[5, 3]).encode(x=x, y=y)
        parts.append((theory + line + bars + points).properties(width=300, height=200))
    chart = alt.hconcat(*parts, spacing=30)
    chart.config = alt.Config(
        font="Arial, Helvetica, 'Liberation Sans', sans-serif",
        background="white",
        legend=alt.LegendConfig(labelFontSize=12, orient="top", columns=4, labelLimit=370, labelColor=INK),
        view=alt.ViewConfig(stroke=None),
    )
    return chart


def _specification(chart: alt.HConcatChart) -> dict[str, Any]:
    spec: dict[str, Any] = chart.to_dict(validate=False)
    return spec


def _html(page: Page) -> str:
    import jinja2

    templates = Path(__file__).parent / "templates"
    pages = jinja2.Environment(loader=jinja2.FileSystemLoader(templates), autoescape=True, trim_blocks=True)
    return pages.get_template("proposal.html.j2").render(page=page)


_PREAMBLE = r"""\documentclass[a4paper,10pt]{article}
\usepackage[T1]{fontenc}
\usepackage{textcomp,booktabs,array,graphicx}
\usepackage[margin=20mm]{geometry}
\setlength{\parindent}{0pt}\setlength{\parskip}{3pt}
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
                rf"\includegraphics[width=\linewidth]{{{table.name}.pdf}}",
                rf"\caption{{{latex.escape(table.figure_caption)}}}\label{{fig:{table.name}}}",
                r"\end{figure}",
                "",
            ]
    parts += [r"\subsection*{How it was measured}"]
    parts += [
        rf"\textbf{{{latex.escape(name)}:}} {latex.escape(words.replace('`', ''))}.\par" for name, words in page.method
    ]
    parts += [rf"{latex.escape(line)}\par" for line in page.unknown]
    return "\n".join([*parts, r"\end{document}", ""])
