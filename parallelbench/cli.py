"""The program `parallelbench`: its verbs. Imports nothing heavy before a verb is chosen."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

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

_ADVISE_EPILOG = """
No row is predicted by a fit that has seen it. The advisor knows decoder-only transformers under data, tensor and
pipeline parallelism and FSDP. It can't yet rank layouts, predict the suite's own models, tell whether a model fits into
memory, or propose runs.
"""

_UNFINISHED = "your own package; needed if some of its runs are not finished"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; the console script's entry point."""
    options = _options(arguments)
    from parallelbench.errors import ConfigError, StorageError, no_permission

    try:
        code = _verbs()[options.verb](options)
        sys.stdout.flush()
        return code
    except (ConfigError, StorageError) as error:
        print(f"parallelbench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has closed the pipe; the rest of the buffer must not fail again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        # Not 1, which means that a run failed, or that a configuration is slower.
        reason = no_permission(error) if isinstance(error, PermissionError) else error
        print(f"parallelbench: {reason}", file=sys.stderr)
        return 2


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line. Options and overrides may be in any order, which argparse can't do below subcommands."""
    parser, verbs = _parser()
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words and not words[0].startswith("-") and words[0] not in verbs:
        parser.error(f"{words[0]} is no verb: {_choices(words[0], verbs)}")
    options, rest = parser.parse_known_args(words)
    verb = verbs[options.verb]
    for unknown in (text.partition("=")[0] for text in rest if text.startswith("-")):
        verb.error(f"{unknown} is no option of {options.verb}: {_choices(unknown, verb._option_string_actions)}")
    if rest and not hasattr(options, "overrides"):
        verb.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest
    return options


def _choices(wrong: str, valid: Iterable[str]) -> str:
    from parallelbench.errors import choices

    return choices(wrong, valid)


_CONFIGURED = {
    "run": "train one run on this machine; print its folder last",
    "show": "print the resolved configuration, its run id, and all choices",
    "plan": "print every run of a sweep with its resources and state; writes nothing",
    "tune": "find the fastest settings here in a short trial, for a sweep that is submitted with tune=true",
    "submit": "train the missing runs of a sweep: sweep=NAME, or lists such as devices=1,2",
    "prepare": "download and convert a data set once: data=NAME",
}
"""Verbs that take overrides."""
_ON_FOLDERS = {
    "status": "print the state of every run below a folder",
    "report": "write figures, tables and a page on the runs below a folder",
    "claims": "judge the claims of publications by the runs below a folder",
    "cancel": "end the queued and running jobs of the sweeps below a folder",
    "logs": "print the output of a run's latest attempt and its job",
}
"""Verbs that take a folder."""


def _parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser, and those of the verbs."""
    parser = argparse.ArgumentParser(
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
        if name == "submit":
            _add_submit_options(verb)
    for name, text in _ON_FOLDERS.items():
        verb = verbs.add_parser(name, help=text, description=text)
        verb.add_argument("folder", metavar="DIR", help="a results folder, a sweep's folder, or a run's")
        _add_folder_options(verb, name)
    _add_compare(verbs)
    _add_advise(verbs)
    doctor = verbs.add_parser("doctor", help="print what this machine and its cluster have, and what is missing")
    doctor.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="with --bandwidth: site=NAME nodes=N …")
    doctor.add_argument(
        "--bandwidth", action="store_true", help="measure all-reduces between the cluster's nodes (a short Slurm job)"
    )
    return parser, verbs.choices


def _add_plugin(verb: argparse.ArgumentParser, text: str) -> None:
    verb.add_argument("--plugin", metavar="PACKAGE", help=text)


def _add_folder_options(verb: argparse.ArgumentParser, name: str) -> None:
    if name in ("status", "cancel", "logs"):
        _add_plugin(verb, "your own package, whose launcher the runs were submitted with")
    else:
        _add_plugin(verb, _UNFINISHED)
    if name == "claims":
        verb.add_argument(
            "names", nargs="*", default=[], metavar="NAME", help="only these claims, with every run behind them"
        )
        verb.add_argument("--file", metavar="YAML", help="your own claims instead of the suite's")
    if name == "report":
        verb.add_argument("--out", metavar="DIR", help="the report's folder, instead of DIR/report")
    if name == "status":
        verb.add_argument("--watch", action="store_true", help="update the table until all runs have ended")
        verb.add_argument(
            "--all", action="store_true", help="list every run, also those that are ok, queued or missing"
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
    _add_plugin(verb, _UNFINISHED)


def _add_advise(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "predict the steps of a CSV file of measured ones, and print how wrong that is"
    verb = verbs.add_parser("advise", help=text, description=text, epilog=_ADVISE_EPILOG)
    verb.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="site=NAME: the cluster that was measured")
    verb.add_argument(
        "--check", required=True, metavar="CSV", help="measured steps, in vTrain's or llm-foundry's columns"
    )
    verb.add_argument(
        "--from",
        dest="known",
        action="append",
        default=[],
        metavar="CSV",
        help="fit to these steps instead of those shipped",
    )
    verb.add_argument(
        "--fit-up-to", type=_devices, metavar="N", help="fit to rows on at most N devices only, and judge those on more"
    )
    verb.add_argument("--json", action="store_true", help="print one JSON object; errors and coverage are shares")
    verb.add_argument("--conf", metavar="DIR", help="a folder of your own YAML files, laid out like conf/")


def _devices(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not valid: expected a number of devices, e.g. 64")
    return int(text)


def _add_submit_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--retry", metavar="OUTCOME,…", help="try these outcomes again as well, e.g. oom,error")
    verb.add_argument(
        "--max-gpu-hours",
        type=_hours,
        metavar="H",
        help="submit nothing if GPUs × time limits × launcher.attempts are more than H hours",
    )


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = -1.0
    if not 0 <= hours < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not valid: expected a number of hours, e.g. 100")
    return hours


class _Version(argparse.Action):
    """Prints the version, which is looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"parallelbench {version('parallelbench')}")
        parser.exit()


def _verbs() -> dict[str, Callable[[argparse.Namespace], int]]:
    from launch.sweep.extension import extension
    from launch.verbs import planning, results, running, watching

    def configured(verb: Callable[..., int]) -> Callable[[argparse.Namespace], int]:
        return lambda options: verb(options.overrides, extension(options.conf, options.plugin))

    return {
        "run": configured(running.run),
        "show": configured(planning.show),
        "plan": configured(planning.plan),
        "tune": configured(running.tune),
        "submit": lambda options: running.submit(
            options.overrides,
            extension(options.conf, options.plugin),
            retry=options.retry,
            max_gpu_hours=options.max_gpu_hours,
        ),
        "prepare": configured(running.prepare_data),
        "status": lambda options: watching.status(
            options.folder, extension(None, options.plugin), watch=options.watch, every=options.all
        ),
        "cancel": lambda options: watching.cancel(options.folder, extension(None, options.plugin)),
        "logs": lambda options: watching.logs(options.folder, extension(None, options.plugin)),
        "report": lambda options: results.report(options.folder, extension(None, options.plugin), out=options.out),
        "claims": lambda options: results.claims(
            options.folder, options.names, extension(None, options.plugin), file=options.file
        ),
        "compare": lambda options: results.compare(
            options.folders,
            extension(None, options.plugin),
            by=options.by,
            across=options.across,
            fail_if_slower=options.fail_if_slower,
        ),
        "advise": _advise,
        "doctor": lambda options: watching.doctor(options.overrides, bandwidth=options.bandwidth),
    }


def _advise(options: argparse.Namespace) -> int:
    from launch.sweep.extension import extension
    from launch.verbs.advising import advise

    return advise(
        options.overrides,
        extension(options.conf, None),
        check=options.check,
        known=options.known,
        fit_up_to=options.fit_up_to,
        as_json=options.json,
    )


if __name__ == "__main__":
    sys.exit(main())
