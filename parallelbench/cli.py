# PYTHON_ARGCOMPLETE_OK
"""The program `parallelbench`: its verbs. Imports nothing heavy before a verb is chosen."""

from __future__ import annotations

import os
import signal
import sys
import unicodedata
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from parallelbench.errors import (
    ConfigError,
    StorageError,
    choices,
    ends_the_program,
    no_permission,
    refusal,
    refuse_token,
)
from parallelbench.processes import leave, noticing_exits, print_any_character, silence_output
from parallelbench.world.allowance import limit_pools, require_folder, require_home

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; the console script's entry point."""
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what it may offer at TAB
        from launch.completion import answer

        answer()
    return _main(list(arguments)) if arguments is not None else leave(_main(sys.argv[1:]))


def _main(arguments: list[str]) -> int:
    options = None
    print_any_character()
    try:
        options = _options(arguments)
        require_folder()
        require_home()
        limit_pools()
        with noticing_exits():
            code = _do(options)
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
        silence_output()  # the rest of the buffer must not fail again when Python ends
        return 128 + signal.SIGPIPE  # as of programs that the signal ends
    except RuntimeError as error:
        if "home directory" not in str(error):  # pathlib's, which has no class of its own
            raise
        print(refusal("a path begins with ~ and a name that no user here has: write the path out"), file=sys.stderr)
        return 2
    except OSError as error:
        # Not 1, which means that a run failed, or that a configuration is slower.
        reason = no_permission(error) if isinstance(error, PermissionError) else error
        print(refusal(str(reason)), file=sys.stderr)
        return 2


def _options(words: list[str]) -> argparse.Namespace:
    """The parsed command line. Options and overrides may be in any order, which argparse can't do below subcommands."""
    from launch.verbs.arguments import command_line_parser

    for word in words:
        refuse_token(word, where="the command line")
        if odd := next((letter for letter in word if _steers(letter, word)), None):
            raise ConfigError(f"{word!r} holds the character {odd!r}, which no name or value may have")
    parser, verbs = command_line_parser()
    if words and not words[0].startswith("-") and words[0] not in verbs:
        parser.error(f"{words[0] if words[0].strip() else repr(words[0])} is no verb: {choices(words[0], verbs)}")
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
    from launch.sweep.keys import FLAGS, INSTEAD

    if unknown in FLAGS:
        verb.error(f"{unknown} is an option of Hydra's, {INSTEAD}")
    verb.error(f"{unknown} is no option of {name}: {choices(unknown, verb._option_string_actions)}")


def _do(options: argparse.Namespace) -> int:
    """Call the verb's function, whose module alone is loaded."""
    from launch.verbs.arguments import VERBS

    given = dict(vars(options))
    function = f"launch.{VERBS[given.pop('verb')].function}"
    if given.keys() & {"conf", "plugin"}:
        from launch.sweep.extension import extension

        given["extension"] = extension(given.pop("conf", None), given.pop("plugin", None))
    return int(resolve_name(function)(**given))


if __name__ == "__main__":
    sys.exit(main())
