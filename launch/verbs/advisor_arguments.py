"""The arguments of the verbs `advise` and `calibrate`; loads nothing before it is called."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from launch.sweep.compose import Extension

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
        "--budget", type=_hours, metavar="20h", help="propose runs to measure in so many device-hours, as a sweep file"
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


def _hours(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?h?", text) or not float(text.removesuffix("h")):
        raise argparse.ArgumentTypeError(f"{text} is not valid: expected device-hours above 0, e.g. 20h")
    return float(text.removesuffix("h"))


def run_advise(options: argparse.Namespace) -> int:
    """Do what the arguments ask."""
    from launch.sweep.extension import extension

    found = extension(options.conf, options.plugin)
    if options.check is None:
        return _run_advice(options, found)
    from launch.verbs.advising import advise

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
        from launch.verbs.simulating import simulate

        return simulate(options.overrides, found, **asked, assumed=options.assume, as_json=options.json)
    if options.loop is not None:
        from launch.verbs.looping import loop

        if options.json:
            raise ConfigError("--json answers once, and --loop several times: ask with --json after the loop")
        return loop(options.overrides, found, **asked, rounds=options.loop, budget_h=options.budget)
    from launch.verbs.recommending import recommend

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
    from launch.verbs.calibrating import calibrate

    return calibrate(options.overrides, extension(options.conf, None), out=options.out)
