"""Fits the few numbers of the step models to measured steps, on log time, from their priors; and prediction intervals.

The suite's own steps are fitted to finished sweeps: measured phases of runs whose ranks all do the same beside their
steps, with less weight. Transformers are fitted to the published steps that come with the suite, kept in a file:
`python -m tests.advisor.refit` fits anew and writes it, so that predictions need no fitting and no torch.

Intervals are by split conformal prediction (Vovk et al. 2005; Lei et al. 2018, JASA 113): as wide as the errors on rows
that a fit had not seen. With n errors the quantile is the ⌈(n+1)·share⌉-th smallest, which covers at least the share
where new rows are like these. They are not where devices are extrapolated: such rows get the errors of fits that had
not seen the larger device counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from analysis.advisor.step import Fitted, step_phases
from analysis.advisor.strategies import SuiteJob, suite_phases
from analysis.advisor.transformer import work_of
from analysis.cache import kept, name_of
from parallelbench.config.build import to_mapping
from parallelbench.config.identity import OF_SWEEP, PLACES, canonical_json
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from analysis.advisor.layouts import Layouts, Values
    from analysis.advisor.machine import MachineFigures, Machines
    from analysis.advisor.step import Phases
    from analysis.advisor.sweep_evidence import MeasuredStep
    from parallelbench.config.run import RunConfig


class Prior(NamedTuple):
    """What is assumed of a parameter where nothing was measured; it is fitted on its logarithm."""

    value: float
    spread: float
    """Standard deviation of the natural logarithm; about the relative uncertainty."""
    least: float = 0.0
    """Bounds: a share of a data sheet stays below 1."""
    most: float = math.inf


PARAMETERS: Mapping[str, tuple[Prior | None, Prior | None]] = {
    # time of matrix products ÷ what they take at the machine's rate for their size
    "product_scale": (Prior(1 / 0.87, 0.15, least=1.0), Prior(1.0, 0.3)),
    # time of all other operations ÷ what they take by the calibration's shapes
    "kernel_scale": (None, Prior(1.0, 0.3)),
    # time of attention's own products ÷ what they take at the rate for their size
    "attention_scale": (Prior(2.5, 0.4, least=1 / 0.8), None),
    # the same for logits of a vocabulary that is no multiple of 8
    "odd_scale": (Prior(2.5, 0.4, least=1 / 0.9), None),
    # speed of products in 8 bits ÷ in 16, without the casts; 2 by data sheets. With the casts' traffic 1.65 gives 0.82
    # and 1.40 for a small and a large layer on an H100; torchao measured 0.80 and 1.39 (torchao/float8/README.md)
    "fp8_speed": (Prior(1.65, 0.2), None),
    # time of elementwise work ÷ what its bytes take
    "traffic_scale": (Prior(1 / 0.7, 0.3, least=1 / 0.95), None),
    # time of torch's own kernels ÷ of Megatron-LM's, which fuse what torch does not
    "eager_slower": (Prior(1.1, 0.15), None),
    # traffic of the loss per logit, forward and backward
    "loss_bytes": (Prior(40.0, 0.4), None),
    # host time of an operation ÷ the machine's; hidden behind a GPU's kernels
    "launch_scale": (Prior(1.0, 1.0), Prior(1.0, 0.5)),
    # γ of the host's launches and the device's work
    "launch_overlap": (Prior(2.0, 0.3), None),
    # host time of a layer's pass for its shards and collectives in a tensor group; DTensor adds 0.14 ms to the forward
    # pass of a linear layer, and 0.3 ms to its backward pass, in one process that sends nothing (torch 2.11)
    "tensor_launch_s": (Prior(1e-4, 1.0), Prior(1.4e-4, 1.0)),
    # the same, where softmax takes several kernels instead of one
    "softmax_launch_s": (Prior(0.0002, 0.7), None),
    # compute time of a device alone in its node ÷ of one among busy ones
    "alone": (None, Prior(0.9, 0.2, most=1.0)),
    # time of the optimizer's update ÷ what its bytes take
    "update_scale": (Prior(2.0, 0.5, least=1 / 0.95), Prior(1.0, 0.5)),
    # time of collectives in a node ÷ what β says; of measured links what α and β say. NCCL counts with 235 of an
    # A100's 300 GB/s (src/graph/tuning.cc)
    "link_scale": (Prior(300 / 235, 0.1, least=1 / 0.95), Prior(1.0, 0.4)),
    # the same between nodes
    "network_scale": (Prior(1 / 0.7, 0.3, least=1 / 0.95), None),
    # host time of one collective or message
    "message_s": (None, Prior(5e-05, 1.0)),
    # bytes moved per reduced gradient ÷ its own; 2 where halves are sent as singles
    "gradient_scale": (Prior(1.4, 0.35), None),
    # γ of backward and all-reduced buckets; 1: none hidden, 10: nearly all
    "overlap": (None, Prior(2.0, 0.4)),
    # γ of compute and FSDP's collectives; no published step shows that any is hidden
    "sharded_overlap": (None, Prior(1.2, 0.4)),
    # copies of the gathered parameters' bytes that FSDP makes per gathering
    "shard_copies": (None, Prior(4.0, 0.7)),
    # host time of gathering or scattering a layer, where no calibration has what sharding costs: FSDP takes 0.16 ms of
    # one process that sends nothing, and took 2 ms of each of two by a calibration
    "shard_launch_s": (None, Prior(5e-4, 1.2)),
    # time of what FSDP adds to a layer besides messages ÷ the calibrated one
    "sharding_scale": (None, Prior(1.0, 0.3)),
    # a stage's fixed time to hand over a micro-batch, each way
    "handover_s": (None, Prior(0.0002, 1.0)),
    # copies of the parameters' bytes that a server makes per worker's step
    "server_copies": (None, Prior(4.0, 0.7)),
    # fixed time of each step
    "step_s": (Prior(0.005, 1.0), Prior(0.0002, 1.0)),
}
"""Of the step model, positive; what a parameter is stands above it, a number where its name has no unit. Its priors:
where speeds are those of data sheets, as of published steps; and where they were calibrated or probed, as of finished
sweeps. None: not fitted there, and changes nothing, or is what the node's links have (`step.completed`).
"""
SHEET = {name: sheet for name, (sheet, _) in PARAMETERS.items() if sheet is not None}
MEASURED = {name: measured for name, (_, measured) in PARAMETERS.items() if measured is not None}


def values_of(priors: Mapping[str, Prior]) -> Fitted:
    """What is assumed before anything is measured."""
    return {name: prior.value for name, prior in priors.items()}


def most_probable(priors: Mapping[str, Prior], errors: Callable[[Mapping[str, Values]], Values]) -> Fitted:
    """The parameters at which errors and priors together are least squares, each in units of its standard deviation.

    `errors` takes columns [parameters, 1] and returns one row of errors for each.
    """
    from scipy.optimize import least_squares

    spreads = np.array([each.spread for each in priors.values()])
    middle = np.log([each.value for each in priors.values()])
    with np.errstate(divide="ignore"):
        bounds = [np.log([getattr(each, end) for each in priors.values()]) for end in ("least", "most")]
    ends = [(each - middle) / spreads for each in bounds]

    def at(units: Values) -> Values:
        logs = middle + np.atleast_2d(units) * spreads
        columns = {name: np.exp(logs[:, [place]]) for place, name in enumerate(priors)}
        return np.concatenate([errors(columns), np.atleast_2d(units)], axis=1)

    def derivatives(units: Values) -> Values:
        every = at(np.concatenate([units[None], units + _STEP * np.eye(len(units))]))
        result: Values = (every[1:] - every[0]).T / _STEP
        return result

    found: Any = least_squares(
        lambda units: at(units)[0], np.zeros(len(priors)), jac=derivatives, bounds=ends, ftol=1e-5, xtol=1e-5
    )
    return dict(zip(priors, np.exp(middle + found.x * spreads).tolist(), strict=True))


ASSUMED_FACTOR = 2.0
"""Where nothing was measured, 90 % of steps are assumed to be within this factor of the prediction."""


NEVER_OF_A_STEP = (
    *(*PLACES, *OF_SWEEP, "device"),  # where; evidence is of one machine by other rules
    *("seed", "repeat", "epochs", "lr_schedule", "metric"),
    *("batch_size", "scaling"),  # the global batch says it
)
"""Keys of a run that can't change how long one of its steps takes."""
NEVER_OF_A_STEP_MEASURED = ("parity", "parity_steps", "steps_per_epoch", "probe", "attribution_steps", "trace")
"""The same of `measure`: before the first step, after the last epoch, or how many there are."""


def of_a_step(run: RunConfig) -> dict[str, Any]:
    """What of a configuration may decide how long a step takes: all but what can't, so that no option is forgotten."""
    kept = {key: value for key, value in to_mapping(run).items() if key not in NEVER_OF_A_STEP}
    measure = {key: value for key, value in kept["measure"].items() if key not in NEVER_OF_A_STEP_MEASURED}
    return kept | {"measure": measure, "global_batch": run.global_batch_size}


def model_key(run: RunConfig) -> str:
    """Equal for models of equal options."""
    return canonical_json(msgspec.to_builtins(run.model))


def _settings(run: RunConfig) -> str:
    named = ("model", "data", "strategy", "optimizer", "precision", "devices", "nodes", "global_batch")
    return canonical_json({key: value for key, value in of_a_step(run).items() if key not in named})


RESPECTS: Mapping[str, Callable[[RunConfig], Any]] = {
    "strategy": lambda run: run.strategy.name,
    "model": lambda run: (model_key(run), run.data.shape),
    "optimizer": lambda run: run.optimizer.name,
    "precision": lambda run: run.precision,
    "devices": lambda run: run.devices,
    "nodes": lambda run: run.nodes,
    "batch": lambda run: run.global_batch_size / run.devices,
    "settings": _settings,
}
"""In what runs are like each other."""
EVERYTHING = ("everything",)
"""Where no run was measured, all is extrapolated."""


class SuiteFit(msgspec.Struct, frozen=True):
    """What a set of measured steps taught."""

    scales: Fitted
    strategies: dict[str, float] = {}
    """Strategy → log of measured ÷ predicted that its steps leave, shrunk towards 0; other strategies have 0."""
    models: dict[str, float] = {}
    """The same of models, by `model_key`: what their kernels have in common under every strategy."""

    def phases(self, job: SuiteJob) -> Phases[float]:
        """Predicted phases of a step."""
        off = self.strategies.get(job.run.strategy.name, 0.0) + self.models.get(model_key(job.run), 0.0)
        return suite_phases(job, self.scales).at(0).stretched(math.exp(off))


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """What finished runs taught about the suite's own steps."""

    fit: SuiteFit = field(default_factory=lambda: SuiteFit(values_of(MEASURED)))
    half_width: float = math.log(ASSUMED_FACTOR)
    """Half of the 90 % interval of log time, for what is like the measured runs."""
    far_half_widths: Mapping[str, float] = field(default_factory=dict)
    """The same for what extrapolates in a respect, by fits that lacked what they predicted; where too few steps could
    be left out, it is `ASSUMED_FACTOR`'s."""
    runs: Sequence[RunConfig] = ()
    """Measured configurations that it rests on; none: everything is assumed."""
    powers_w: tuple[float, float] | None = None
    """One device's power while it computes and while it waits for others, from the energy of measured runs."""

    @cached_property
    def _seen(self) -> dict[str, frozenset[Any]]:
        return {name: frozenset(map(of, self.runs)) for name, of in RESPECTS.items()}

    def outside(self, run: RunConfig) -> tuple[str, ...]:
        """In which of `RESPECTS` no measured run is like this one."""
        if not self.runs:
            return EVERYTHING
        own, seen = {name: of(run) for name, of in RESPECTS.items()}, self._seen
        found = {name: value not in seen[name] for name, value in own.items()}
        found |= {name: own[name] > max(seen[name]) for name in ("devices", "nodes")}
        found["batch"] = not min(seen["batch"]) <= own["batch"] <= max(seen["batch"])
        return tuple(name for name, extrapolates in found.items() if extrapolates)

    def half_width_of(self, outside: Sequence[str]) -> float:
        """Half of the interval of a run that extrapolates in these respects."""
        far = (self.far_half_widths.get(each, math.log(ASSUMED_FACTOR)) for each in outside)
        return max(self.half_width, *far) if outside else self.half_width


NOISE = 0.05
"""Standard deviation of log time of a measured step that is taken for granted."""
PHASE_NOISE = 0.2
"""The same of a phase: its measurement adds clocks to the step, and the formulas have means where ranks differ."""
STRATEGY_SIZE, MODEL_SIZE = 0.15, 0.3
"""Standard deviations of what strategies and models leave of log time, before it is seen."""
_STEP = 1e-4
"""Step of the numerical derivatives, of a parameter's logarithm."""
_COMPUTED, _UPDATED = ("forward_s", "backward_s"), ("optimizer_s",)


def predictable(steps: Sequence[MeasuredStep], figures: MachineFigures) -> tuple[list[MeasuredStep], list[str]]:
    """Those that a formula knows, and why the others are left out."""
    known, refused = [], []
    for step in steps:
        try:
            suite_phases(step.job(figures), values_of(MEASURED))
        except ConfigError as error:
            refused.append(f"{step.model} under {step.strategy}: {error}")
        else:
            known.append(step)
    return known, refused


def fitted(steps: Sequence[MeasuredStep], figures: MachineFigures) -> SuiteFit:
    """The fit of these steps; it is kept, so that no report fits to the same steps twice."""
    known = [(to_mapping(step.run), step.layers, step.step_s, step.phases) for step in steps]

    def make() -> str:
        return msgspec.json.encode(_fitted(steps, figures)).decode()

    return kept(name_of("fits", [known, figures]), make, msgspec.json.Decoder(SuiteFit).decode)


def _fitted(steps: Sequence[MeasuredStep], figures: MachineFigures) -> SuiteFit:
    """The most probable parameters, measurements and priors weighing by their variances, and what remains.

    Errors of steps are whitened, since those of a strategy and of a model are alike. What these have in common is
    shrunk towards 0 by how often it was seen (ridge regression).
    """
    jobs, measured_s = [step.job(figures) for step in steps], np.array([step.step_s for step in steps])
    strategies, models = (sorted({getattr(step, name) for step in steps}) for name in ("strategy", "model_key"))
    sizes = np.array([STRATEGY_SIZE] * len(strategies) + [MODEL_SIZE] * len(models))
    has = [
        [*(step.strategy == name for name in strategies), *(step.model_key == key for key in models)] for step in steps
    ]
    design = np.array(has) * sizes
    root = np.linalg.cholesky(design @ design.T + NOISE**2 * np.eye(len(steps)))

    def errors(columns: Mapping[str, Values]) -> Values:
        """Errors in units of their standard deviation, and those of phases."""
        every = [suite_phases(job, columns) for job in jobs]
        off = np.log(np.concatenate([each.step_s for each in every], axis=-1) / measured_s)
        phases = [error for each, step in zip(every, steps, strict=True) for error in _phase_errors(each, step)]
        return np.concatenate([np.linalg.solve(root, off.T).T, *phases], axis=-1)

    scales = most_probable(MEASURED, errors)
    log_errors = np.log(measured_s / [suite_phases(job, scales).at(0).step_s for job in jobs])
    precision = design.T @ design / NOISE**2 + np.eye(len(sizes))
    values = (np.linalg.solve(precision, design.T @ log_errors / NOISE**2) * sizes).tolist()
    count = len(strategies)
    return SuiteFit(
        scales, dict(zip(strategies, values[:count], strict=True)), dict(zip(models, values[count:], strict=True))
    )


def powers(steps: Sequence[MeasuredStep], fit: SuiteFit, figures: MachineFigures) -> tuple[float, float] | None:
    """Power of one device while it computes and while it waits, W: energy of a step = Σ power × time in the phase.

    By non-negative least squares on relative errors over the runs whose energy was measured; None without any, and
    where they don't tell computing from waiting.
    """
    from scipy.optimize import nnls

    known = [step for step in steps if step.energy_j]
    if not known:
        return None
    terms = []
    for step in known:
        phases = fit.phases(step.job(figures))
        waiting = phases.communication_s + phases.bubble_s
        terms.append((step.run.devices * (phases.step_s - waiting), step.run.devices * waiting))
    energies = np.array([step.energy_j for step in known], dtype=np.float64)
    (busy_w, waiting_w), _ = nnls(np.array(terms) / energies[:, None], np.ones(len(known)))
    if not any(waiting > 0 for _, waiting in terms):
        waiting_w = busy_w
    # No device draws nothing: where the runs can't tell the two apart, neither is known.
    return (float(busy_w), float(waiting_w)) if min(busy_w, waiting_w) > 0 else None


def _phase_errors(found: Phases[Values], step: MeasuredStep) -> Iterator[Values]:
    """Of computing and updating, where every rank does the same."""
    if not step.phases or step.run.strategy.state_shards(step.run) is None:
        return
    for names, prediction in ((_COMPUTED, found.compute_s), (_UPDATED, found.optimizer_s)):
        measured = sum(step.phases.get(name, 0.0) for name in names)
        if measured > 0 and (prediction > 0).all():
            # A part of the step, so that small phases don't decide.
            yield (prediction - measured) / (step.phases["step_time_s"] * PHASE_NOISE)


INTERVAL_SHARE = 0.9
"""Of the intervals that should hold the measurement."""
FEWEST_ERRORS = 9
"""Fewer errors than this give no interval at 90 %."""


def half_width(errors: Values) -> float | None:
    """Half the interval of log time, from log errors on unseen rows; None where they are too few."""
    place = math.ceil((len(errors) + 1) * INTERVAL_SHARE)
    return None if place > len(errors) else float(np.sort(np.abs(errors))[place - 1])


KERNELS = (
    *("hidden", "heads", "kv_heads", "mlp_width", "sequence", "context", "micro_batch", "tensor"),
    *("sequence_parallel", "fused_attention", "fp8", "gated", "experts", "top_k", "capacity"),
)
"""Columns of which equal values mean equal kernels."""


def kernel_keys(layouts: Layouts) -> list[str]:
    """Equal for rows of equal kernels."""
    columns = zip(*(getattr(layouts, name).tolist() for name in KERNELS), strict=True)
    return [" ".join(f"{value:g}" for value in row) for row in columns]


OTHER_ACCELERATOR = 1.5
"""How much wider intervals are on accelerators that nobody measured: an assumption."""
UNTRIED = 1.5
"""The same for layouts of a kind that no published step has, and for more devices than any: an assumption."""


class PublishedFit(msgspec.Struct, frozen=True, kw_only=True):
    """What the formulas alone learnt from all published steps."""

    parameters: dict[str, float]
    kernels: dict[str, float]
    """Kernels → log of measured ÷ predicted that their rows have in common."""
    without_width: dict[str, dict[str, float]]
    """Width of model → parameters that the rows of all other widths give."""
    half_widths: list[float]
    """Half of the 90 % interval of log time, by `interval_kinds`."""
    rows: int
    accelerators: list[str]
    most_devices: float
    """That any of the rows was measured on."""

    def lacking(self, width: float) -> PublishedFit:
        """Without what the rows of a width of model taught."""
        return msgspec.structs.replace(self, parameters=self.without_width[f"{width:g}"], kernels={})

    def phases(self, layouts: Layouts, machines: Machines) -> Phases[Values]:
        """Predicted phases of each layout's step."""
        found = step_phases(work_of(layouts, machines), layouts, machines, self.parameters)
        return found.stretched(np.exp([self.kernels.get(key, 0.0) for key in kernel_keys(layouts)]))

    def interval_kinds(self, layouts: Layouts, per_node: Values) -> NDArray[np.int64]:
        """Of each layout a number: what differs in how far the formulas err.

        Whether attention is fused, the job spans nodes, and its kernels were measured.
        """
        measured = np.array([key in self.kernels for key in kernel_keys(layouts)], dtype=bool)
        kinds: NDArray[np.int64] = 4 * (layouts.fused_attention > 0) + 2 * (layouts.devices > per_node) + measured
        return kinds


PLACE = Path(__file__).parent / "data" / "published_fit.json"


@cache
def published_fit() -> PublishedFit:
    """The shipped fit."""
    return msgspec.json.decode(PLACE.read_bytes(), type=PublishedFit)
