"""The parts of docs/ that follow from the code: `python -m tests.docs` writes them, and a test compares."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from analysis.claims import publications
from analysis.comparison.history import metrics
from analysis.metrics.columns import (
    PAIRS,
    PER_CONFIGURATION,
    PER_FACT,
    epoch_aggregates,
    per_epoch_columns,
    per_run_columns,
    row_aggregates,
    run_aggregates,
)
from launch.sweep import one_run
from launch.sweep.compose import NOTHING, group_choices
from launch.verbs.arguments import command_line_parser
from launch.verbs.help import MOST_DEFAULTS, chosen_by_default, keys
from parallelbench.config.run import RunConfig
from parallelbench.config.run_rules import check_run
from parallelbench.errors import ConfigError
from parallelbench.results.attempt import DISTURBED, OUTCOMES
from parallelbench.results.declaration import Column
from parallelbench.results.tables import TABLES, TABLES_VERSION
from tests import mutants, published_figures
from tests.faults import faults

DOCS = Path(__file__).resolve().parents[1] / "docs"

_INTRO = f"""# Results: what the tables hold

This page is generated from the declarations in `parallelbench/results/` and `analysis/metrics/` by
`python -m tests.docs`. Version {TABLES_VERSION} of the tables.

A finished run publishes one Parquet file per table in `<results>/<sweep>/<run>/result/`, all at once, with
`manifest.json` last: sha256, bytes and rows of each file, the attempt, the outcome. Ranks write what they measured;
speed-ups, medians and sums over ranks are computed in `analysis/metrics/` only. Epochs and steps count from 1. A share
is from 0 to 1. Null means *not measured*, never 0; a column without a word on null is never null. Each file's metadata
hold its columns' meanings and units, too.

| table | one row per |
|---|---|
| `run` | run |
| `epochs` | epoch |
| `ranks` | rank and epoch |
| `steps` | sampled step, rank and epoch |
| `parity` | step of the parity check |
| `checks` | thing that was checked during or after training, or was not |
| `pushes` | update sent to a parameter server |
| `telemetry` | sample of a GPU, or of a host |
| `phases` | step of the pass after the last epoch, and rank |
| `preprocess` | execution of the recipe that prepares the training set |
"""
_DERIVED = """# Derived columns

`analysis` computes them from the tables above. A number's name says which it is: `epoch_time_s` is one rank's,
`slowest_epoch_time_s` an epoch's, `steady_epoch_time_s` a run's, and in `summary` the median over repeats. *Of* names
the column that a plain aggregate is made of; *over repeats* says how the runs of a configuration become a row of
`summary`.
"""


def results_page() -> str:
    """docs/results.md."""
    parts = [_INTRO]
    for table, columns in TABLES.items():
        parts += [f"## `{table}`\n", _table(("column", "type", "unit", "meaning", "null"), map(_raw, columns))]
    parts.append(_DERIVED)
    plain = [*epoch_aggregates(), *run_aggregates(), *(pair for pairs in row_aggregates().values() for pair in pairs)]
    sources = {column.name: f"{column.over} of `{source.name}`" for source, column in plain}
    head = ("column", "unit", "meaning", "null", "of", "over repeats")
    for title, derived in (
        ("`per_epoch`: one row per epoch", per_epoch_columns()),
        ("`per_run`: one row per run", per_run_columns()),
        ("`facts`: `run` and `per_run` with these", PER_FACT),
        ("`summary`: one row per configuration; what aggregates over repeats above, and these", PER_CONFIGURATION),
        ("`tables/pairs.csv`: one row per two configurations of one work on equally many devices", PAIRS),
    ):
        rows = [(*_named(column), sources.get(column.name, ""), column.repeats or "") for column in derived]
        parts += [f"## {title}\n", _table(head, rows)]
    return "\n".join(parts)


def _raw(column: Column) -> tuple[str, ...]:
    name, *others = _named(column)
    return (name, column.type, *others)


def _named(column: Column) -> tuple[str, ...]:
    return (f"`{column.name}`", column.unit or "", column.meaning, column.null or "")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows)
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {line} |" for line in lines), ""])


_STRATEGIES_INTRO = """# Strategies: what is possible

This page is generated from the strategies' own rules by `python -m tests.docs`; [which to
choose](choosing-a-strategy.md) is another one. A cell names the device counts (of 1, 2, 4 and 8) at which a strategy
with its default options takes a model, of 96 samples in one batch; – means refused, for a reason below the table. The
optimizer is Adam, but for what the first table says a strategy needs. `parallelbench show strategy=NAME` lists the
options, which may widen or narrow this.
"""

_DEVICES = (1, 2, 4, 8)
_NEEDS = {
    "data_parallel": "GPUs",
    "downpour": "`optimizer=adagrad`, as in the paper, or `sgd` with `optimizer.momentum=0.0`",
    "sandblaster_lbfgs": "`optimizer=lbfgs`, and the training set as the batch",
}
OPTIMIZERS = {"downpour": "adagrad", "sandblaster_lbfgs": "lbfgs"}

_MODELS = {
    "mlp": ["data.channels=1"],
    "cnn_small": ["data.channels=1", "data.image_size=28"],
    "cnn_large": ["data.channels=1", "data.image_size=28"],
    "logistic_regression": [],
    "cnn": [],
    "resnet50": [],
    "vit": [],
    "vit_b_16": [],
    "gpt_tiny": ["data=tokens"],
    "gpt_moe_tiny": ["data=tokens"],
}


def strategies_page() -> str:
    """docs/strategies.md."""
    names = group_choices()["strategy"]
    parts = [_STRATEGIES_INTRO, "| strategy | what it does | needs |", "|---|---|---|"]
    parts += [f"| `{name}` | {_summary(name)} | {_NEEDS.get(name, '')} |" for name in names]
    reasons: dict[str, list[str]] = {}
    head = ["strategy", *(f"`{model}`" for model in _MODELS)]
    parts += ["", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in names:
        cells = [_possible(name, model, options, reasons) for model, options in _MODELS.items()]
        parts.append(f"| `{name}` | {' | '.join(cells)} |")
    parts += ["", _WHY_NOT_INTRO, *_kinds(reasons), "", *_updates()]
    return "\n".join(parts)


_WHY_NOT_INTRO = """## Why not

A line for each kind of reason: who refuses, and one of the messages.
"""


def _kinds(reasons: Mapping[str, list[str]]) -> Iterator[str]:
    """Messages → who says so: one line for those that differ in values only."""
    kinds: dict[str, tuple[str, list[str]]] = {}
    for message, strategies in reasons.items():
        words = re.sub(r"\([^)]*\)|=[\w.]+", "", message.partition(": ")[0])
        words = re.sub(r"\d+ \w+?s?\b|\d+", "…", words)  # 1 layer, 4 layers
        kinds.setdefault(words, (message, []))[1].extend(strategies)
    for message, strategies in kinds.values():
        yield _item(f"{', '.join(f'`{name}`' for name in dict.fromkeys(strategies))}: {message}")


_UPDATES = (
    *(f"lr_schedule={name}" for name in group_choices()["lr_schedule"] if name != "constant"),
    "clip_norm=1.0",
    *(f"loss={name}" for name in group_choices()["loss"] if name != "cross_entropy"),
    "loss.label_smoothing=0.1",
    "metric=top5",
)
_UPDATES_INTRO = """## Schedules, clipping, losses, metrics

What strategies with their default options don't take of these. Those that are not in the table take all of them.
"""


def _updates() -> Iterator[str]:
    """A table of what changes updates: who doesn't take all of it, and below it why."""
    reasons: dict[str, list[str]] = {}
    rows = []
    for name in group_choices()["strategy"]:
        (model, devices), cells = model_and_devices(name), []
        for option in _UPDATES:
            error = _refusal(_configured(name, model, [*_MODELS[model], option]), devices)
            cells.append("–" if error else "yes")
            if error:
                reasons.setdefault(error.splitlines()[0], []).append(name)
        if "–" in cells:
            rows.append((f"`{name}`", *cells))
    yield _UPDATES_INTRO
    yield _table(("strategy", *(f"`{option}`" for option in _UPDATES)), rows)
    yield from _kinds(reasons)
    yield ""


def model_and_devices(strategy: str) -> tuple[str, int]:
    """The first model, and the fewest devices, that a strategy with its default options takes."""
    runs = {model: _configured(strategy, model, options) for model, options in _MODELS.items()}
    return next((model, devices) for model, run in runs.items() for devices in _DEVICES if not _refusal(run, devices))


def _refusal(run: RunConfig, devices: int) -> str:
    """Why a run on so many devices is refused; empty: it is not."""
    # nn.DataParallel exists on GPUs only.
    device_type = "cuda" if run.strategy.name == "data_parallel" else "cpu"
    try:
        check_run(msgspec.structs.replace(run, devices=devices), device_type)
    except ConfigError as error:
        return error.reason
    return ""


def _item(text: str) -> str:
    """One point of a list, in lines of at most 120 characters."""
    return textwrap.fill(f"- {text}", 120, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def _configured(strategy: str, model: str, options: list[str]) -> RunConfig:
    own = ["batch_size=96", "data.train_samples=96", f"optimizer={OPTIMIZERS.get(strategy, 'adam')}"]
    chosen = [] if any(option.startswith("data=") for option in options) else ["data=synthetic"]
    return one_run([*chosen, *own, f"model={model}", f"strategy={strategy}", *options]).run


def _possible(strategy: str, model: str, options: list[str], reasons: dict[str, list[str]]) -> str:
    """A cell of the table; `reasons`: why not → the strategies that say so."""
    run, possible = _configured(strategy, model, options), []
    for devices in _DEVICES:
        if not (error := _refusal(run, devices)):
            possible.append(str(devices))
        elif devices > 1 and strategy != "single":
            for line in error.splitlines():
                reasons.setdefault(line, []).append(strategy)
    return ", ".join(possible) or "–"


def _summary(name: str) -> str:
    strategy = type(one_run([f"strategy={name}"]).run.strategy)
    if (
        re.sub(r"(?<!^)(?=[A-Z])", "_", strategy.__name__).lower() != name
    ):  # a variant: the first comment of its own file
        first = (DOCS.parent / "conf" / "strategy" / f"{name}.yaml").read_text().partition("\n")[0]
        assert first.startswith("# "), f"{name}.yaml doesn't say what it is"
        return first.removeprefix("# ")
    return (inspect.getdoc(strategy) or "").split("\n\n")[0].replace("\n", " ")


_RELIABILITY_INTRO = """# Reliability: what is survived, and what numbers were held against

This page is generated from the tests by `python -m tests.docs`. Each line is a test that injects the fault, on a real
Slurm cluster or with real processes, and asserts the outcome. `make test-slurm` runs those in `tests/slurm/`,
`make test` the others. On one GPU, resumption and a lack of memory were tried ([GPUs](gpus.md)); all other faults were
not run on a GPU.
"""
_KINDS = Path(__file__).with_name("kinds_of_faults.md")
EVIDENCE = Path(__file__).with_name("evidence.md")
"""Written by hand, as is `_KINDS`."""
_AREAS = ("numbers", "submission", "lifecycle", "workers", "storage and input")


def reliability_page() -> str:
    """docs/reliability.md."""
    found = list(faults())
    assert {fault.area for fault in found} <= set(_AREAS), f"areas: {_AREAS}"
    parts = [_RELIABILITY_INTRO, _KINDS.read_text(), EVIDENCE.read_text()]
    for area in _AREAS:
        parts.append(
            f"## {area.capitalize()}\n\n| fault | how it is injected | what comes of it | test |\n|---|---|---|---|"
        )
        own = [fault for fault in found if fault.area == area]
        parts += [f"| {fault.name} | {fault.injection} | {fault.outcome} | `{fault.test}` |" for fault in own]
        parts.append("")
    return "\n".join([*parts, *_mutants()])


_MUTANTS_INTRO = """## Mutants

`make mutants` changes the source at places that are drawn at random, and runs the tests of `make test` near each, up to
the first failure. This is what it found last; the source may have changed since. Faults of a whole strategy are in
`tests/planted.py`; `tests/test_closing.py` has which check must see each.

| where | change | first failure |
|---|---|---|"""


def _mutants() -> Iterator[str]:
    yield _MUTANTS_INTRO
    for mutant, failed in mutants.found().items():
        where, change = (part.replace("|", "\\|") for part in mutant.split(": ", 1))
        places = " ".join(f"`{place}`" for place in where.split())
        test = f"`{failed.partition('[')[0]}`" if failed else "none"
        yield f"| {places} | `{change}` | {test} |"
    yield ""


_COMMANDS_INTRO = """# Commands

This page is generated from the program's own help by `python -m tests.docs`. The commands that a first day needs are in
[the first hour](first-hour.md). `OVERRIDE` is `key=value` in
[Hydra's grammar](https://hydra.cc/docs/advanced/override_grammar/basic/): `parallelbench show` lists the keys and their
choices, `parallelbench help KEY` explains one, `--help` after a command its options. With `plan` and `submit` a value
may be a list. A mistyped name gets the valid ones, nearest first.

```
parallelbench submit model=cnn_small,cnn_large strategy=ddp devices=1,2 sweep.repeats=6
parallelbench submit sweep=strategy_comparison_small          # every strategy side by side
parallelbench prepare data=mnist                              # once
parallelbench submit sweep=tune model=cnn_large               # which precision, layout and loader are fastest?
parallelbench submit loader=resident,dataloader,streamed      # how samples get into batches
parallelbench submit sweep=demo device=cuda launcher=slurm site=asu_sol  # one Slurm job per run
parallelbench report results/demo --figure scaling --width 85 # one figure for a paper, as PDF, SVG and PNG
parallelbench compare results/before results/after --fail-if-slower 3%  # a gate for continuous integration
parallelbench compare results/demo --by strategy=ddp,model_parallel     # two values of a key
parallelbench history results --where strategy=ddp --since 2026-11-01   # where did it become slower?
parallelbench advise model=cnn_large data=synthetic devices=1,2         # which strategy, and what to measure next
parallelbench bundle results/demo                             # one archive for a publication
```

**Exit codes**: 0 success; 1 a run failed (also under `status --watch` and `logs --follow`), `compare --fail-if-slower`
found a configuration slower, `history` a metric worse, or something in `rerun` does not agree; 2 the request is
invalid, or can't be judged; 130 interrupted; 141 the reader of its output is gone.

**In Python**: `from analysis import load; load("results/demo").epochs`.

**TAB** completes verbs, options, choices, keys and folders, by [argcomplete](https://kislyuk.github.io/argcomplete/),
after one line in each shell, or in its own file with the program's path written out:

```
eval "$(register-python-argcomplete parallelbench)"                    # bash; zsh after compinit
register-python-argcomplete --shell fish parallelbench | source        # fish
```

"""


def commands_page() -> str:
    """docs/commands.md."""
    parser, _ = command_line_parser()
    (verbs,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    rows = []
    for verb in verbs._choices_actions:
        taken = [_argument(action) for action in verbs.choices[verb.dest]._actions if action.dest != "help"]
        rows.append((f"`{verb.dest}`", verb.help or "", ", ".join(f"`{argument}`" for argument in taken)))
    return _COMMANDS_INTRO + _table(("command", "what it does", "takes"), rows)


def _argument(action: argparse.Action) -> str:
    """As usage names it, e.g. `--out DIR`; of few values these."""
    value = "" if action.nargs == 0 else action.metavar or "|".join(map(str, action.choices or ()))
    return " ".join(filter(None, [*action.option_strings[:1], str(value)]))


_OPTIONS_INTRO = """# Options: every key of a run

This page is generated from the keys' own declarations by `python -m tests.docs`. `parallelbench help KEY` prints the
same of one key, of your own components too.
"""


def options_page() -> str:
    """docs/options.md."""
    rows = []
    for key, about in sorted(keys(NOTHING).items()):
        if key.endswith(".name"):  # the choice itself
            continue
        meanings, defaults = map(_by_choice, (about.meanings, about.defaults))
        rows.append((f"`{key}`", meanings.replace("\n", " "), about.values, defaults))
    return _OPTIONS_INTRO + "\n" + _table(("key", "what it means", "values", "default"), rows)


def _by_choice(words: dict[str, list[str]]) -> str:
    """Each text with the choices that it holds for, as far as anybody reads on."""
    if len(words) > MOST_DEFAULTS:
        return "each file's own"
    few = len({name for of in words.values() for name in of}) <= MOST_DEFAULTS
    return "; ".join(f"{text} ({', '.join(of)})" if few and any(of) else text for text, of in words.items())


def known_words() -> str:
    """launch/known.json: what shells offer at TAB, and wrong keys may mean, where nothing is loaded that knows it."""
    own = {key: about for key, about in keys(NOTHING).items() if key == "sweep.name" or not key.endswith(".name")}
    nodes = {key.rpartition(".")[0] for key in own}
    lines = {}
    for key, about in sorted(own.items()):
        if key not in nodes:
            of = {name for names in about.meanings.values() for name in names if name}
            lines[key] = {"of": sorted(of), "values": about.options}
    words = {
        "OUTCOME,…": [*(name for name in OUTCOMES if name != "ok"), DISTURBED],
        "CLAIM": sorted(claim.name for publication in publications() for claim in publication.claims),
        "METRIC": sorted(metrics()),
    }
    parts = [f'"chosen": {json.dumps(chosen_by_default())}']
    parts += [f'"{name}": {{\n{_json_lines(of)}\n}}' for name, of in (("keys", lines), ("words", words))]
    return "{" + ",\n".join(parts) + "}\n"


def _json_lines(content: Mapping[str, object]) -> str:
    return ",\n".join(f"{json.dumps(key, ensure_ascii=False)}: {json.dumps(value)}" for key, value in content.items())


PAGES = {"results.md": results_page, "strategies.md": strategies_page, "commands.md": commands_page}
PAGES |= {"../launch/known.json": known_words}
SITE_PAGES = {"options.md": options_page, "reliability.md": reliability_page, "seed-figures.md": published_figures.page}
"""Pages that only `make site` has: nobody keeps them."""

if __name__ == "__main__":
    for name, page in (PAGES | SITE_PAGES).items():
        (DOCS / name).write_text(page())
