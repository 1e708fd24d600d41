"""What a claim is: a sentence of a publication, and what has to be measured for it to be true.

A claim compares two sides of otherwise equal runs, repeat by repeat, and names the region in which the effect must
lie. It is reproduced where the whole interval of the effect lies in that region, refuted where none of it does; between
the two is what is too small to count.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from msgspec import Meta, field

from analysis.comparison.policy import plain
from parallelbench.errors import ConfigError, choices
from parallelbench.spec.config import RunConfig
from parallelbench.spec.structure import Name, Node, structure

if TYPE_CHECKING:
    from collections.abc import Sequence

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
"""What a contrast may let rise → the keys of the configuration that differ with it."""

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
"""Metrics that no clock and no allocator is asked for: runs on shared cores say the same as others."""
MEASURED = (
    "first_epoch_time_s",
    "second_epoch_time_s",
    "steady_epoch_time_s",
    "throughput_samples_per_s",
    "throughput_with_startup_samples_per_s",
    "total_training_time_s",
    "total_time_s",
    "peak_memory_sum_bytes",
    "time_to_accuracy_s",
)
"""Metrics of a run that only runs with valid timing have."""
PER_EPOCH = ("slowest_epoch_time_s", "training_time_s", "gpu_energy_j", "gpu_power_mean_w", "gpu_memory_used_max_bytes")
"""Metrics of an epoch that only runs with valid timing have: of the one that the contrast or `epoch` names.

The fullest GPU is the driver's, as peaks of processes are sums over the GPUs that each drives.
"""
TO_ACCURACY = ("steps_to_accuracy", "time_to_accuracy_s")
"""Metrics that need a `target`: the same for all runs, whatever their work."""
EPOCH_COLUMNS = (*LEARNING[:4], *PER_EPOCH)
METRICS = (*LEARNING, *MEASURED, *PER_EPOCH)
OF_SAMPLES = (
    *("first_epoch_time_s", "second_epoch_time_s", "steady_epoch_time_s", "slowest_epoch_time_s", "gpu_energy_j"),
    *("total_training_time_s", "total_time_s", "training_time_s"),
)
"""Metrics that less is of where an epoch holds fewer samples: whoever drops some of them seems to be faster."""
LAST = "last"
"""The level of `epoch` that is each run's last."""


class Contrast(Node, frozen=True, kw_only=True):
    """Two sides of a comparison: two levels by name, or every step from one level to the next that was measured."""

    from_: Level | None = field(default=None, name="from")
    """What the one side has, e.g. {strategy: single, devices: 1}."""
    to: Level | None = None
    """What the other side has; the effect is this side's value against the other's."""
    rising: str | None = None
    """Instead of both: a quantity of `RISING`; each level is compared with the next lower one."""

    def __post_init__(self) -> None:
        """Refuse what names neither two sides nor a quantity."""
        given = [side is not None for side in (self.from_, self.to)]
        if any(given) != all(given) or all(given) == (self.rising is not None):
            raise ConfigError("a contrast has either both from and to, or rising")
        if self.rising is not None and self.rising not in RISING:
            raise ConfigError(f"rising={self.rising} is no choice: {choices(self.rising, RISING)}")
        _require_keys({**(self.from_ or {}), **(self.to or {})})

    @property
    def roots(self) -> tuple[str, ...]:
        """The keys in which the two sides may differ: what both name alike is a condition on either."""
        if self.rising is not None:
            return RISING[self.rising]
        one, other = self.from_ or {}, self.to or {}
        found = tuple(key for key in {**one, **other} if one.get(key) != other.get(key))
        return (*found, "nodes") if "devices" in found else found

    @property
    def epochs(self) -> set[int | str]:
        """The epochs that are named."""
        named = [side["epoch"] for side in (self.from_ or {}, self.to or {}) if "epoch" in side]
        return {epoch for level in named for epoch in (level if isinstance(level, list) else [level])}

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
    """How far above or below, for the effect to count: what lies nearer decides nothing."""

    def __post_init__(self) -> None:
        """Refuse what isn't one region."""
        if sum(bound is not None for bound in (self.above, self.below, self.between)) != 1:
            raise ConfigError("expect needs exactly one of above, below and between")
        if self.between and self.between[0] >= self.between[1]:
            raise ConfigError(f"expect.between={list(self.between)} is empty: the lower end comes first")
        if self.between and self.by:
            raise ConfigError(f"expect.by={self.by:g} means nothing to between: it is how far above or below")

    @property
    def region(self) -> tuple[float, float]:
        """Lower and upper end of what reproduces the claim; infinite where there is none."""
        low, high = self.open
        return low + self.by, high - self.by

    @property
    def open(self) -> tuple[float, float]:
        """The same of what doesn't refute it: the region, and what of its side of the bound is too small to count."""
        if self.between is not None:
            return self.between
        low = float("-inf") if self.above is None else self.above
        return low, float("inf") if self.below is None else self.below


class Claim(Node, frozen=True, kw_only=True):
    """A sentence of a publication, as something that runs can decide."""

    name: Name
    section: Text
    """Where it stands."""
    quote: Text
    """A few of its words."""
    metric: str
    """What is measured on both sides: one of `METRICS`."""
    compare: Literal["ratio", "difference", "efficiency"] = "ratio"
    """ratio: to ÷ from. difference: to − from. efficiency: the ratio ÷ the ratio of devices, 1 = ideal."""
    contrasts: Annotated[list[Contrast], Meta(min_length=1)]
    together: bool = False
    """Whether work has to show all contrasts: one that is refuted refutes it, all of them reproduce it."""
    more: Contrast | None = None
    """Compare the effect itself: what it is at one level of this against what it is at the other."""
    where: Level = field(default_factory=dict)
    """What all runs have, on both sides."""
    epoch: Annotated[int, Meta(ge=1)] | None = None
    """Of a metric of epochs, which one; null: the last, or what the contrast says."""
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
    """A sweep whose runs decide it, or several of which it takes all."""
    note: Text | None = None
    """How the sentence was read, where it can be read in several ways."""

    def __post_init__(self) -> None:
        """Refuse metrics that don't exist."""
        for key in ("metric", "also"):
            name = getattr(self, key)
            if name is not None and name not in METRICS:
                raise ConfigError(f"{key}={name} is no choice: {choices(name, METRICS)}")
        if (self.metric in TO_ACCURACY) != (self.target is not None):
            raise ConfigError(f"target is the accuracy of metric={' or '.join(TO_ACCURACY)}: both or neither")
        if self.also in TO_ACCURACY:
            raise ConfigError(f"also={self.also} is refused: it would need a target of its own")
        if self.epoch is not None and self.metric not in EPOCH_COLUMNS:
            raise ConfigError(f"epoch={self.epoch} means nothing to metric={self.metric}, which is one of a whole run")
        _require_keys(self.where)

    @property
    def sweeps(self) -> list[str]:
        """All that it takes to decide it."""
        return self.sweep if isinstance(self.sweep, list) else [self.sweep]

    def epochs(self, contrast: Contrast) -> set[int | str]:
        """The epochs at which a contrast looks at the metric; `LAST` stands for metrics of a whole run, too."""
        if self.metric not in EPOCH_COLUMNS:
            return {LAST}
        return contrast.epochs or (self.more.epochs if self.more else set()) or {self.epoch or LAST}


class Publication(Node, frozen=True, kw_only=True):
    """The claims of one publication: a file of this folder."""

    seed: Annotated[str, Meta(pattern=r"^[0-9A-Za-z]{1,12}\Z")]
    """Its number among the publications, for short."""
    title: Text
    claims: Annotated[list[Claim], Meta(min_length=1)]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file; `ConfigError` names the file and what is wrong in it."""
        import yaml

        try:
            plain = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
        if not (isinstance(plain, dict) and isinstance(plain.get("claims"), list)):
            raise ConfigError(f"{path} holds no claims: it needs the keys seed, title and claims, which is a list")
        try:
            found: Self = structure(plain | {"claims": [_claim(item) for item in plain["claims"]]}, cls)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        _require_distinct([claim.name for claim in found.claims], path)
        return found


def _claim(plain: Any) -> Claim:
    """One at a time, so that what is wrong names it."""
    name = plain.get("name") if isinstance(plain, dict) else plain
    try:
        claim: Claim = structure(plain, Claim)
    except ConfigError as error:
        raise ConfigError(f"claim {name}: {error}") from None
    return claim


def _require_keys(level: Level) -> None:
    """Refuse what no run can have."""
    valid = [*RunConfig.__struct_fields__, "epoch", "train_samples", "parameters", "device_type", "device_name"]
    for key in level:
        root = str(key).partition(".")[0]
        if root not in valid:
            raise ConfigError(f"{key} is no key of a run: {choices(root, valid)}")


def _require_distinct(names: Sequence[str], path: Path) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{path}: {twice[0]} is the name of two claims: give each its own")


@cache
def publications() -> tuple[Publication, ...]:
    """The claims that the suite comes with."""
    found = [Publication.read(path) for path in Path(__file__).parent.glob("*.yaml")]
    return tuple(sorted(found, key=lambda publication: publication.seed))


def written(level: Level) -> str:
    """As on the command line: "strategy=ddp,fsdp devices=2"."""
    return " ".join(
        f"{key}={','.join(map(plain, value if isinstance(value, list) else [value]))}" for key, value in level.items()
    )
