"""The fit of the formulas to all published steps, and how wrong it is where it lacks what it predicts.

`python -m tests.advisor.refit` fits anew, writes the shipped file, and prints the table of docs/advisor-errors.md.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from hashlib import sha256

import msgspec
import numpy as np
from numpy.typing import NDArray

from analysis.advisor.check import Judged, judged
from analysis.advisor.fit import PLACE, SHEET, UNTRIED, PublishedFit, half_width, kernel_keys, most_probable
from analysis.advisor.layouts import Layouts
from analysis.advisor.machine import COLUMNS, Machines, made_of
from analysis.advisor.step import Fitted, Values, step_phases
from analysis.advisor.step_tables import VTRAIN_VOCABULARY, Evidence, read_measured, shipped_files
from analysis.advisor.transformer import work_of
from launch.sweep.compose import NOTHING
from launch.verbs.advice_errors import measured_steps

Rows = NDArray[np.bool_]

HASHED = (
    *("hidden", "layers", "heads", "vocabulary", "sequence", "global_batch", "micro_batch", "tensor"),
    *("pipeline", "data", "recompute", "sharded", "fused_attention", "fp8", "kv_heads", "mlp_width"),
    *("gated", "tied", "learned", "context", "copies", "owners", "sequence_parallel", "chunks"),
    *("selective", "experts", "top_k", "capacity", "expert"),
)
"""Columns by whose hash a layout is in one fifth or another, in this order."""
LARGEST_FITTED = {"vtrain": 64, "llm_foundry": 8}
"""Where larger jobs are left out, these are the largest that stay."""
NOISE_OF_FORMULAS = 0.05
"""Standard deviation of log time that is taken for granted: what a measurement and these formulas are good for."""
KERNEL_SIZE = 0.08
"""Standard deviation of what kernels leave of log time, before they are seen."""
INTERVAL_KINDS = 8
FOLDS = 5


def fit(layouts: Layouts, machines: Machines, measured_s: Values) -> Fitted:
    """The parameters that are most probable: measurements and priors weigh by their variances.

    Errors count by a soft absolute value beyond `NOISE_OF_FORMULAS`, so that a few disturbed runs don't bend
    everything.
    """
    work, log_measured, weights = work_of(layouts, machines), np.log(measured_s), np.sqrt(_weights(layouts))

    def errors(columns: Mapping[str, Values]) -> Values:
        said = step_phases(work, layouts, machines, columns).step_s
        result: Values = weights * _softened((np.log(said) - log_measured) / NOISE_OF_FORMULAS)
        return result

    return most_probable(SHEET, errors)


def _weights(layouts: Layouts) -> Values:
    """How much each row counts.

    Rows of equal kernels (width, sequence, micro-batch, tensor group) err alike, whatever else differs: measured errors
    differ by 1 % within such rows and by 8 % between them. So n of them count as one.
    """
    keys = kernel_keys(layouts)
    counts = Counter(keys)
    return np.array([1.0 / counts[key] for key in keys])


def kernel_errors(layouts: Layouts, log_errors: Values) -> dict[str, float]:
    """Kernels → log of measured ÷ predicted that their rows have in common, shrunk towards 0 (ridge regression)."""
    keys = np.array(kernel_keys(layouts))
    noise = (NOISE_OF_FORMULAS / KERNEL_SIZE) ** 2
    return {str(key): float(log_errors[keys == key].sum() / ((keys == key).sum() + noise)) for key in np.unique(keys)}


def _softened(off: Values) -> Values:
    """Errors whose squares grow like 2·|error| once beyond 1."""
    result: Values = np.sign(off) * np.sqrt(2.0 * (np.sqrt(1.0 + off**2) - 1.0))
    return result


def fitted_to(evidence: Evidence) -> PublishedFit:
    """Fit all rows; intervals are as wide as the errors on each width of model, and on each fifth, left out."""
    parts: dict[str, PublishedFit] = {}
    widths = {f"{width:g}": evidence.layouts.hidden == width for width in np.unique(evidence.layouts.hidden)}
    folds = {f"fold {fold}": np.arange(len(evidence)) % FOLDS == fold for fold in range(FOLDS)}
    kinds, errors = [], []
    for name, left_out in (widths | folds).items():
        parts[name] = formulas(evidence.take(~left_out))
        asked = evidence.take(left_out)
        found = parts[name].interval_kinds(asked.layouts, asked.machines.devices_per_node)
        # Of a fifth only the rows whose kernels the others have: the rest is like a width left out.
        counted = np.full(len(asked), name in widths) | (found % 2 == 1)
        kinds.append(found[counted])
        errors.append(log_errors(parts[name], asked)[counted])
    return msgspec.structs.replace(
        formulas(evidence),
        without_width={name: parts[name].parameters for name in widths},
        half_widths=half_widths_of(np.concatenate(kinds), np.concatenate(errors)),
    )


def log_errors(fit: PublishedFit, asked: Evidence) -> Values:
    """Log of measured ÷ predicted."""
    result: Values = np.log(asked.time_s / fit.phases(asked.layouts, asked.machines).step_s)
    return result


def half_widths_of(kinds: NDArray[np.int64], errors: Values) -> list[float]:
    """Half of each kind's interval; of too few errors that of unmeasured kernels, or of jobs on other nodes.

    Where no row's attention is of its kind, it is untried.
    """
    found = [half_width(errors[kinds == kind]) for kind in range(INTERVAL_KINDS)]
    untried = UNTRIED * max(width for width in found if width is not None)
    nearest = [(found[kind], found[kind & 6], found[kind & 6 ^ 2], untried) for kind in range(INTERVAL_KINDS)]
    return [next(width for width in each if width is not None) for each in nearest]


def formulas(evidence: Evidence) -> PublishedFit:
    """Parameters and kernels' errors; there are no intervals."""
    parameters = fit(evidence.layouts, evidence.machines, evidence.time_s)
    made = PublishedFit(
        parameters=parameters,
        kernels={},
        without_width={},
        half_widths=[],
        rows=len(evidence),
        accelerators=sorted(set(evidence.accelerators)),
        most_devices=float(evidence.layouts.devices.max()),
    )
    return msgspec.structs.replace(made, kernels=kernel_errors(evidence.layouts, log_errors(made, evidence)))


@dataclass(frozen=True)
class Published:
    """All published steps, and which file each is from."""

    evidence: Evidence
    files: NDArray[np.int64]
    """Index of each step's file."""
    names: list[str]
    """Of the files."""
    sources: NDArray[np.int64]
    """Index of each step's publication."""
    largest: NDArray[np.int64]
    """Most devices that stay where larger jobs of the publication are left out."""


def published() -> Published:
    parts: list[Evidence] = []
    files: list[int] = []
    sources: list[int] = []
    largest: list[int] = []
    names: list[str] = []
    for index, (source, most) in enumerate(LARGEST_FITTED.items()):
        for file in shipped_files(source):  # type: ignore[arg-type]
            part = measured_steps(read_measured(file), [], NOTHING)
            parts.append(part)
            files += [len(names)] * len(part)
            sources += [index] * len(part)
            largest += [most] * len(part)
            names.append(file.stem)
    return Published(united(parts), np.array(files), names, np.array(sources), np.array(largest))


def united(parts: list[Evidence]) -> Evidence:
    machines = made_of({name: np.concatenate([getattr(part.machines, name) for part in parts]) for name in COLUMNS})
    layouts = {
        each.name: np.concatenate([getattr(part.layouts, each.name) for part in parts]) for each in fields(Layouts)
    }
    return Evidence(
        layouts=Layouts(**layouts),
        machines=machines,
        accelerators=[name for part in parts for name in part.accelerators],
        models=[name for part in parts for name in part.models],
        time_s=np.concatenate([part.time_s for part in parts]),
    )


def refitted() -> PublishedFit:
    return fitted_to(published().evidence)


def predicted(data: Published, asked: Rows, *, known: Rows, shipped: PublishedFit) -> Judged:
    """Judged by a fit; the baselines know of the same publication, where anything of it is known."""
    parts, places = [], list[int]()
    for source in np.unique(data.sources[asked]):
        rows, near = asked & (data.sources == source), known & (data.sources == source)
        seen = data.evidence.take(near if near.any() else known)
        parts.append(judged(data.evidence.take(rows), known=seen, fit=shipped))
        places += np.flatnonzero(rows).tolist()
    return only(together(parts), np.argsort(places))


def without_their_width(data: Published, shipped: PublishedFit) -> Judged:
    """Each width of model predicted without it; its intervals are the errors of the other widths."""
    whole, every = data.evidence, np.ones(len(data.evidence), dtype=bool)
    found = predicted(data, every, known=every, shipped=shipped)
    off, widths = np.log(found.measured_s / found.predicted_s), whole.layouts.hidden
    unmeasured = msgspec.structs.replace(shipped, kernels={})
    kinds = unmeasured.interval_kinds(whole.layouts, whole.machines.devices_per_node)
    intervals = np.zeros(len(off))
    for width in np.unique(widths):
        rest = widths != width
        intervals[~rest] = np.array(half_widths_of(kinds[rest], off[rest]))[kinds[~rest]]
    return replace(found, widths=intervals)


def without(data: Published, left_out: Rows) -> Judged:
    """Rows predicted by all that advises, fitted to the other rows."""
    return predicted(data, left_out, known=~left_out, shipped=fitted_to(data.evidence.take(~left_out)))


def without_their_fifth(data: Published, _: PublishedFit) -> Judged:
    """Each fifth, by a hash of its layouts, predicted by the others: what rows like the published ones get."""
    layouts = data.evidence.layouts
    # The split was fixed when all of vTrain's rows were read like this.
    vtrain = data.sources == list(LARGEST_FITTED).index("vtrain")
    then = {"vocabulary": VTRAIN_VOCABULARY, "recompute": 1.0}
    as_then = replace(layouts, **{name: np.where(vtrain, v, getattr(layouts, name)) for name, v in then.items()})
    columns = (getattr(as_then, name).tolist() for name in HASHED)
    keys = [sha256(repr(key).encode()).hexdigest() for key in zip(*columns, strict=True)]
    fifths = np.array([int(key[:8], 16) % 5 for key in keys])
    parts, places = [], list[int]()
    for fifth in range(5):
        left_out = fifths == fifth
        parts.append(without(data, left_out))
        places += np.flatnonzero(left_out).tolist()
    return only(together(parts), np.argsort(places))


def together(parts: list[Judged]) -> Judged:
    first = parts[0]
    return Judged(
        measured_s=np.concatenate([part.measured_s for part in parts]),
        predicted_s=np.concatenate([part.predicted_s for part in parts]),
        widths=np.concatenate([part.widths for part in parts]),
        kinds={name: [value for part in parts for value in part.kinds[name]] for name in first.kinds},
        works=[work for part in parts for work in part.works],
        baselines={name: np.concatenate([part.baselines[name] for part in parts]) for name in first.baselines},
        rows=[row for part in parts for row in part.rows],
    )


def errors(data: Published, shipped: PublishedFit) -> Iterator[tuple[str, str, Judged]]:
    """What was left out, which rows are judged, and how; the splits were fixed before anything was fitted."""
    for lacked, split in (("their fifth", without_their_fifth), ("their width of model", without_their_width)):
        found = split(data, shipped)
        for index, name in enumerate(data.names):
            yield lacked, name, only(found, np.flatnonzero(data.files == index))
    larger = data.evidence.layouts.devices > data.largest
    beyond = without(data, larger)
    for index, name in enumerate(data.names):
        rows = np.flatnonzero(data.files[larger] == index)
        if len(rows):
            yield "all larger jobs", name, only(beyond, rows)
    for source in range(len(LARGEST_FITTED)):
        left_out = data.sources == source
        other = without(data, left_out)
        for index in np.unique(data.files[left_out]).tolist():
            yield "their publication", data.names[index], only(other, np.flatnonzero(data.files[left_out] == index))


def only(found: Judged, rows: NDArray[np.int64]) -> Judged:
    kept = rows.tolist()
    return Judged(
        measured_s=found.measured_s[rows],
        predicted_s=found.predicted_s[rows],
        widths=found.widths[rows],
        kinds={name: [values[place] for place in kept] for name, values in found.kinds.items()},
        works=[found.works[place] for place in kept],
        baselines={name: values[rows] for name, values in found.baselines.items()},
        rows=[found.rows[place] for place in kept],
    )


def table(data: Published, shipped: PublishedFit) -> Iterator[str]:
    """Lines of Markdown."""
    heads = ("the fit lacked", "rows judged", "rows", "mean", "median", "p90", "max", "in the 90 % interval")
    yield f"| {' | '.join((*heads, 'regret, median', 'max', 'perfect', 'Amdahl', 'neighbour'))} |"
    yield f"{(len(heads) + 5) * '|---'}|"
    for lacked, name, found in errors(data, shipped):
        summary = found.summary()
        names = ("mean_error", "median_error", "p90_error", "max_error", "coverage", "median_regret", "max_regret")
        shares = [summary[name] for name in names]
        shares += [each["mean_error"] for each in summary["baselines"].values()]
        cells = ["–" if share is None else f"{100 * share:.1f} %" for share in shares]
        yield f"| {lacked} | {name} | {summary['rows']} | {' | '.join(cells)} |"


if __name__ == "__main__":
    steps = published()
    anew = fitted_to(steps.evidence)
    PLACE.write_bytes(msgspec.json.format(msgspec.json.encode(anew)) + b"\n")
    print(f"{datetime.date.today().isoformat()}: {anew.rows} rows")
    for line in table(steps, anew):
        print(line)
