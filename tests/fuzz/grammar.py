"""Commands by a grammar: words that are right, nearly right, or meant to hurt. The same seed makes the same ones."""

from __future__ import annotations

import random
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

KEYS = (
    *("epochs", "devices", "nodes", "batch_size", "seed", "repeat", "device", "precision", "scaling", "compile"),
    *("optimizer.lr", "optimizer.momentum", "strategy.bucket_mib", "measure.parity", "site.partition", "data.files"),
    *("site.data_dir", "launcher.timeout_s", "sweep.repeats", "sweep.name", "sweep.blocks", "nccl.backend"),
    *("preprocess.engine", "model._target_", "results", "site.setup", "site.modules"),
)
GROUPS = (
    *("model", "data", "strategy", "optimizer", "lr_schedule", "loss", "metric", "loader", "measure"),
    *("launcher", "site", "sweep"),
)
CHOICES = (
    *("cnn", "mlp", "digits", "synthetic", "ddp", "single", "fsdp", "adam", "sgd", "local", "slurm"),
    *("demo", "debug"),
)
WRONG_KEYS = (
    *("epohcs", "lr", "optimizer", "optimizer.", ".lr", "a.b.c", "hydra.run.dir", "hydra/launcher", "experiment", ""),
    *(
        "data.files.x",
        "sweep_name",
        "model.model",
        "+",
        "~",
        "~epochs",
        "+epochs",
        "++epochs",
        "@a",
        "model@b",
        "0",
        "é",
    ),
)
VALUES = (
    *("1", "0", "-1", "2", "1.5", "1e3", "1e400", "-inf", "nan", "null", "true", "false", "''", "' '", "x", "é日本"),
    *("1,2", "1,1", "range(1,3)", "range(1,1e9)", "choice(1,2)", "interval(0,1)", "glob(*)", "[1,2]", "[[1]]", "{a:1}"),
    *("{a:{b:[1,{c:2}]}}", "[{grid:{epochs:[1]}}]", "[{grid:{epochs:1}},{zip:{a:[1],b:[1,2]}}]", "${epochs}", "${x.y}"),
    *("${results}", "${oc.env:HOME}", "${hydra:runtime.cwd}", "${", "???", "$HOME", "~", "../../up", "/dev/null/x"),
    "a b",
    *("a;rm -rf x", "$(touch x)", "`x`", "os.system", "parallelbench.errors.ConfigError", "%s%n", "[/red]", "[bold]x"),
    *("9" * 400, "x" * 3000, "[" * 30 + "]" * 30, "'" + "\u202e" + "'", "\\", "'a\\'", '"', "=", "a=b", "#", "a\tb"),
)
OPTIONS = (
    *("--conf", "--plugin", "--retry", "--max-gpu-hours", "--json", "--watch", "--all", "--out", "--by", "--across"),
    *("--fail-if-slower", "--file", "--follow", "--then", "-m", "--multirun"),
    *("--cfg", "-x", "--", "-", "---"),
    *("--conf=", "--json=1", "--fast", "--fail-if-slower=3%", "--fail-if-slower=x", "--by=strategy=ddp,fsdp", "--by=a"),
)
LINES = (
    *("---", "...", "a: !!python/object/apply:os.system [ls]", "b: &x [*x]", "<<: {a: 1}", "\tx: 1", "? [a]", ": "),
    *("name: other", "defaults: [nothing]", "defaults: [_self_, _self_]", "- 1", "a: b: c", "_target_: os.system"),
    *("%YAML 9", "\ufeffname: x", "x: a\u2028b", "\u202ename: x", "\u00a0name: x", "é日本: 1", "x: '\x1b[31m'"),
    *("x: \x00", "#" * 9999),
)
SHIPPED = (
    *("model/mlp", "model/cnn_small", "data/digits", "data/synthetic", "strategy/ddp", "strategy/pipeline"),
    *("optimizer/adam", "loss/cross_entropy", "loader/dataloader", "sweep/demo", "site/default", "measure/default"),
)
"""Files that are copied with something wrong in each."""
CONFIGURED = ("plan", "show", "submit", "run")
ON_FOLDERS = ("status", "logs", "cancel", "forget", "claims", "compare")
NEVER = "results=/dev/null/x"
"""Whoever would train is refused: nothing can be written there."""


@dataclass(frozen=True)
class Command:
    """The words, and the folders that it may write to."""

    words: tuple[str, ...]
    writes: tuple[str, ...] = ()


class Grammar:
    """Makes commands about folders that the caller has prepared."""

    def __init__(self, seed: int, folders: list[str], files: list[str], confs: Path) -> None:
        self._draw, self._confs, self._made = random.Random(seed), confs, 0
        self._folders, self._files = folders, files

    def override(self) -> str:
        """One override, mostly of a key that exists, and mostly with a value that it can't have."""
        kind = self._draw.random()
        if kind < 0.3:
            value = self._draw.choice([*CHOICES, "nothing", "mlp,nothing", *self._draw.sample(VALUES, 3)])
            return f"{self._draw.choice(GROUPS)}={value}"
        key = self._draw.choice(KEYS if kind < 0.8 else WRONG_KEYS)
        return self._draw.choice((f"{key}={self._draw.choice(VALUES)}",) * 9 + (key,))

    def configured(self) -> Command:
        """A verb that takes overrides; it can't start anything."""
        verb = self._draw.choice(CONFIGURED)
        words = [self.override() for _ in range(self._draw.choice((1, 1, 2, 3)))]
        return Command((verb, *words, NEVER, *self._options(0.2)))

    def own(self) -> Command:
        """A plan of a file of one's own: one of the suite's, changed in a line or two."""
        group, name = self._draw.choice(SHIPPED).split("/")
        lines = (resources.files("conf") / group / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        for _ in range(self._draw.choice((1, 1, 2))):
            self._spoil(lines)
        content = "\n".join(lines).encode()
        if self._draw.random() < 0.1:
            content = content[: self._draw.randrange(len(content))] + b"\xe9"
        self._made += 1
        folder = self._confs / f"conf{self._made}"
        (folder / group).mkdir(parents=True)
        (folder / group / "mine.yaml").write_bytes(content)
        return Command(("plan", "--conf", str(folder), f"{group}=mine", NEVER))

    def _spoil(self, lines: list[str]) -> None:
        place = self._draw.randrange(len(lines))
        how = self._draw.choice(("line", "line", "value", "value", "gone", "twice", "deeper", "cut"))
        if how == "line":
            lines.insert(place, self._draw.choice(LINES))
        elif how == "value":
            lines[place] = f"{lines[place].partition(':')[0]}: {self._draw.choice(VALUES)}"
        elif how == "twice":
            lines.insert(place, lines[place])
        elif how == "deeper":
            lines[place] = f" {lines[place]}"
        else:
            lines[place] = "" if how == "gone" else lines[place][: len(lines[place]) // 2]

    def on_folder(self) -> Command:
        """A verb that reads a folder, whole or corrupted."""
        verb = self._draw.choices(ON_FOLDERS, (8, 4, 2, 2, 1, 1))[0]
        folders = [self._draw.choice(self._folders)]
        options = self._options(0.15)
        if verb == "compare":
            two = self._draw.random() < 0.5
            folders += [self._draw.choice(self._folders)] if two else []
            options += (
                () if two else ("--by", self._draw.choice(("strategy=ddp,fsdp", "devices=1,2", "x=", "=", "a=b,c,d")))
            )
        if verb == "claims" and self._draw.random() < 0.3:
            options += ("--file", self._draw.choice(self._files))
        return Command((verb, *folders, *options), tuple(folders) if verb == "forget" else ())

    def _options(self, share: float) -> tuple[str, ...]:
        if self._draw.random() > share:
            return ()
        option = self._draw.choice([each for each in OPTIONS if each != "--watch"])
        return (option, *([self._draw.choice(VALUES)] if self._draw.random() < 0.5 else []))
