"""Training programs of the user's own: a run starts one, counts its steps from outside, and ends it. Loads no torch.

The program stands where the suite's own runs have strategy, model and data: nothing of these is known, or asked.
"""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, field

from parallelbench.config.components import Arrays, Data, Model, Strategy
from parallelbench.config.sites import expanded, shipped
from parallelbench.config.structure import Seconds  # noqa: TC001 - msgspec reads it
from parallelbench.errors import ConfigError, choices, count_of
from parallelbench.strategies.shared_refusals import on_one_node

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from parallelbench.config.replica import Replica
    from parallelbench.config.rule import Rules
    from parallelbench.config.run import RunConfig
    from parallelbench.frameworks.program.sources import Sources
    from parallelbench.world.world import World


Word = str | int | float | bool
Line = Annotated[str, Meta(min_length=1, max_length=16_384)]
Pattern = Annotated[str, Meta(min_length=1, max_length=1024)]

NOT_KEYS = (
    *("data", "optimizer", "lr_schedule", "loss", "metric", "loader"),
    *("epochs", "clip_norm", "precision", "channels_last", "compile", "compile_scope", "activation_recomputation"),
    *("graph", "cudnn_benchmark", "preprocess", "nccl"),
)
"""Keys of a run that mean nothing to a program: its command says all that."""

NOT_MEASURED = (
    *("parity", "parity_steps", "steps_per_epoch", "deterministic", "detect_anomaly", "attribution_steps", "trace"),
    "waits",
)


class Program(Strategy, frozen=True, kw_only=True):
    """How a user's program is started, counted and ended."""

    framework: ClassVar[str] = "program"
    starts_ranks: ClassVar[bool] = True
    places: ClassVar[tuple[str, ...]] = ("folder", "start_timeout_s", "files")

    command: Line
    """A line of shell, with names in braces: `PLACES` and those of `axes`."""
    folder: str | None = None
    """Where it runs."""
    setup: list[Line] = field(default_factory=list)
    """Lines of shell before it."""
    one_process_per: Literal["device", "node"] = "device"
    """Who trains: a process for each device, or one for each node that drives all of its devices."""
    samples_per_step: str | int | None = None
    """Samples that a step of all ranks trains on: a number, or an expression of names in braces."""
    tokens_per_step: str | int | None = None
    """Likewise, of language models."""
    warmup_steps: Annotated[int, Meta(ge=2, le=1_000_000)] = 10
    """The first steps: no window holds them."""
    steps: Annotated[int, Meta(ge=1, le=10_000_000)] | None = 100
    """Steps that are timed; null: as many as the program takes until it ends."""
    windows: Annotated[int, Meta(ge=1, le=1000)] = 4
    """Equal parts of these steps."""
    on_enough: Literal["term", "kill"] = "term"
    """The signal by which it is ended."""
    steps_by: Literal["optimizer", "pattern", "mark", "command"] = "optimizer"
    """What tells a step. optimizer: the end of an update by torch's optimizers. pattern: a line of output. mark: a line
    that the program writes to the file that PARALLELBENCH_MARK names. command: the whole command is one step."""
    optimizer: Annotated[int, Meta(ge=0, le=1000)] | None = None
    """Whose updates are steps, by the order of their first; null: each backward pass's first update."""
    step_pattern: Pattern | None = None
    """Of `steps_by=pattern`: lines of the output that it matches are steps."""
    loss_pattern: Pattern | None = None
    """Its group is a loss that the program prints."""
    rate_pattern: Pattern | None = None
    """Its group is the rate that the program prints, in samples, or else tokens, per second."""
    start_timeout_s: Seconds = 1800.0
    """Longest time to the first step."""
    axes: dict[str, Word | list[Word]] = field(default_factory=dict)
    """Names of the user's own in the command → one word, or several."""
    sources: str = ""
    """Identifies what the files in the folder hold."""
    files: dict[str, str] = field(default_factory=dict)
    """Path → digits of what it holds, of the files that `sources` is made of: so that a change is told by name."""

    def __post_init__(self) -> None:
        """Check what involves several options, and the names in braces."""
        for key in ("step_pattern", "loss_pattern", "rate_pattern"):
            _check_pattern(key, getattr(self, key), groups=0 if key == "step_pattern" else 1)
        if (self.steps_by == "pattern") != (self.step_pattern is not None):
            raise ConfigError(
                "program.steps_by=pattern and program.step_pattern=REGEX belong together: give both, or neither"
            )
        if self.steps is not None and self.steps_by != "command" and self.steps % self.windows:
            near = max(self.windows, round(self.steps / self.windows) * self.windows)
            raise ConfigError(
                f"program.steps={self.steps} can't be divided into program.windows={self.windows}: choose "
                f"program.steps={near}, or program.windows=1"
            )
        if odd := [name for name in self.axes if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in PLACES]:
            raise ConfigError(
                f"program.axes.{odd[0]} is refused: a name of small letters, digits and underscores that is none of "
                f"{', '.join(PLACES)}"
            )
        unused = [name for name in self.axes if f"{{{name}}}" not in " ".join([self.command, *self.setup])]
        if unused:
            raise ConfigError(f"program.axes.{unused[0]} stands nowhere: write {{{unused[0]}}} into program.command")
        for key, text in (("command", self.command), *(("setup", line) for line in self.setup)):
            filled(text, dict.fromkeys((*PLACES, *self.axes), "1"), key=f"program.{key}")
        for key in ("samples_per_step", "tokens_per_step"):
            _check_amount(getattr(self, key), (*NUMBERS, *self.axes), key=f"program.{key}")

    def identified(self) -> Program:
        """With its folder, and what the files there hold; each folder is read once."""
        folder = self.working_folder
        found = _sources(folder)
        return msgspec.structs.replace(self, folder=str(folder), sources=found.identity, files=dict(found.files))

    def require_sources(self) -> None:
        """Raise `ConfigError` where the folder's files are others than when the run was asked for."""
        _sources.cache_clear()
        if self.sources and (found := _sources(self.working_folder)).identity != self.sources:
            raise ConfigError(
                f"{self.changes(self.identified()) or 'the program'} in {self.working_folder} changed since this run "
                f"was asked for ({self.sources} then, {found.identity} now): submit again, which makes a new run"
            )

    def changes(self, later: Program) -> str:
        """Names of the files in which the sources of a later state of the program are others; empty: not known."""
        from parallelbench.frameworks.program.sources import Sources, changed_files

        states = [Sources(each.sources, each.files) for each in (self, later)]
        names = changed_files(later.working_folder, *states)
        more = f" and {count_of(len(names) - 3, 'more file')}" if len(names) > 3 else ""
        return ", ".join(names[:3]) + more

    @property
    def working_folder(self) -> Path:
        """Where it runs."""
        return expanded(self.folder or ".", "program.folder").absolute()

    @property
    def window_steps(self) -> int | None:
        """Steps of a window; None where that is known once the program has ended."""
        return None if self.steps is None else self.steps // self.windows

    @property
    def enough(self) -> int | None:
        """Steps after which the program is ended; None: it ends by itself."""
        return None if self.steps is None or self.steps_by == "command" else self.warmup_steps + self.steps

    def processes(self, run: RunConfig, device_type: str) -> int:
        return run.devices if self.one_process_per == "device" else run.nodes

    def data_parallel_degree(self, run: RunConfig) -> int:
        """Unknown; nothing is cut here."""
        return 1

    def equals_one_device(self, run: RunConfig) -> bool:
        """Unknown: there is no parity."""
        return False

    def brings(self, name: str) -> dict[str, Any]:
        """What a run of this program has in place of `NOT_KEYS` and of a model."""
        usual = shipped("measure", "default") or {}
        windows = self.windows if self.steps_by != "command" else 1
        return _stand_ins() | {
            "model": {"_target_": f"{__name__}.OwnProgram", "name": name, "steps_by": self.steps_by},
            "epochs": 1 + windows,
            "measure": {key: usual[key] for key in NOT_MEASURED} | {"parity": False},
        }

    def own_columns(self, run: RunConfig) -> dict[str, Any]:
        """Columns of the `run` table: nothing is known of what a program computes, but what a step holds."""
        window = self.window_steps or 0
        samples = amount(self.samples_per_step, numbers(run), key="program.samples_per_step")
        tokens = amount(self.tokens_per_step, numbers(run), key="program.tokens_per_step")
        return dict.fromkeys(_UNKNOWN) | {
            "steps_per_epoch": window,
            "train_samples": None if samples is None else samples * window,
            "dropped_samples": None if samples is None else 0,
            "global_batch_size": samples,
            "tokens_per_sample": tokens // samples if samples and tokens and tokens % samples == 0 else None,
        }

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        """Launchers that fork or train in their own process, and numbers that don't divide."""
        yield (
            run.launcher.packed,
            "launcher.pack=true is refused with a program: only the suite's own processes are forked",
            ("launcher.pack=false",),
        )
        yield (
            run.launcher.in_this_process,
            "launcher=inline is refused with a program, which is a process of its own",
            ("launcher=local",),
        )
        yield (
            run.nodes > 1 and self.steps_by == "pattern",
            f"program.steps_by=pattern with nodes={run.nodes} is refused: a launcher prints the steps of one node's "
            "ranks, and the other nodes would wait for lines; optimizer, mark (a line from each rank, with its number) "
            "and command count on each node",
            (on_one_node(run),),
        )
        per_device = "{batch_size_per_device}" in " ".join([self.command, *self.setup])
        yield (
            per_device and run.global_batch_size % run.devices,
            f"batch_size={run.batch_size} can't be divided by devices={run.devices}, as {{batch_size_per_device}} asks",
            ("batch_size",),
        )

    def check(self, run: RunConfig, device_type: str) -> None:
        """Its rules, and whether its command can be started."""
        from parallelbench.frameworks.program.command import require_command

        super().check(run, device_type)
        require_command(run, os.environ)

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        raise NotImplementedError("a program trains by itself")


class OwnProgram(Model, frozen=True, kw_only=True):
    """Stands for the model of a program. What tells a step is a part of the work: only like is compared with like."""

    steps_by: str

    @property
    def layer_names(self) -> tuple[str, ...]:
        return ()

    def build(self, *, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
        raise NotImplementedError("a program has a model of its own")


class OwnData(Data, frozen=True, kw_only=True):
    """Stands for the data of a program."""

    mean: ClassVar[tuple[float, ...]] = (0.0,)
    std: ClassVar[tuple[float, ...]] = (1.0,)
    flip: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, 1, 1)

    @property
    def num_classes(self) -> int:
        return 1

    @property
    def train_samples(self) -> int:
        return 0

    @property
    def test_samples(self) -> int:
        return 0

    def load(self, data_dir: Path) -> Arrays:
        raise NotImplementedError("a program reads data of its own")


@cache
def _sources(folder: Path) -> Sources:
    from parallelbench.frameworks.program.sources import sources_of

    if not folder.is_dir():
        raise ConfigError(f"program.folder={folder} is no folder")
    return sources_of(folder)


@cache
def _stand_ins() -> dict[str, Any]:
    """What stands for the components and settings of `NOT_KEYS`, and does nothing."""
    chosen = {"optimizer": "adagrad", "lr_schedule": "constant", "loss": "cross_entropy", "metric": "none"}
    settings = shipped("", "config") or {}
    return {
        "data": {"_target_": f"{__name__}.OwnData", "name": "own", "augment": False},
        **{group: shipped(group, name) for group, name in (chosen | {"loader": "resident"}).items()},
        **{key: settings[key] for key in NOT_KEYS if key in settings},
    }


_UNKNOWN = (
    *("data", "optimizer", "loader", "precision", "channels_last", "compile", "learning_rate"),
    *("test_samples", "parameters", "preprocess_engine", "deterministic", "detect_anomaly"),
)

NUMBERS: tuple[str, ...] = (
    *("devices", "nodes", "devices_per_node", "cores_per_device", "batch_size", "global_batch_size"),
    *("batch_size_per_device", "seed", "repeat"),
)
"""Names in braces that stand for numbers of the run."""
PLACES: tuple[str, ...] = (*NUMBERS, "node_rank", "head", "port", "attempt")
"""All of the suite's: also the node's number, host and port where the nodes meet, a folder of the attempt's own."""


def numbers(run: RunConfig) -> dict[str, str]:
    """What `NUMBERS` stand for in a run, and the program's own names."""
    found = {
        "devices": run.devices,
        "nodes": run.nodes,
        "devices_per_node": run.devices // run.nodes,
        "cores_per_device": run.cores_per_device,
        "batch_size": run.batch_size,
        "global_batch_size": run.global_batch_size,
        "batch_size_per_device": run.global_batch_size // run.devices,
        "seed": run.effective_seed,
        "repeat": run.repeat,
    }
    axes: Mapping[str, Any] = getattr(run.strategy, "axes", {})
    return {name: str(value) for name, value in found.items()} | {name: words(value) for name, value in axes.items()}


def words(value: Any) -> str:
    """A value as words of a shell: a list as several, text as one, with quotes where it needs them."""
    return " ".join(map(words, value)) if isinstance(value, list) else shlex.quote(_as_text(value))


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_NAMED = re.compile(r"\{\{|\}\}|(?<!\$)\{([^{}]*)\}")


def filled(text: str, values: Mapping[str, str], *, key: str) -> str:
    """The text with names in braces replaced; `{{` and `}}` are braces. Raises `ConfigError` for an unknown name."""

    def replaced(found: re.Match[str]) -> str:
        if (name := found[1]) is None:
            return found[0][0]
        if name not in values:
            raise ConfigError(
                f"{key}: {{{name}}} names nothing: give it words, {name}=WORD, or take one of the suite's "
                f"({choices(name, values)}); two braces, {{{{ and }}}}, stand for one"
            )
        return values[name]

    return _NAMED.sub(replaced, text)


def named(text: str) -> set[str]:
    """The names of the user's own in braces."""
    return {found[1] for found in _NAMED.finditer(text) if found[1]} - {*PLACES}


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Mult: operator.mul,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.FloorDiv: operator.floordiv,
}


def amount(value: str | int | None, values: Mapping[str, str], *, key: str) -> int | None:
    """A number of samples or tokens: whole numbers, names in braces, and * + - // between them."""
    if value is None:
        return None
    try:
        found = value if isinstance(value, int) else _computed(_parsed(value, values, key=key))
    except (ValueError, ZeroDivisionError):
        found = 0
    if found < 1:
        raise ConfigError(_no_amount(key, value))
    return found


def _check_amount(value: str | int | None, names: Sequence[str], *, key: str) -> None:
    """Raise `ConfigError` for what is no amount whatever its names stand for."""
    if isinstance(value, int):
        amount(value, {}, key=key)
    elif value is not None:
        for node in ast.walk(_parsed(value, dict.fromkeys(names, "1"), key=key)):
            known = isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS
            if not (known or _is_whole(node) or isinstance(node, tuple(_OPERATORS))):
                raise ConfigError(_no_amount(key, value))


def _parsed(value: str, values: Mapping[str, str], *, key: str) -> ast.expr:
    try:
        return ast.parse(filled(value, values, key=key).strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        raise ConfigError(_no_amount(key, value)) from None


def _no_amount(key: str, value: str | int) -> str:
    return (
        f"{key}={value} is no number of 1 or more: write whole numbers and names in braces, with * + - // between "
        "them, e.g. '{batch_size} * 4'"
    )


def _is_whole(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_computed(node.left), _computed(node.right)))
    raise ValueError


def _check_pattern(key: str, pattern: str | None, *, groups: int) -> None:
    if pattern is None:
        return
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"program.{key}={pattern} is no regular expression: {error}") from None
    if compiled.groups < groups:
        raise ConfigError(f"program.{key}={pattern} has no group: put parentheses around the number")
