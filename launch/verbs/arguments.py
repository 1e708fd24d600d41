"""The command line: a table of its verbs, and the parser that follows from it. Loads nothing heavy."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Verb:
    """What one verb does, and what it takes.

    `function` is the `module:function` of what does it, below `launch`: with one keyword for each argument, and
    `extension` in the place of --conf and --plugin.
    """

    def __init__(self, function: str, text: str, *arguments: Argument, epilog: str = "") -> None:
        self.function, self.text, self.arguments, self.epilog = function, text, arguments, epilog


class Argument:
    """A positional argument or an option, as `argparse` declares it."""

    def __init__(self, *names: str, **settings: Any) -> None:
        self.names, self.settings = names, settings


def _flag(name: str, text: str, **settings: Any) -> Argument:
    return Argument(name, action="store_true", help=text, **settings)


def _value(name: str, placeholder: str, text: str, **settings: Any) -> Argument:
    return Argument(name, metavar=placeholder, help=text, **settings)


def _overrides(text: str = "key=value") -> Argument:
    return _value("overrides", "OVERRIDE", text, nargs="*")


def _plugin(text: str = "your own package, by name or path; YAML may name its classes") -> Argument:
    return _value("--plugin", "PACKAGE", text)


def _accuracy(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not valid: expected a test accuracy, e.g. 0.95") from None


def _positive(what: str, number: Callable[[str], float] = float) -> Callable[[str], float]:
    """Reads a number above 0, which may end in h; `what` says which, with an example."""

    def read(text: str) -> float:
        try:
            value = number(text.removesuffix("h"))
        except ValueError:
            value = 0
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not valid: expected {what}")
        return value

    return read


_whole = _positive("a whole number above 0, e.g. 100", int)


_EPILOG = """
OVERRIDE is a key=value of the configuration in Hydra's grammar, e.g. model=cnn_large devices=2 optimizer.lr=0.01;
`parallelbench show` lists the keys and the choices. With `plan` and `submit` a value may be a list (devices=1,2,4).
"""
_EXIT_CODES = """
Exit codes: 0 success; 1 a run failed (compare: a configuration is slower; history: a metric is worse); 2 the
request is invalid or can't be judged; 130 interrupted; 141 the reader of its output is gone.
"""
_COMPARE_EPILOG = """
Runs are paired by configuration and repeat. With --fail-if-slower, slower means that the lower end of the 95 %
interval of the ratio of times per epoch is above the margin, for any configuration or all together; exit codes are then
0 passed (all upper ends are within the margin), 1 slower, 2 refused or undecided (wide intervals, too few repeats,
sides measured apart, a configuration or repeat that only A has).
"""
_HISTORY_EPILOG = """
A point is one commit with all its repeats. Exit codes: 0 no change for the worse is shown; 1 one began with the last
two submits, or with --since there or later; 2 the request is invalid.
"""
_ADVISE_EPILOG = """
Without --check: OVERRIDE says what is trained (model=… data=… batch_size=…), where (site=…) and on how many devices
(devices=1,2,4); strategies and their options are tried, unless strategy=… or strategy.… names them. model=gpt with
model.layers, width, heads, kv_heads, sequence, vocabulary, positions, mlp, mlp_width and tied is a transformer that is
predicted by formula. With --check: predictions are held against measured steps; no row is predicted by a fit that has
seen it.
"""

_CONF = _value("--conf", "DIR", "a folder of your own YAML files, laid out like conf/")
_JSON = _flag("--json", "print one JSON object (docs/json.md)", dest="as_json")
_ASKING = (_overrides(), _CONF, _plugin())
"""Of verbs that ask for runs."""
_FOLDER = _value("folder", "DIR", "a results folder, a sweep's folder, or a run's")
_UNFINISHED = _plugin("your own package; needed if some of its runs are not finished")


def _asks(function: str, text: str, *more: Argument) -> Verb:
    return Verb(function, text, *_ASKING, *more, epilog=_EPILOG)


VERBS = {
    "run": _asks("verbs.run:run", "train one run on this machine; print its folder last"),
    "show": _asks(
        "verbs.plan:show",
        "print the resolved configuration, its run id, and all choices",
    ),
    "plan": _asks("verbs.plan:plan", "print every run of a sweep with its resources and state; writes nothing", _JSON),
    "submit": _asks(
        "verbs.run:submit",
        "train the missing runs of a sweep: sweep=NAME, or lists such as devices=1,2",
        _value(
            "--retry",
            "OUTCOME,…",
            "try these outcomes again as well, e.g. oom,parity_failed; disturbed: finished runs that others disturbed",
        ),
        _value(
            "--max-gpu-hours",
            "H",
            "submit nothing if GPUs × time limits × launcher.attempts are more than H hours",
            type=_positive("a number of hours above 0, e.g. 100"),
        ),
        Argument(
            "--then",
            choices=("report",),
            help="write the report once all jobs are over, in a job of its own; site.mail_user gets mail",
        ),
    ),
    "prepare": Verb(
        "verbs.run:prepare_data", "download and convert a data set once: data=NAME", *_ASKING, epilog=_EPILOG
    ),
    "status": Verb(
        "verbs.status:status",
        "print the state of every run below a folder",
        _FOLDER,
        _UNFINISHED,
        _JSON,
        _flag("--watch", "until all runs have ended; exit with 1 if runs failed"),
        _flag("--all", "list every run, also those that are ok, queued or missing", dest="every"),
    ),
    "report": Verb(
        "verbs.report:report",
        "write figures, tables and a page on the runs below a folder",
        _FOLDER,
        _UNFINISHED,
        _value("--out", "DIR", "the folder to write to, instead of DIR/report or DIR/paper"),
        _value(
            "--target",
            "SHARE",
            "the test accuracy, e.g. 0.95, that times and energies to an accuracy are told for",
            type=_accuracy,
        ),
        _value("--baseline", "NAME", 'the configuration that the others are compared with, e.g. "fsdp x 4"'),
        _value("--figure", "NAME", "only this figure, as PDF, SVG and PNG for a paper"),
        _value("--panel", "WORDS", "only its panels whose headings hold these words"),
        Argument("--width", type=int, choices=(85, 175), help="its width in mm: a column (85), or both (175)"),
        _flag("--sentence", "print what a paper may say: a sentence for each configuration, and a LaTeX table"),
        _flag("--proposal", "only the two pages for an allocation: scaling, device-hours, memory; HTML and LaTeX"),
        _value("--epochs", "N", "of the training whose device-hours it tells, instead of the runs' own", type=_whole),
        _value("--steps", "N", "the same in optimizer steps, as of a program", type=_whole),
        _value("--work", "WORDS", "the work whose name holds these words, where several were measured"),
    ),
    "export": Verb(
        "verbs.export:export",
        "write finished runs for MLflow or Weights & Biases, without a network",
        _FOLDER,
        _UNFINISHED,
        Argument("--to", required=True, choices=("mlflow", "wandb"), help="the program"),
        _value("--out", "DIR", "a new or empty folder, instead of DIR/exports/PROGRAM"),
    ),
    "claims": Verb(
        "verbs.report:claims",
        "judge the claims of publications by the runs below a folder",
        _FOLDER,
        _UNFINISHED,
        _JSON,
        _value("names", "CLAIM", "only these claims, with every run behind them", nargs="*", default=[]),
        _value("--file", "YAML", "your own claims instead of the suite's"),
    ),
    "logs": Verb(
        "verbs.status:logs",
        "print the output of a run's latest attempt and its job",
        _FOLDER,
        _flag("--follow", "go on printing until the run has ended"),
    ),
    "compare": Verb(
        "verbs.report:compare",
        "compare two folders, or two values of a key in one folder: is B faster than A?",
        _value("folders", "DIR", "A and B: folders of runs; or one, with --by", nargs="+"),
        _value("--by", "KEY=A,B", "compare two values of a key, e.g. strategy=ddp,fsdp"),
        _value("--across", "KEY,…", "further keys in which the sides may differ", default=""),
        _value("--fail-if-slower", "P%", "exit with 1 if a configuration is slower by more, e.g. 3%%"),
        _JSON,
        _UNFINISHED,
        epilog=_COMPARE_EPILOG,
    ),
    "history": Verb(
        "verbs.report:history",
        "print one configuration over commits and dates: where did a metric change, and is it worse?",
        _value("folders", "DIR", "results folders, sweeps' folders, or runs'", nargs="+"),
        _value("--metric", "METRIC", "what is followed, by default the time per epoch", default="steady_epoch_time_s"),
        _value(
            "--where",
            "KEY=VALUE",
            "only runs with this value, e.g. strategy=ddp; may be repeated",
            action="append",
            default=[],
        ),
        _value(
            "--since",
            "COMMIT|DATE",
            "fail if a change for the worse began there or later, not with the last two submits only",
        ),
        _value("--csv", "FILE", "write the points as CSV, too"),
        _value("--figure", "FILE", "draw them as SVG or PDF, too"),
        _JSON,
        _UNFINISHED,
        epilog=_HISTORY_EPILOG,
    ),
    "cancel": Verb(
        "verbs.status:cancel",
        "end the queued and running jobs of sweeps, or of single runs",
        _value("folders", "DIR", "results folders, sweeps' folders, or runs'", nargs="+"),
    ),
    "forget": Verb(
        "verbs.status:forget",
        "move runs out of their sweep, into its folder .forgotten: submitting measures them anew",
        _value("folders", "RUN", "folders of runs that have ended", nargs="+"),
    ),
    "bundle": Verb(
        "verbs.bundle:bundle",
        "pack the runs below a folder for a publication: results, report, environment, citation, checksums",
        _FOLDER,
        _value("--out", "FILE", "the archive, instead of NAME-bundle.tar.gz here"),
        _value("--title", "TEXT", "the title in CITATION.cff"),
        _value(
            "--author",
            "NAME",
            'an author in CITATION.cff, as "Family, Given"; may be repeated',
            action="append",
            dest="authors",
        ),
        _UNFINISHED,
    ),
    "rerun": Verb(
        "verbs.bundle:rerun",
        "train the runs of a bundle again here, and print what agrees: losses, accuracies, parity; times are told",
        _value("archive", "BUNDLE", "a file that `parallelbench bundle` wrote"),
        _overrides("launcher=NAME site=NAME site.data_dir=DIR …"),
        _value("--out", "DIR", "the folder of the new results, instead of BUNDLE-rerun"),
        _CONF,
        _plugin("your own package, which the bundled runs name classes of"),
    ),
    "help": Verb(
        "verbs.help:explain",
        "print what a key of the configuration means, which values it takes, and its default",
        _value(
            "names",
            "KEY",
            "e.g. optimizer.lr or strategy; with strategy=ddp as well: of that choice alone; none: all keys",
            nargs="*",
        ),
        _CONF,
        _plugin(),
    ),
    "init": Verb(
        "starter:init",
        "write a folder of your own: a model, a data set, a strategy, a sweep, a notebook and a test; or a program",
        _value("folder", "DIR", "a new folder; its name is that of your package"),
        _flag("--program", "a training script as anybody's, and how it is measured, in place of parts for the suite"),
    ),
    "advise": Verb(
        "verbs.advise:advise",
        "say which strategy to train with on how many devices, and what to measure next",
        _overrides("model=… data=… site=… devices=1,2,4"),
        Argument(
            "--objective",
            choices=("time", "energy", "gpu_hours", "memory"),
            default="time",
            help="what the best layout has least of",
        ),
        _value(
            "--budget",
            "20h",
            "propose runs to measure in so many device-hours, as a sweep file",
            dest="budget_h",
            type=_positive("device-hours above 0, e.g. 20h"),
        ),
        _value(
            "--check", "PATH", "print the errors on a folder of runs, or a CSV in vTrain's or llm-foundry's columns"
        ),
        _value(
            "--from",
            "PATH",
            "a folder of runs to fit to, or a table of calibrate",
            dest="known",
            action="append",
            default=[],
        ),
        _flag(
            "--all", "print the best layout of each strategy too, what can't be, and what rests on what", dest="whole"
        ),
        _flag("--json", "print one JSON object; errors and coverage are shares", dest="as_json"),
        _CONF,
        _plugin("your own package, by name or path"),
        epilog=_ADVISE_EPILOG,
    ),
    "calibrate": Verb(
        "verbs.calibrate:calibrate",
        "measure what this machine's, or a cluster's, devices and links take; minutes",
        _overrides("launcher=slurm site=NAME nodes=N …"),
        _value("--out", "FILE", "the table, instead of one below results"),
        _CONF,
    ),
    "doctor": Verb(
        "verbs.doctor:doctor",
        "print what this machine and its cluster have, and what is missing",
        _overrides("site=NAME nodes=N …"),
        _CONF,
        _JSON,
    ),
}


def command_line_parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser, and those of the verbs."""
    parser: argparse.ArgumentParser = _Parser(
        prog="parallelbench",
        description="Which way of parallelising a training job is fastest, and why.",
        epilog=_EPILOG + _EXIT_CODES,
    )
    parser.add_argument("--version", action=_Version, nargs=0, default=argparse.SUPPRESS, help="show the version")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, verb in VERBS.items():
        of_verb = verbs.add_parser(name, help=verb.text, description=verb.text, epilog=verb.epilog)
        for argument in verb.arguments:
            of_verb.add_argument(*argument.names, **argument.settings)
    return parser, verbs.choices


class _Parser(argparse.ArgumentParser):
    """Tells what was typed as a terminal may get it, and what may have been meant."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            from parallelbench.errors import choices

            valid = map(str, action.choices)
            raise argparse.ArgumentError(action, f"{value} is no choice: {choices(str(value), valid)}")

    def error(self, message: str) -> NoReturn:
        from parallelbench.errors import tellable

        super().error(tellable(message))


class _Version(argparse.Action):
    """Prints the version, which is looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"parallelbench {version('parallelbench')}")
        parser.exit()
