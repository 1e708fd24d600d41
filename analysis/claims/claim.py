"""A claim: a sentence of a publication, and the measurement that decides it.

A claim compares two sides of otherwise equal runs, repeat by repeat, and names the region in which the effect must
lie. It is reproduced if the whole interval of the effect lies in that region, and refuted if no part of it does and it
reaches the bound: the effect is the opposite, or nil. Only runs of its `scope` decide it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from msgspec import Meta, field, structs

from analysis.comparison.work import plain
from parallelbench.config.build import load_yaml
from parallelbench.config.run import RunConfig
from parallelbench.config.structure import Name, Node, structure
from parallelbench.errors import ConfigError, choices

if TYPE_CHECKING:
    from collections.abc import Mapping

Text = Annotated[str, Meta(min_length=1)]
Level = dict[str, Any]
"""Key → the value, or the list of values, that the runs of one side have."""

RISING = {
    "devices": ("devices", "nodes"),
    "batch_size": ("batch_size",),
    "epochs": ("epochs",),
    "train_samples": ("data.copies", "data.train_samples"),
    "parameters": ("model",),
}
"""Quantity that may rise in a contrast → the keys of the configuration that differ with it."""

LEARNING = (
    "train_loss",
    "train_accuracy",
    "test_loss",
    "test_accuracy",
    "final_test_accuracy",
    "best_test_accuracy",
    "steps_to_accuracy",
    "bytes_sent_per_step_sum",
    "gradient_bytes_sent_per_step_sum",
    "activation_bytes_sent_per_step_sum",
    "bytes_sent_per_step_busiest",
)
"""Metrics that need neither clock nor allocator: runs on shared cores measure them as well as others."""
MEASURED = (
    "first_epoch_time_s",
    "second_epoch_time_s",
    "steady_epoch_time_s",
    "throughput_samples_per_s",
    "throughput_with_startup_samples_per_s",
    "total_training_time_s",
    "total_time_s",
    "end_to_end_time_s",
    "peak_memory_sum_bytes",
    "peak_memory_device_bytes",
    "time_to_accuracy_s",
)
"""Metrics of a run that need valid timing."""
PER_EPOCH = ("slowest_epoch_time_s", "training_time_s", "gpu_energy_j", "gpu_power_mean_w", "gpu_memory_used_max_bytes")
"""Metrics of an epoch that need valid timing; the contrast or `epoch` names the epoch."""
OF_ENGINES = (
    "preprocess_cold_time_s",
    "preprocess_warm_time_s",
    "preprocess_cpu_time_s",
    "preprocess_peak_memory_bytes",
    "preprocess_output_rows",
)
"""Metrics of an engine's own process: packed runs, which start it anew, measure them as well as others."""
OF_PHASES = ("computation_per_communication", "bubble_s")
"""Metrics of the steps after the last epoch that are attributed to phases (`measure.attribution_steps`)."""
FAILURES = ("preprocess_failed",)
"""Metrics of how a run ended, 1 or 0: failed runs have them, too."""
UNTIMED = (*LEARNING, *FAILURES)
"""Metrics that depend neither on the machine nor on when they were measured."""
TO_ACCURACY = ("steps_to_accuracy", "time_to_accuracy_s")
"""Metrics that need a `target`, the same for all runs."""
EPOCH_COLUMNS = (*LEARNING[:4], *PER_EPOCH)
METRICS = (*UNTIMED, *MEASURED, *PER_EPOCH, *OF_ENGINES, *OF_PHASES)
RATES = tuple(name for name in METRICS if name.endswith("_per_s"))
"""Metrics that twice as many devices double at best."""
OF_SAMPLES = (
    *("first_epoch_time_s", "second_epoch_time_s", "steady_epoch_time_s", "slowest_epoch_time_s", "gpu_energy_j"),
    *("total_training_time_s", "total_time_s", "end_to_end_time_s", "training_time_s"),
)
"""Metrics that shrink with the samples per epoch: a run that drops samples looks faster."""
OF_FACTS = ("epoch", "steps", "train_samples", "parameters", "device_type", "device_name")
"""Keys of a level that no configuration has; steps are those of the whole run."""
LAST = "last"
"""The level of `epoch` that stands for the last epoch of each run."""


class Contrast(Node, frozen=True, kw_only=True):
    """Two sides of a comparison: two levels by name, or every step from one level to the next that was measured."""

    from_: Level | None = field(default=None, name="from")
    """Keys and values of the first side, e.g. {strategy: single, devices: 1}."""
    to: Level | None = None
    """Keys and values of the second side. The effect is its value against that of the first side."""
    rising: str | None = None
    """Instead of both: a quantity of `RISING`; each level is compared with the next lower one."""

    def __post_init__(self) -> None:
        """Refuse a contrast that names neither two sides nor a quantity."""
        given = [side is not None for side in (self.from_, self.to)]
        if any(given) != all(given) or all(given) == (self.rising is not None):
            raise ConfigError("a contrast needs either from and to, or rising")
        if self.rising is not None and self.rising not in RISING:
            raise ConfigError(f"rising={self.rising} is no choice: {choices(self.rising, RISING)}")
        _require_keys({**(self.from_ or {}), **(self.to or {})})

    @property
    def roots(self) -> tuple[str, ...]:
        """The keys in which the two sides may differ. A key with one value on both sides is a condition on both."""
        if self.rising is not None:
            return RISING[self.rising]
        one, other = self.from_ or {}, self.to or {}
        keys = tuple(key for key in {**one, **other} if one.get(key) != other.get(key))
        return (*keys, "nodes") if "devices" in keys else keys

    @property
    def epochs(self) -> set[int | str]:
        """The epochs that the two sides name."""
        named = [side["epoch"] for side in (self.from_ or {}, self.to or {}) if "epoch" in side]
        return {epoch for level in named for epoch in (level if isinstance(level, list) else [level])}

    def of(self, strategies: Mapping[str, str]) -> Self:
        """The same contrast of other strategies."""
        sides = (None if side is None else _of_others(side, strategies) for side in (self.from_, self.to))
        return structs.replace(self, **dict(zip(("from_", "to"), sides, strict=True)))

    def __str__(self) -> str:
        if self.rising is not None:
            return f"at least two levels of {self.rising}"
        return f"{written(self.from_ or {})}, and with {written(self.to or {})}"


class Expect(Node, frozen=True, kw_only=True):
    """The region in which the effect must lie for the claim to be true."""

    above: float | None = None
    below: float | None = None
    between: tuple[float, float] | None = None
    by: Annotated[float, Meta(ge=0)] = 0.0
    """Least distance from the bound that counts. An interval that ends nearer, and holds the bound, shows no effect."""

    def __post_init__(self) -> None:
        """Refuse anything but exactly one region."""
        if sum(bound is not None for bound in (self.above, self.below, self.between)) != 1:
            raise ConfigError("expect needs exactly one of above, below and between")
        if self.between and self.between[0] >= self.between[1]:
            raise ConfigError(f"expect.between={list(self.between)} is empty: write the lower end first")
        if self.between and self.by:
            raise ConfigError(f"expect.by={self.by:g} does not apply to between: leave it out")

    @property
    def region(self) -> tuple[float, float]:
        """Lower and upper end of the region that reproduces the claim; infinite without a bound."""
        low, high = self.open
        return low + self.by, high - self.by

    @property
    def open(self) -> tuple[float, float]:
        """Lower and upper end of the region that does not refute it: the same without the margin `by`."""
        if self.between is not None:
            return self.between
        low = float("-inf") if self.above is None else self.above
        return low, float("inf") if self.below is None else self.below


class Claim(Node, frozen=True, kw_only=True):
    """A sentence of a publication, in a form that runs can decide."""

    name: Name
    section: Text
    """Its section in the publication."""
    quote: Text
    """A short quotation."""
    metric: str
    """What is measured on both sides: one of `METRICS`."""
    compare: Literal["ratio", "difference", "efficiency"] = "ratio"
    """ratio: to ÷ from. difference: to − from. efficiency: the ratio of two rates ÷ that of devices, 1 = ideal."""
    contrasts: Annotated[list[Contrast], Meta(min_length=1)]
    together: bool = False
    """Whether each work must show all contrasts: all must be reproduced, and one refuted contrast refutes the claim."""
    more: Contrast | None = None
    """A second contrast: the effect at one level of it is compared with the effect at the other level."""
    where: Level = field(default_factory=dict)
    """Keys and values of all runs, on both sides."""
    scope: Level = field(default_factory=dict)
    """Keys and values of the runs that the publication speaks of, as far as the claim depends on them: only
    these decide it. {}: it depends on none."""
    epoch: Annotated[int, Meta(ge=1)] | None = None
    """The epoch of a metric of epochs; null: the last epoch, or that of the contrast."""
    target: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """The accuracy of steps_to_accuracy and time_to_accuracy_s, 0 to 1."""
    best_of: str | None = None
    """A key of which only the value with the smallest metric counts, e.g. optimizer.lr."""
    expect: Expect
    also: str | None = None
    """Another metric of the same comparison, shown beside it; it decides nothing."""
    gpus_only: Text | None = None
    """Why runs on CPUs can't decide it."""
    sweep: Name | Annotated[list[Name], Meta(min_length=1)]
    """The sweep whose runs decide it, or several sweeps that are all needed."""
    asked_of: dict[Name, dict[str, str]] = field(default_factory=dict)
    """Name → strategy → the one that stands in its place: the same claim, asked of these under a name of its own."""
    note: Text | None = None
    """How the sentence was read, where it can be read in several ways."""

    def __post_init__(self) -> None:
        """Refuse metrics that don't exist."""
        for key in ("metric", "also"):
            name = getattr(self, key)
            if name is not None and name not in METRICS:
                raise ConfigError(f"{key}={name} is no choice: {choices(name, METRICS)}")
            # Devices shorten times under strong scaling, not under weak: a rate says in both what they gained.
            if name is not None and self.compare == "efficiency" and name not in RATES:
                raise ConfigError(f"{key}={name} has no efficiency, as it is no rate: choose {' or '.join(RATES)}")
        if (self.metric in TO_ACCURACY) != (self.target is not None):
            raise ConfigError(f"target is the accuracy of metric={' or '.join(TO_ACCURACY)}: give both or neither")
        if self.also in TO_ACCURACY:
            raise ConfigError(f"also={self.also} is refused: it would need a target of its own; choose another metric")
        if self.also is not None and self.best_of is not None:
            raise ConfigError(
                f"also={self.also} does not apply with best_of={self.best_of}: its smallest value may be another run's "
                "than that of the metric; leave one of both out"
            )
        if self.epoch is not None and self.metric not in EPOCH_COLUMNS:
            raise ConfigError(f"epoch={self.epoch} does not apply to metric={self.metric} of a whole run: leave it out")
        _require_keys({**self.where, **self.scope})
        named = self._strategies()
        for name, strategies in self.asked_of.items():
            if not strategies:
                raise ConfigError(
                    f"asked_of.{name} is empty: give it a strategy of the claim, and the one in its place"
                )
            for strategy in strategies:
                if strategy not in named:
                    known = choices(strategy, named) if named else "it names none"
                    raise ConfigError(f"asked_of.{name}: {strategy} is no strategy of the claim: {known}")

    def _strategies(self) -> list[str]:
        """All that it names."""
        contrasts = (*self.contrasts, *([self.more] if self.more else []))
        levels = [self.where, self.scope, *(side for each in contrasts for side in (each.from_, each.to) if side)]
        values = [level["strategy"] for level in levels if "strategy" in level]
        return list(dict.fromkeys(name for each in values for name in (each if isinstance(each, list) else [each])))

    @property
    def every(self) -> list[Claim]:
        """This claim, and those that ask the same of other strategies."""
        return [self, *(self._of(name, strategies) for name, strategies in self.asked_of.items())]

    def _of(self, name: str, strategies: Mapping[str, str]) -> Claim:
        return structs.replace(
            self,
            name=name,
            contrasts=[each.of(strategies) for each in self.contrasts],
            more=self.more and self.more.of(strategies),
            where=_of_others(self.where, strategies),
            scope=_of_others(self.scope, strategies),
            asked_of={},
        )

    @property
    def sweeps(self) -> list[str]:
        """All sweeps that are needed to decide it."""
        return self.sweep if isinstance(self.sweep, list) else [self.sweep]

    def epochs(self, contrast: Contrast) -> set[int | str]:
        """The epochs at which a contrast looks at the metric; `LAST` stands for metrics of a whole run, too."""
        if self.metric not in EPOCH_COLUMNS:
            return {LAST}
        return contrast.epochs or (self.more.epochs if self.more else set()) or {self.epoch or LAST}


class Publication(Node, frozen=True, kw_only=True):
    """The claims of one publication: a file of this folder."""

    seed: Annotated[str, Meta(pattern=r"^[0-9A-Za-z]{1,12}\Z")]
    """Its number among the publications, e.g. 002."""
    title: Text
    claims: Annotated[list[Claim], Meta(min_length=1)]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file; `ConfigError` names the file and what is wrong in it."""
        try:
            plain = load_yaml(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"{path} is no YAML: {error}") from None
        if not (isinstance(plain, dict) and isinstance(plain.get("claims"), list)):
            raise ConfigError(f"{path} holds no claims: it needs the keys seed, title and claims, which is a list")
        try:
            claims = [each for item in plain["claims"] for each in _claim(item).every]
            publication: Self = structure(plain | {"claims": claims}, cls)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        names = [claim.name for claim in publication.claims]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"{path}: {twice[0]} is the name of two claims: give each claim its own name")
        return publication


def _claim(plain: Any) -> Claim:
    """Read one claim at a time, so that an error names it."""
    name = plain.get("name") if isinstance(plain, dict) else plain
    try:
        claim: Claim = structure(plain, Claim)
    except ConfigError as error:
        raise ConfigError(f"claim {name}: {error}") from None
    return claim


def _of_others(level: Level, strategies: Mapping[str, str]) -> Level:
    """A level with other strategies in place of its own."""
    if "strategy" not in level:
        return level
    own = level["strategy"]
    others = [strategies.get(each, each) for each in own] if isinstance(own, list) else strategies.get(own, own)
    return level | {"strategy": others}


def _require_keys(level: Level) -> None:
    """Refuse keys that no run has."""
    valid = [*RunConfig.__struct_fields__, *OF_FACTS]
    for key in level:
        root = str(key).partition(".")[0]
        if root not in valid:
            raise ConfigError(f"{key} is no key of a run: {choices(root, valid)}")


@cache
def publications() -> tuple[Publication, ...]:
    """The claims that the suite comes with."""
    shipped = [Publication.read(path) for path in Path(__file__).parent.glob("*.yaml")]
    return tuple(sorted(shipped, key=lambda publication: publication.seed))


def written(level: Level) -> str:
    """As on the command line: "strategy=ddp,fsdp devices=2"."""
    return " ".join(
        f"{key}={','.join(map(plain, value if isinstance(value, list) else [value]))}" for key, value in level.items()
    )
