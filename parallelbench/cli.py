"""The program `parallelbench`: its verbs. Imports nothing heavy before a verb is chosen."""

from __future__ import annotations

import os
import sys
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Sequence

    from launch.sweep.compose import Extension


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; the console script's entry point."""
    from parallelbench.errors import ConfigError, StorageError, ends_the_program, no_permission, refusal
    from parallelbench.world.allowance import limit_pools, require_home

    options = None
    try:
        options = _options(sys.argv[1:] if arguments is None else list(arguments))
        if options.verb != "completion":
            require_home()
            limit_pools()
        code = _verb(options.verb)(options)
        sys.stdout.flush()
        return code
    except (ConfigError, StorageError) as error:
        print(refusal(str(error)), file=sys.stderr)
        return 2
    except SystemExit as error:
        if options is None:  # argparse's own
            raise
        print(refusal(ends_the_program(error)), file=sys.stderr)
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
        print(refusal(str(reason)), file=sys.stderr)
        return 2


def _options(words: list[str]) -> argparse.Namespace:
    """The parsed command line. Options and overrides may be in any order, which argparse can't do below subcommands."""
    from launch.verbs.arguments import command_line_parser
    from parallelbench.errors import ConfigError, refuse_token

    for word in words:
        refuse_token(word, where="the command line")
        if odd := next((letter for letter in word if _steers(letter, word)), None):
            raise ConfigError(f"{word!r} holds the character {odd!r}, which no name or value may have")
    parser, verbs = command_line_parser()
    if words and not words[0].startswith("-") and words[0] not in verbs:
        parser.error(f"{words[0]} is no verb: {_choices(words[0], verbs)}")
    options, rest = parser.parse_known_args(words)
    verb = verbs[options.verb]
    for unknown in (text.partition("=")[0] for text in rest if text.startswith("-")):
        _refuse_option(verb, options.verb, unknown)
    if rest and not hasattr(options, "overrides"):
        verb.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest
    return options


def _steers(letter: str, word: str) -> bool:
    """Whether a character steers terminals, and is no white space that the value of an override may have."""
    return unicodedata.category(letter) == "Cc" and not (letter in "\t\n\r" and "=" in word)


def _refuse_option(verb: argparse.ArgumentParser, name: str, unknown: str) -> None:
    from launch.sweep.keys import FLAGS

    if instead := FLAGS.get(unknown):
        verb.error(f"{unknown} is an option of Hydra's, which composes here, but starts nothing: {instead}")
    verb.error(f"{unknown} is no option of {name}: {_choices(unknown, verb._option_string_actions)}")


def _choices(wrong: str, valid: Iterable[str]) -> str:
    from parallelbench.errors import choices

    return choices(wrong, valid)


def _configured(verb: Callable[..., int], *names: str) -> Callable[[argparse.Namespace], int]:
    """Call a verb with overrides, and with these options of the command line."""
    return lambda options: verb(options.overrides, _extension(options), **{name: vars(options)[name] for name in names})


def _on_folder(verb: Callable[..., int], *names: str) -> Callable[[argparse.Namespace], int]:
    """The same of a verb that takes a folder."""
    return lambda options: verb(options.folder, _extension(options), **{name: vars(options)[name] for name in names})


def _on_folders(verb: Callable[..., int], *names: str) -> Callable[[argparse.Namespace], int]:
    """The same of a verb that takes several."""
    return lambda options: verb(options.folders, _extension(options), **{name: vars(options)[name] for name in names})


def _extension(options: argparse.Namespace) -> Extension:
    from launch.sweep.extension import extension

    given = vars(options)
    return extension(given.get("conf"), options.plugin, same_plugin=given.get("same_plugin", False))


def _verb(name: str) -> Callable[[argparse.Namespace], int]:
    if name != "completion":
        return _verbs()[name]
    from launch.verbs.completion import complete  # alone: the other verbs load what a TAB can't wait for

    return lambda options: complete(options.shell, options.words)


def _verbs() -> dict[str, Callable[[argparse.Namespace], int]]:
    from launch import starter
    from launch.verbs import bundle, doctor, export, plan, prune, report, run, status
    from launch.verbs.arguments import run_advise, run_calibrate
    from launch.verbs.help import explain

    return {
        "run": _configured(run.run),
        "show": _configured(plan.show, "help_keys"),
        "init": lambda options: starter.init(options.folder),
        "help": lambda options: explain(options.keys, _extension(options)),
        "plan": _configured(plan.plan, "as_json"),
        "tune": _configured(run.tune),
        "submit": _configured(run.submit, "retry", "max_gpu_hours", "then"),
        "prepare": _configured(run.prepare_data),
        "status": _on_folder(status.status, "watch", "every", "as_json"),
        "cancel": _on_folders(status.cancel),
        "forget": _on_folders(status.forget),
        "prune": _on_folder(prune.prune, "yes"),
        "logs": _on_folder(status.logs, "follow"),
        "report": _on_folders(report.report, "out", "target", "figure", "panel", "width"),
        "export": _on_folder(export.export, "to", "out"),
        "bundle": _on_folder(bundle.bundle, "out", "title", "authors"),
        "rerun": lambda options: bundle.rerun(
            options.archive, _extension(options), overrides=options.overrides, out=options.out
        ),
        "claims": _on_folder(report.claims, "names", "file", "as_json"),
        "compare": _on_folders(report.compare, "by", "across", "fail_if_slower", "as_json"),
        "advise": run_advise,
        "calibrate": run_calibrate,
        "doctor": _configured(doctor.doctor, "bandwidth", "as_json"),
    }


if __name__ == "__main__":
    sys.exit(main())
