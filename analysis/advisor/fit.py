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
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from analysis.advisor.cache import kept
from analysis.advisor.step import SuiteJob, step_time
from analysis.advisor.strategies import suite_phases
from parallelbench.config.build import to_mapping
from parallelbench.config.identity import PLACES, canonical_json
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from analysis.advisor.layouts import Layouts, Values
    from analysis.advisor.machine import MachineFigures, Machines
    from analysis.advisor.measurements import Evidence
    from analysis.advisor.step import Phases
    from analysis.advisor.sweep_evidence import MeasuredStep
    from parallelbench.config.run import RunConfig


@dataclass(frozen=True)
class Parameter:
    """One fitted number, positive; it is fitted on its logarithm."""

    name: str
    prior: float
    """What is assumed where nothing was measured."""
    spread: float
    """Standard deviation of the prior's natural logarithm; about its relative uncertainty."""
    unit: str
    doc: str
    most: float = math.inf
    """Upper bound: a share of a data sheet stays below 1."""
    least: float = 0.0
    """Lower bound."""


PARAMETERS = (
    Parameter(
        "matrix_share", 0.87, 0.15, "1", "share of the best measured FLOP/s that large matrix products reach", most=1.0
    ),
    Parameter("narrow_width", 128.0, 0.7, "columns", "width of a device's part of a matrix at which the share halves"),
    Parameter("few_rows", 256.0, 0.7, "tokens", "tokens of a micro-batch at which the share halves"),
    Parameter("fp8_speed", 1.4, 0.2, "1", "speed of products in 8 bits ÷ in 16; 2 by data sheets"),
    Parameter("attention_share", 0.4, 0.4, "1", "share of the same that attention's own products reach", most=0.8),
    Parameter("memory_share", 0.7, 0.3, "1", "share of memory bandwidth that elementwise work reaches", most=0.95),
    Parameter(
        "eager_slower", 1.1, 0.15, "1", "time of torch's own kernels ÷ of Megatron-LM's, which fuse what torch does not"
    ),
    Parameter("launch_s", 1e-3, 1.0, "s", "host's time for one layer, forward, per pass; hidden behind the device's"),
    Parameter("tensor_launch_s", 5e-5, 1.0, "s", "the same, for each further device of the tensor group"),
    Parameter("softmax_launch_s", 2e-4, 0.7, "s", "the same, where softmax takes several kernels instead of one"),
    Parameter(
        "odd_share", 0.4, 0.4, "1", "share of the same for logits of a vocabulary that is no multiple of 8", most=0.9
    ),
    Parameter("loss_bytes", 40.0, 0.4, "bytes", "traffic of the loss per logit, forward and backward"),
    Parameter("handover_s", 3e-4, 0.7, "s", "a pipeline stage's fixed time to hand over a micro-batch, each way"),
    Parameter("link_share", 0.7, 0.3, "1", "share of the links' bandwidth that collectives in a node reach", most=0.95),
    Parameter(
        "network_share",
        0.7,
        0.3,
        "1",
        "share of the network's bandwidth that collectives between nodes reach",
        most=0.95,
    ),
    # Priors of both latencies: NCCL's own for rings, src/graph/tuning.cc.
    Parameter("link_latency_s", 3.4e-6, 0.7, "s", "one turn of a collective in a node"),
    Parameter("network_latency_s", 9.6e-6, 0.7, "s", "one turn of a collective between nodes"),
    Parameter("gradient_bytes", 2.8, 0.35, "bytes", "moved per reduced gradient; 2 in half, 4 in single precision"),
    Parameter(
        "overlap", 3.0, 0.4, "1", "γ of compute and sharding's collectives; 1: none hidden, 10: nearly all", least=1.0
    ),
    Parameter("update_share", 0.5, 0.5, "1", "share of memory bandwidth that the optimizer reaches", most=0.95),
    Parameter("step_s", 5e-3, 1.0, "s", "fixed time of each step"),
)
"""Fitted on a site's measurements, from these priors."""

Fitted = dict[str, float]


def priors() -> Fitted:
    """What is assumed before anything is measured."""
    return {each.name: each.prior for each in PARAMETERS}


Scales = dict[str, float]
"""Name of a parameter → its value."""

SUITE_PARAMETERS = (
    Parameter("product_scale", 1.0, 0.3, "1", "time of a layer's products ÷ what calibrated products of the size take"),
    Parameter("convolution_scale", 1.5, 0.7, "1", "the same for convolutions, by their FLOPs by definition"),
    Parameter("grouped_scale", 5.0, 1.0, "1", "the same for convolutions in groups"),
    Parameter("traffic_scale", 1.0, 0.5, "1", "time of elementwise work ÷ what its bytes take"),
    Parameter("launch_scale", 1.0, 0.5, "1", "host time of an operation ÷ the calibrated one"),
    Parameter("update_scale", 1.0, 0.5, "1", "time of the optimizer's update ÷ what its bytes take"),
    Parameter("alone", 0.9, 0.2, "1", "compute time of a device alone in its node ÷ of one among busy ones", most=1.0),
    Parameter("link_scale", 1.0, 0.4, "1", "time of collectives ÷ what α and β say"),
    Parameter("message_s", 5e-5, 1.0, "s", "host time of one collective or message"),
    Parameter("overlap", 2.0, 0.4, "1", "γ of backward and all-reduced buckets; 1: none hidden, 10: nearly all"),
    Parameter("sharded_overlap", 1.2, 0.4, "1", "γ of compute and FSDP's collectives"),
    Parameter("shard_copies", 4.0, 0.7, "1", "copies of the gathered parameters' bytes that FSDP makes per gathering"),
    Parameter(
        "sharding_scale", 1.0, 0.3, "1", "time of what FSDP adds to a layer besides messages ÷ the calibrated one"
    ),
    Parameter("handover_s", 2e-4, 1.0, "s", "a stage's fixed time to hand over a micro-batch, each way"),
    Parameter("server_copies", 4.0, 0.7, "1", "copies of the parameters' bytes that a server makes per worker's step"),
    Parameter("step_s", 2e-4, 1.0, "s", "fixed time of each step"),
)
"""Fitted on log time of finished sweeps, from these priors."""
ASSUMED_FACTOR = 2.0
"""Where nothing was measured, 90 % of steps are assumed to be within this factor of the prediction."""


def assumed_scales() -> Scales:
    """What is taken for granted before anything is measured."""
    return {each.name: each.prior for each in SUITE_PARAMETERS}


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What measured runs cover; everything else is extrapolation."""

    strategies: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()
    """By options and the shape of a sample."""
    optimizers: frozenset[str] = frozenset()
    precisions: frozenset[str] = frozenset()
    devices: frozenset[int] = frozenset()
    nodes: frozenset[int] = frozenset()
    samples: frozenset[float] = frozenset()
    """Per device and step."""
    settings: frozenset[str] = frozenset()
    """All else that decides about a step."""

    @classmethod
    def of(cls, runs: Sequence[RunConfig]) -> Seen:
        """What these runs cover."""
        return cls(
            strategies=frozenset(run.strategy.name for run in runs),
            models=frozenset(_trained(run) for run in runs),
            optimizers=frozenset(run.optimizer.name for run in runs),
            precisions=frozenset(run.precision for run in runs),
            devices=frozenset(run.devices for run in runs),
            nodes=frozenset(run.nodes for run in runs),
            samples=frozenset(run.global_batch_size / run.devices for run in runs),
            settings=frozenset(_settings(run) for run in runs),
        )

    def outside(self, run: RunConfig) -> tuple[str, ...]:
        """In which respects no measured run is like this one."""
        samples = run.global_batch_size / run.devices
        respects = {
            "strategy": run.strategy.name not in self.strategies,
            "model": _trained(run) not in self.models,
            "optimizer": run.optimizer.name not in self.optimizers,
            "precision": run.precision not in self.precisions,
            "devices": run.devices > max(self.devices, default=0),
            "nodes": run.nodes > max(self.nodes, default=0),
            "batch": not min(self.samples, default=0.0) <= samples <= max(self.samples, default=0.0),
            "settings": _settings(run) not in self.settings,
        }
        return tuple(name for name, outside in respects.items() if outside)


def _trained(run: RunConfig) -> str:
    return canonical_json({"model": msgspec.to_builtins(run.model), "sample": run.data.shape})


def _settings(run: RunConfig) -> str:
    named = ("model", "data", "strategy", "optimizer", "precision", "devices", "nodes", "global_batch")
    return canonical_json({key: value for key, value in of_a_step(run).items() if key not in named})


NEVER_OF_A_STEP = (
    *(*PLACES, "device", "same_plugin"),  # where; evidence is of one machine by other rules
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


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """What finished runs taught about the suite's own steps."""

    scales: Mapping[str, float] = field(default_factory=assumed_scales)
    offsets: Mapping[str, float] = field(default_factory=dict)
    """Strategy → log of measured ÷ predicted that its runs leave, shrunk towards 0; other strategies have 0."""
    model_offsets: Mapping[str, float] = field(default_factory=dict)
    """The same of models, by `model_key`: what their kernels have in common under every strategy."""
    half_width: float = math.log(ASSUMED_FACTOR)
    """Half of the 90 % interval of log time, for what is like the measured runs."""
    far_half_width: float = math.log(ASSUMED_FACTOR)
    """The same for rows that extrapolate: larger device counts, other strategies, other models."""
    seen: Seen = field(default_factory=Seen)
    rows: int = 0
    """Measured configurations that it rests on; 0: everything is assumed."""
    busy_power_w: float | None = None
    """One device's power while it computes, from the energy of measured runs; None: none was measured."""
    waiting_power_w: float | None = None
    """The same while it waits for others."""

    def stretch(self, run: RunConfig) -> float:
        """Measured ÷ predicted that is to be expected of a run, by those of its strategy and of its model."""
        return math.exp(self.offsets.get(run.strategy.name, 0.0) + self.model_offsets.get(model_key(run), 0.0))


def model_key(run: RunConfig) -> str:
    """Equal for models of equal options."""
    return canonical_json(msgspec.to_builtins(run.model))


NOISE = 0.05
"""Standard deviation of log time of a measured step that is taken for granted."""
PHASE_NOISE = 0.2
"""The same of a phase: its measurement adds clocks to the step, and the formulas have means where ranks differ."""
STRATEGY_SIZE, MODEL_SIZE = 0.15, 0.3
"""Standard deviations of what strategies and models leave of log time, before it is seen."""
_STEP = 1e-3
"""Step of the numerical derivatives, of a parameter's logarithm."""
_COMPUTED, _UPDATED = ("forward_s", "backward_s"), ("optimizer_s",)


@dataclass(frozen=True)
class Residual:
    """What the formulas leave of measured steps: log of measured ÷ predicted, by strategy and by model."""

    strategies: dict[str, float]
    models: dict[str, float]

    def of(self, step: MeasuredStep) -> float:
        """What is to be expected of a step; 0 where neither was seen."""
        return self.strategies.get(step.strategy, 0.0) + self.models.get(step.model_key, 0.0)


@dataclass(frozen=True)
class SuiteFit:
    """What a set of measured steps taught."""

    scales: Scales
    residual: Residual
    figures: MachineFigures

    def phases(self, step: MeasuredStep) -> Phases:
        """Predicted phases of what a step ran; its measured time is not looked at."""
        return _formula(step, self.scales, self.figures).stretched(float(np.exp(self.residual.of(step))))


def predictable(steps: Sequence[MeasuredStep], figures: MachineFigures) -> tuple[list[MeasuredStep], list[str]]:
    """Those that a formula knows, and why the others are left out."""

    kept, refused = [], []
    for step in steps:
        try:
            _formula(step, assumed_scales(), figures)
        except ConfigError as error:
            refused.append(f"{step.model} under {step.strategy}: {error}")
        else:
            kept.append(step)
    return kept, refused


def fitted(steps: Sequence[MeasuredStep], figures: MachineFigures) -> SuiteFit:
    """The fit of these steps; it is kept, so that no report fits to the same steps twice."""
    known = [(to_mapping(step.run), step.layers, step.step_s, step.phases) for step in steps]

    def make() -> str:
        found = _fitted(steps, figures)
        return msgspec.json.encode([found.scales, found.residual]).decode()

    decode = msgspec.json.Decoder(tuple[Scales, Residual]).decode
    scales, residual = kept("fits", [known, figures], make, decode)
    return SuiteFit(scales, residual, figures)


def _fitted(steps: Sequence[MeasuredStep], figures: MachineFigures) -> SuiteFit:
    """The most probable parameters, measurements and priors weighing by their variances, and what remains."""
    from scipy.optimize import least_squares

    spreads = np.array([each.spread for each in SUITE_PARAMETERS])
    log_priors = np.log([each.prior for each in SUITE_PARAMETERS])
    most = (np.log([each.most for each in SUITE_PARAMETERS]) - log_priors) / spreads

    def scales_at(units: Values) -> Scales:
        values = np.exp(log_priors + units * spreads)
        return {each.name: float(value) for each, value in zip(SUITE_PARAMETERS, values, strict=True)}

    def errors(units: Values) -> Values:
        """Errors in units of their standard deviation, models' own common part taken out, then the priors'."""
        scales = scales_at(units)
        predicted = [_formula(step, scales, figures) for step in steps]
        off = np.log([each.step_s / step.step_s for each, step in zip(predicted, steps, strict=True)])
        phases = [error for each, step in zip(predicted, steps, strict=True) for error in _phase_errors(each, step)]
        together: Values = np.concatenate([_whitened(off, steps), np.array(phases), units])
        return together

    def derivatives(units: Values) -> Values:
        now = errors(units)
        result: Values = np.stack([(errors(units + _STEP * each) - now) / _STEP for each in np.eye(len(units))], axis=1)
        return result

    found: Any = least_squares(
        errors, np.zeros(len(SUITE_PARAMETERS)), jac=derivatives, bounds=(-np.inf, most), ftol=1e-3, xtol=1e-3
    )
    scales = scales_at(found.x)
    return SuiteFit(scales, _residual(steps, scales, figures), figures)


def learnt(fit: SuiteFit, steps: Sequence[MeasuredStep], *, half_width: float, far_half_width: float) -> Learnt:
    """What the advice rests on: the fit, how wide its intervals are, and what was seen."""
    busy_w, waiting_w = powers(steps, fit)
    return Learnt(
        scales=fit.scales,
        offsets=fit.residual.strategies,
        model_offsets=fit.residual.models,
        half_width=half_width,
        far_half_width=far_half_width,
        seen=Seen.of([step.run for step in steps]),
        rows=len(steps),
        busy_power_w=busy_w,
        waiting_power_w=waiting_w,
    )


def powers(steps: Sequence[MeasuredStep], fit: SuiteFit) -> tuple[float | None, float | None]:
    """Power of one device while it computes and while it waits, W: energy of a step = Σ power × time in the phase.

    By non-negative least squares on relative errors over the runs whose energy was measured; (None, None) without any,
    and where they don't tell computing from waiting.
    """
    from scipy.optimize import nnls

    known = [step for step in steps if step.energy_j]
    if not known:
        return None, None
    terms = []
    for step in known:
        phases = fit.phases(step)
        waiting = phases.communication_s + phases.bubble_s
        terms.append((step.run.devices * (phases.step_s - waiting), step.run.devices * waiting))
    energies = np.array([step.energy_j for step in known], dtype=np.float64)
    (busy_w, waiting_w), _ = nnls(np.array(terms) / energies[:, None], np.ones(len(known)))
    if not any(waiting > 0 for _, waiting in terms):
        waiting_w = busy_w
    # No device draws nothing: where the runs can't tell the two apart, neither is known.
    return (float(busy_w), float(waiting_w)) if min(busy_w, waiting_w) > 0 else (None, None)


def _formula(step: MeasuredStep, scales: Scales, figures: MachineFigures) -> Phases:
    return suite_phases(SuiteJob(run=step.run, layers=step.layers, figures=figures, scales=scales))


def _phase_errors(predicted: Phases, step: MeasuredStep) -> list[float]:
    """Of computing and updating, where every rank does the same."""
    if not step.phases or step.run.strategy.state_shards(step.run) is None:
        return []
    found = []
    for names, prediction in ((_COMPUTED, predicted.compute_s), (_UPDATED, predicted.optimizer_s)):
        measured = sum(step.phases.get(name, 0.0) for name in names)
        if measured > 0 and prediction > 0:
            # A part of the step, so that small phases don't decide.
            found.append((prediction - measured) / (step.phases["step_time_s"] * PHASE_NOISE))
    return found


def _design(steps: Sequence[MeasuredStep]) -> tuple[list[str], list[str], Values]:
    """Strategies, models, and which of them each step has, in units of their sizes."""
    strategies, models = (sorted({getattr(step, name) for step in steps}) for name in ("strategy", "model_key"))
    design = np.zeros((len(steps), len(strategies) + len(models)))
    for place, step in enumerate(steps):
        design[place, strategies.index(step.strategy)] = STRATEGY_SIZE
        design[place, len(strategies) + models.index(step.model_key)] = MODEL_SIZE
    return strategies, models, design


def _whitened(off: Values, steps: Sequence[MeasuredStep]) -> Values:
    """Errors as independent ones of size 1, those of a strategy and of a model being alike."""
    _, _, design = _design(steps)
    covariance = design @ design.T + NOISE**2 * np.eye(len(steps))
    result: Values = np.linalg.solve(np.linalg.cholesky(covariance), off)
    return result


def _residual(steps: Sequence[MeasuredStep], scales: Scales, figures: MachineFigures) -> Residual:
    """What strategies and models have in common, each shrunk towards 0 by how often it was seen (ridge regression)."""
    log_errors = np.log([step.step_s / _formula(step, scales, figures).step_s for step in steps])
    strategies, models, design = _design(steps)
    precision = design.T @ design / NOISE**2 + np.eye(design.shape[1])
    units = np.linalg.solve(precision, design.T @ log_errors / NOISE**2)
    sizes = np.array([STRATEGY_SIZE] * len(strategies) + [MODEL_SIZE] * len(models))
    values = (units * sizes).tolist()
    count = len(strategies)
    return Residual(dict(zip(strategies, values[:count], strict=True)), dict(zip(models, values[count:], strict=True)))


INTERVAL_SHARE = 0.9
"""Of the intervals that should hold the measurement."""
FEWEST_ERRORS = 9
"""Fewer errors than this give no interval at 90 %."""


def half_width(errors: Values, share: float = INTERVAL_SHARE) -> float | None:
    """Half the interval of log time, from log errors on unseen rows; None where they are too few."""
    place = math.ceil((len(errors) + 1) * share)
    if place > len(errors):
        return None
    return float(np.sort(np.abs(errors))[place - 1])


NOISE_OF_FORMULAS = 0.05
"""Standard deviation of log time that is taken for granted: what a measurement and these formulas are good for."""
_STEP_OF_FORMULAS = 1e-4
"""Step of the numerical derivatives, of a parameter's logarithm."""


def fit(layouts: Layouts, machines: Machines, measured_s: Values) -> Fitted:
    """The parameters that are most probable: measurements and priors weigh by their variances.

    Errors count by a soft absolute value beyond `NOISE`, so that a few disturbed runs don't bend everything.
    """
    from scipy.optimize import least_squares

    spreads = np.array([each.spread for each in PARAMETERS])
    log_priors = np.log([each.prior for each in PARAMETERS])
    log_measured = np.log(measured_s)
    most = (np.log([each.most for each in PARAMETERS]) - log_priors) / spreads
    with np.errstate(divide="ignore"):
        least = (np.log([each.least for each in PARAMETERS]) - log_priors) / spreads
    weights = np.sqrt(_weights(layouts))

    def errors(units: Values) -> Values:
        """One row of errors per row of parameters, in units of their prior's spread."""
        logs = np.atleast_2d(log_priors + units * spreads)
        columns = {each.name: np.exp(logs[:, [i]]) for i, each in enumerate(PARAMETERS)}
        off: Values = (np.log(step_time(layouts, machines, columns).step_s) - log_measured) / NOISE_OF_FORMULAS
        together: Values = np.concatenate([weights * _softened(off), np.atleast_2d(units)], axis=1)
        return together

    def derivatives(units: Values) -> Values:
        every = errors(np.concatenate([units[None], units + _STEP_OF_FORMULAS * np.eye(len(units))]))
        result: Values = (every[1:] - every[0]).T / _STEP_OF_FORMULAS
        return result

    found: Any = least_squares(
        lambda units: errors(units)[0],
        np.zeros(len(PARAMETERS)),
        jac=derivatives,
        bounds=(least, most),
        ftol=1e-5,
        xtol=1e-5,
    )
    values = np.exp(log_priors + found.x * spreads)
    return {each.name: float(value) for each, value in zip(PARAMETERS, values, strict=True)}


def _weights(layouts: Layouts) -> Values:
    """How much each row counts.

    Rows of equal kernels (width, sequence, micro-batch, tensor group) err alike, whatever else differs: measured errors
    differ by 1 % within such rows and by 8 % between them. So n of them count as one.
    """
    columns = (layouts.hidden, layouts.sequence, layouts.micro_batch, layouts.tensor)
    _, group, counts = np.unique(np.stack(columns), axis=1, return_inverse=True, return_counts=True)
    result: Values = 1.0 / counts[np.ravel(group)]
    return result


def _softened(off: Values) -> Values:
    """Errors whose squares grow like 2·|error| once beyond 1."""
    result: Values = np.sign(off) * np.sqrt(2.0 * (np.sqrt(1.0 + off**2) - 1.0))
    return result


OTHER_ACCELERATOR = 1.5
"""How much wider intervals are on accelerators that nobody measured: an assumption."""
UNTRIED = 1.5
"""The same for layouts of a kind that no published step has, and for more devices than any: an assumption."""


class PublishedFit(msgspec.Struct, frozen=True, kw_only=True):
    """What the formulas alone learnt from all published steps."""

    parameters: dict[str, float]
    without_width: dict[str, dict[str, float]]
    """Width of model → what the rows of all other widths give."""
    half_width: float
    """Half of the 90 % interval of log time, from fits that lacked a width of model: the error on unlike models."""
    across_half_width: float
    """The same of the rows on several nodes alone, which are few among those on one."""
    rows: int
    accelerators: list[str]
    most_devices: float
    """That any of the rows was measured on."""


def fitted_to(evidence: Evidence) -> PublishedFit:
    """Fit all rows, and judge each width of model by a fit without it."""
    errors, without = np.zeros(len(evidence)), {}
    for width in np.unique(evidence.layouts.hidden):
        left_out = evidence.layouts.hidden == width
        rest, asked = evidence.take(~left_out), evidence.take(left_out)
        parameters = without[f"{width:g}"] = fit(rest.layouts, rest.machines, rest.time_s)
        predicted_s = step_time(asked.layouts, asked.machines, parameters).step_s
        errors[left_out] = np.log(asked.time_s / predicted_s)
    width_of_all = half_width(errors)
    across = half_width(errors[evidence.layouts.devices > evidence.machines.devices_per_node])
    assert width_of_all is not None, "the published rows are hundreds"
    assert across is not None, "those on several nodes are dozens"
    parameters = fit(evidence.layouts, evidence.machines, evidence.time_s)
    return PublishedFit(
        parameters=parameters,
        without_width=without,
        half_width=width_of_all,
        across_half_width=across,
        rows=len(evidence),
        accelerators=sorted(set(evidence.accelerators)),
        most_devices=float(evidence.layouts.devices.max()),
    )


def place() -> Path:
    """Where the file is."""
    from pathlib import Path

    return Path(str(resources.files("analysis"))) / "advisor" / "data" / "published_fit.json"


@cache
def published_fit() -> PublishedFit:
    """The shipped fit."""
    return msgspec.json.decode(place().read_bytes(), type=PublishedFit)
