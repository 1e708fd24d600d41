"""The command line's verbs and options; loads nothing heavy."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, NoReturn

from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from launch.sweep.compose import Extension


_EPILOG = """
OVERRIDE is a key=value of the configuration in Hydra's grammar, e.g. model=cnn_large devices=2 optimizer.lr=0.01;
`parallelbench show` lists the keys and the choices. With `plan` and `submit` a value may be a list (devices=1,2,4).
"""

_EXIT_CODES = """
Exit codes: 0 success; 1 a run failed (compare: a configuration is slower); 2 the request is invalid or can't be judged;
130 interrupted.
"""

_COMPARE_EPILOG = """
Runs are paired by configuration and repeat. With --fail-if-slower, slower means that the lower end of the 95 %
interval of the ratio of times per epoch is above the margin, for any configuration or all together; exit codes are then
0 passed (all upper ends are within the margin), 1 slower, 2 refused or undecided (wide intervals, too few repeats,
sides measured apart, a configuration or repeat that only A has).
"""

_UNFINISHED = "your own package; needed if some of its runs are not finished"

_CONFIGURED = {
    "run": "train one run on this machine; print its folder last",
    "show": "print the resolved configuration, its run id, and all choices",
    "plan": "print every run of a sweep with its resources and state; writes nothing",
    "tune": "find the fastest settings here in a short trial, for a sweep that is submitted with tune=true",
    "submit": "train the missing runs of a sweep: sweep=NAME, or lists such as devices=1,2",
    "prepare": "download and convert a data set once: data=NAME",
}
"""Verbs that take overrides."""
_BUNDLE = "pack the runs below a folder for a publication: results, report, environment, commands, citation, checksums"
_RERUN = "train the runs of a bundle again here, and print what agrees: losses, accuracies, parity; times are told"
_FORGET = "move runs out of their sweep, into its folder .forgotten: submitting measures them anew"
_CANCEL = "end the queued and running jobs of sweeps, or of single runs"
_PRUNE = "list what nothing needs any more: runs that nobody queued, and what dead attempts left; --yes removes it"
_INIT = "write a folder of your own: a model, a data set, a strategy, a sweep, a notebook and a test"
_FOLDERS = "a results folder, a sweep's folder, or a run's; of several, each machine's runs are compared by themselves"
_TARGET = "the test accuracy, e.g. 0.95, that times and energies to an accuracy are told for"
_COMPLETION = "print the script that completes verbs, options, choices and keys in your shell"
_SAME_PLUGIN = "your package has changed, but no number has: its runs stay those of the sources that were used last"
_LAUNCHED_BY = "your own package, whose launcher the runs were submitted with"
_ON_FOLDERS = {
    "status": "print the state of every run below a folder",
    "report": "write figures, tables and a page on the runs below a folder",
    "export": "write finished runs for MLflow, Weights & Biases or TensorBoard, without a network",
    "claims": "judge the claims of publications by the runs below a folder",
    "logs": "print the output of a run's latest attempt and its job",
}
"""Verbs that take a folder."""


class _Parser(argparse.ArgumentParser):
    """Tells what was typed as a terminal may get it."""

    def error(self, message: str) -> NoReturn:
        from parallelbench.errors import tellable

        super().error(tellable(message))


def command_line_parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser, and those of the verbs."""
    parser: argparse.ArgumentParser = _Parser(
        prog="parallelbench",
        description="Which way of parallelising a training job is fastest, and why.",
        epilog=_EPILOG + _EXIT_CODES,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, text in _CONFIGURED.items():
        verb = verbs.add_parser(name, help=text, description=text, epilog=_EPILOG)
        verb.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="key=value")
        verb.add_argument("--conf", metavar="DIR", help="a folder of your own YAML files, laid out like conf/")
        _add_plugin(verb, "your own package, by name or path; YAML may name its classes")
        if name != "prepare":
            verb.add_argument("--same-plugin", action="store_true", help=_SAME_PLUGIN)
        if name == "submit":
            _add_submit_options(verb)
        if name == "plan":
            _add_json(verb)
        if name == "show":
            verb.add_argument("--help-keys", action="store_true", help="print a line about each key instead")
    for name, text in _ON_FOLDERS.items():
        verb = verbs.add_parser(name, help=text, description=text)
        _add_folder_options(verb, name)
    _add_compare(verbs)
    _add_on_runs(verbs)
    _add_bundle(verbs)
    _add_help(verbs)
    start = verbs.add_parser("init", help=_INIT, description=_INIT)
    start.add_argument("folder", metavar="DIR", help="a new folder; its name is that of your package")
    add_advise(verbs)
    add_calibrate(verbs)
    _add_doctor(verbs)
    _add_completion(verbs)
    return parser, verbs.choices


def _add_on_runs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Those that end runs or remove what they left."""
    for name, what, kind, folders in (
        ("cancel", _CANCEL, "DIR", "results folders, sweeps' folders, or runs'"),
        ("forget", _FORGET, "RUN", "folders of runs that have ended"),
    ):
        verb = verbs.add_parser(name, help=what, description=what)
        verb.add_argument("folders", metavar=kind, nargs="+", help=folders)
        _add_plugin(verb, _LAUNCHED_BY)
    prune = verbs.add_parser("prune", help=_PRUNE, description=_PRUNE)
    prune.add_argument("folder", metavar="DIR", help="a results folder, a sweep's folder, or a run's")
    prune.add_argument("--yes", action="store_true", help="remove what is listed")
    _add_plugin(prune, _LAUNCHED_BY)


def _add_completion(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verb = verbs.add_parser("completion", help=_COMPLETION, description=_COMPLETION)
    verb.add_argument(
        "shell", choices=("bash", "zsh", "fish"), help='for bash: eval "$(parallelbench completion bash)"'
    )
    verb.add_argument("--words", nargs=argparse.REMAINDER, metavar="WORD", help="what the script asks with at each TAB")


def _add_doctor(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = verbs.add_parser("doctor", help="print what this machine and its cluster have, and what is missing")
    doctor.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="site=NAME nodes=N …")
    doctor.add_argument("--conf", metavar="DIR", help="a folder of your own YAML files, laid out like conf/")
    _add_json(doctor)
    _add_plugin(doctor, "your own package, by name or path; YAML may name its classes")
    doctor.add_argument(
        "--bandwidth", action="store_true", help="measure all-reduces between the cluster's nodes (a short Slurm job)"
    )


def _add_bundle(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bundle = verbs.add_parser("bundle", help=_BUNDLE, description=_BUNDLE)
    bundle.add_argument("folder", metavar="DIR", help="a results folder, a sweep's folder, or a run's")
    bundle.add_argument("--out", metavar="FILE", help="the archive, instead of DIR-bundle.tar.gz")
    bundle.add_argument("--title", metavar="TEXT", help="the title in CITATION.cff")
    bundle.add_argument(
        "--author",
        action="append",
        dest="authors",
        metavar="NAME",
        help='an author in CITATION.cff, as "Family, Given"; may be repeated',
    )
    _add_plugin(bundle, _UNFINISHED)
    rerun = verbs.add_parser("rerun", help=_RERUN, description=_RERUN)
    rerun.add_argument("archive", metavar="BUNDLE", help="a file that `parallelbench bundle` wrote")
    rerun.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="launcher=NAME site=NAME site.data_dir=DIR …")
    rerun.add_argument("--out", metavar="DIR", help="the folder of the new results, instead of BUNDLE-rerun")
    rerun.add_argument("--conf", metavar="DIR", help="a folder of your own YAML files, laid out like conf/")
    _add_plugin(rerun, "your own package, which the bundled runs name classes of")


def _add_help(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "print what a key of the configuration means, which values it takes, and its default"
    verb = verbs.add_parser("help", help=text, description=text)
    verb.add_argument(
        "keys",
        nargs="*",
        metavar="KEY",
        help="e.g. optimizer.lr or strategy; with strategy=ddp as well: of that choice alone; none: all keys",
    )
    verb.add_argument("--conf", metavar="DIR", help="a folder of your own YAML files, laid out like conf/")
    _add_plugin(verb, "your own package, by name or path; YAML may name its classes")


def _add_json(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--json", dest="as_json", action="store_true", help="print one JSON object (docs/json.md)")


def _add_plugin(verb: argparse.ArgumentParser, text: str) -> None:
    verb.add_argument("--plugin", metavar="PACKAGE", help=text)


def _add_folder_options(verb: argparse.ArgumentParser, name: str) -> None:
    if name == "report":
        verb.add_argument("folders", metavar="DIR", nargs="+", help=_FOLDERS)
    else:
        verb.add_argument("folder", metavar="DIR", help="a results folder, a sweep's folder, or a run's")
    if name in ("status", "logs"):
        _add_plugin(verb, _LAUNCHED_BY)
    else:
        _add_plugin(verb, _UNFINISHED)
    if name in ("claims", "status"):
        _add_json(verb)
    if name == "claims":
        verb.add_argument(
            "names", nargs="*", default=[], metavar="NAME", help="only these claims, with every run behind them"
        )
        verb.add_argument("--file", metavar="YAML", help="your own claims instead of the suite's")
    if name == "report":
        verb.add_argument("--out", metavar="DIR", help="the folder to write to, instead of DIR/report or DIR/paper")
        verb.add_argument("--target", type=_accuracy, metavar="SHARE", help=_TARGET)
        verb.add_argument("--figure", metavar="NAME", help="only this figure, as PDF, SVG and PNG for a paper")
        verb.add_argument("--panel", metavar="WORDS", help="only its panels whose headings hold these words")
        verb.add_argument("--width", type=int, choices=(85, 175), help="its width in mm: a column (85), or both (175)")
    if name == "logs":
        verb.add_argument("--follow", action="store_true", help="go on printing until the run has ended")
    if name == "export":
        verb.add_argument("--to", required=True, choices=("mlflow", "wandb", "tensorboard"), help="the program")
        verb.add_argument("--out", metavar="DIR", help="a new or empty folder, instead of DIR/exports/PROGRAM")
    if name == "status":
        text = "until all runs have ended: a table, in a pipe a line per change; exit with 1 if runs failed"
        verb.add_argument("--watch", action="store_true", help=text)
        verb.add_argument(
            "--all", dest="every", action="store_true", help="list every run, also those that are ok, queued or missing"
        )


def _add_compare(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "compare two folders, or two values of a key in one folder: is B faster than A?"
    verb = verbs.add_parser("compare", help=text, description=text, epilog=_COMPARE_EPILOG)
    verb.add_argument("folders", metavar="DIR", nargs="+", help="A and B: folders of runs; or one, with --by")
    verb.add_argument("--by", metavar="KEY=A,B", help="compare two values of a key, e.g. strategy=ddp,fsdp")
    verb.add_argument(
        "--across",
        default="",
        metavar="KEY,…",
        help="further keys in which the sides may differ",
    )
    verb.add_argument(
        "--fail-if-slower", metavar="P%", help="exit with 1 if a configuration is slower by more, e.g. 3%%"
    )
    _add_json(verb)
    _add_plugin(verb, _UNFINISHED)


def _add_submit_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--retry", metavar="OUTCOME,…", help="try these outcomes again as well, e.g. oom,parity_failed")
    verb.add_argument(
        "--max-gpu-hours",
        type=_hours,
        metavar="H",
        help="submit nothing if GPUs × time limits × launcher.attempts are more than H hours",
    )

    verb.add_argument(
        "--then",
        choices=("report",),
        help="write the report once all jobs are over, in a job of its own; site.mail_user gets mail",
    )


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = -1.0
    if not 0 <= hours < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not valid: expected a number of hours, e.g. 100")
    return hours


def _accuracy(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not valid: expected a test accuracy, e.g. 0.95") from None


class _Version(argparse.Action):
    """Prints the version, which is looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"parallelbench {version('parallelbench')}")
        parser.exit()


EPILOG = """
Without --check: OVERRIDE says what is trained (model=… data=… batch_size=…), where (site=…) and on how many devices
(devices=1,2,4); strategies and their options are tried, unless strategy=… or strategy.… names them. model=gpt with
model.layers, width, heads, kv_heads, sequence, vocabulary, positions, mlp, mlp_width and tied is a transformer that is
predicted by formula. With --check: predictions are held against measured steps; no row is predicted by a fit that has
seen it.
"""


def add_advise(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the verb."""
    text = "say which strategy to train with on how many devices, and what to measure next"
    verb = verbs.add_parser("advise", help=text, description=text, epilog=EPILOG)
    verb.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="model=… data=… site=… devices=1,2,4")
    verb.add_argument(
        "--objective",
        default="time",
        metavar="WHAT",
        help="what the best layout has least of: time, energy, gpu_hours or memory",
    )
    verb.add_argument(
        "--budget",
        type=_device_hours,
        metavar="20h",
        help="propose runs to measure in so many device-hours, as a sweep file",
    )
    verb.add_argument("--loop", type=_count, metavar="N", help="propose runs, train them and fit anew, at most N times")
    verb.add_argument(
        "--simulate", action="store_true", help="what slow devices, broken links and failures may cost; not measured"
    )
    verb.add_argument(
        "--assume", action="append", default=[], metavar="KEY=VALUE", help="with --simulate: another assumption"
    )
    verb.add_argument(
        "--check", metavar="CSV", help="print the error on measured steps, in vTrain's or llm-foundry's columns"
    )
    verb.add_argument(
        "--from",
        dest="known",
        action="append",
        default=[],
        metavar="PATH",
        help="a folder of runs to fit to, or a table of calibrate; with --check also a CSV instead of those shipped",
    )
    verb.add_argument(
        "--fit-up-to", type=_count, metavar="N", help="fit to rows on at most N devices only, and judge those on more"
    )
    verb.add_argument("--json", action="store_true", help="print one JSON object; errors and coverage are shares")
    verb.add_argument("--conf", metavar="DIR", help="a folder of your own YAML files, laid out like conf/")
    verb.add_argument("--plugin", metavar="PACKAGE", help="your own package, by name or path")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not valid: expected a whole number above 0, e.g. 64")
    return int(text)


def _device_hours(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?h?", text) or not float(text.removesuffix("h")):
        raise argparse.ArgumentTypeError(f"{text} is not valid: expected device-hours above 0, e.g. 20h")
    return float(text.removesuffix("h"))


def run_advise(options: argparse.Namespace) -> int:
    """Do what the arguments ask."""
    from launch.sweep.extension import extension

    found = extension(options.conf, options.plugin)
    if options.check is None:
        return _run_advice(options, found)
    from launch.verbs.advice_errors import advise

    return advise(
        options.overrides,
        found,
        check=options.check,
        known=options.known,
        fit_up_to=options.fit_up_to,
        as_json=options.json,
    )


def _run_advice(options: argparse.Namespace, found: Extension) -> int:
    """Without --check."""
    asked = {"known": options.known, "objective": options.objective}
    if options.assume and not options.simulate:
        raise ConfigError("--assume is for --simulate: add it, or leave --assume out")
    if options.simulate:
        from launch.verbs.simulation import simulate

        return simulate(options.overrides, found, **asked, assumed=options.assume, as_json=options.json)
    if options.loop is not None:
        from launch.verbs.advise import loop

        if options.json:
            raise ConfigError("--json answers once, and --loop several times: ask with --json after the loop")
        return loop(options.overrides, found, **asked, rounds=options.loop, budget_h=options.budget)
    from launch.verbs.advise import recommend

    return recommend(options.overrides, found, **asked, budget_h=options.budget, as_json=options.json)


def add_calibrate(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the verb."""
    text = "measure what this machine's, or a cluster's, devices and links take; minutes"
    verb = verbs.add_parser("calibrate", help=text, description=text)
    verb.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="launcher=slurm site=NAME nodes=N …")
    verb.add_argument("--out", metavar="FILE", help="the table, instead of one below results")
    verb.add_argument("--conf", metavar="DIR", help="a folder of your own YAML files, laid out like conf/")


def run_calibrate(options: argparse.Namespace) -> int:
    """Measure."""
    from launch.sweep.extension import extension
    from launch.verbs.calibrate import calibrate

    return calibrate(options.overrides, extension(options.conf, None), out=options.out)
