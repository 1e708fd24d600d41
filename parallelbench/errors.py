"""Errors for users, and helpers for their messages."""

from __future__ import annotations

import difflib
import inspect
import re
import sys
import traceback
from typing import TYPE_CHECKING, Any

from parallelbench.redaction import kind_of_token, redacted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType


class ConfigError(Exception):
    """A request that can't be carried out. The message names the value, the constraint and the fix."""

    @property
    def reason(self) -> str:
        """The message without fixes that would be searched for only when somebody is told."""
        return str(self.args[0]) if self.args else ""

    def told_with(self, others: Sequence[ConfigError]) -> str:
        """What is told of this and of others that have the same reason."""
        return str(self)


LEFT_OUT = (
    "a step left parameters without a gradient, which other ranks wait for: let each parameter take part in each step, "
    "or choose strategy=single with devices=1"
)
"""Of a model whose values choose what takes part; what never does is known before training."""


class Refusals:
    """Collects what is refused, so that all of it is told at once: `with refusals:` notes a `ConfigError`, and goes on.

    Only for parts that are refused each for its own reason: what follows from another refusal helps nobody.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str], list[ConfigError]] = {}

    def __enter__(self) -> None:
        """Begin a part; may be repeated."""

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if isinstance(error, ConfigError):
            self.add(error)
        return isinstance(error, ConfigError)

    def add(self, refused: str | ConfigError, *, before: str = "", after: str = "") -> None:
        """Note a reason, or several in a line each, between these words."""
        error = ConfigError(refused) if isinstance(refused, str) else refused
        self._found.setdefault((before, error.reason, after), []).append(error)

    def raise_any(self) -> None:
        """Raise a `ConfigError` with a line for each reason, the first of very many; nothing where there is none."""
        found: dict[str, None] = {}
        for (before, reason, after), (first, *others) in self._found.items():  # what stays untold is only counted
            told = first.told_with(others) if len(found) < MOST_REFUSALS else reason
            found |= dict.fromkeys(f"{before}{line}{after}" for line in told.splitlines())
        lines = list(found)
        if more := len(lines[MOST_REFUSALS:]):
            lines = [*lines[:MOST_REFUSALS], f"and {count_of(more, 'more refusal')}"]
        if lines:
            raise ConfigError("\n".join(lines))


MOST_REFUSALS = 30
"""Reasons that are told at once; who reads more?"""


class StorageError(Exception):
    """A file could not be written or read: disk full, quota reached, no permission, or a server that is away."""


class EngineError(Exception):
    """An engine's process failed, or prepared something else than NumPy; `kind` is the outcome."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class SupersededError(Exception):
    """A newer attempt of the same run has begun: this one must not change anything."""

    def __init__(self) -> None:
        super().__init__("a newer attempt took over")


def refuse_token(text: str, *, where: str) -> None:
    """Raise `ConfigError` for what would be written into files that others read."""
    if kind := kind_of_token(text):
        raise ConfigError(
            f"{where} holds what looks like a secret ({kind}), and is written into files that others read: keep it in "
            "a file or an environment variable that your code reads, and out of names of files and folders"
        )


def no_permission(error: PermissionError) -> str:
    """Why somebody else's results cannot be read, and who can change that."""
    if error.filename is None:  # of a process, say, not of a file
        return str(error)
    return f"no permission for {error.filename}: ask its owner for chmod -R g+rX"


def choices(wrong: str, valid: Iterable[str]) -> str:
    """List the `valid` names, those most like the `wrong` one first: "did you mean ddp? valid: ddp, fsdp"."""
    names = sorted(set(valid))
    near = _near(wrong, names)
    ordered = near + [name for name in names if name not in near]
    return " ".join(filter(None, [did_you_mean(wrong, names), f"valid: {', '.join(ordered)}"]))


def did_you_mean(wrong: str, valid: Iterable[str]) -> str:
    """ "did you mean ddp?", with up to three names where they are equally near; empty where none is like it."""
    meant = most_like(wrong, valid)
    return f"did you mean {' or '.join(meant)}?" if meant else ""


def most_like(wrong: str, valid: Iterable[str]) -> list[str]:
    """Up to three names that are equally near; none where none is like it."""
    near = _near(wrong, sorted(set(valid)))
    return [name for name in near if _edits(wrong, name) == _edits(wrong, near[0])]


def _near(wrong: str, names: Sequence[str]) -> list[str]:
    """Up to three names, the nearest first; among equally near ones the most alike."""
    near = difflib.get_close_matches(wrong, names, n=len(names) or 1, cutoff=0.5)
    alike = {name: difflib.SequenceMatcher(None, name, wrong).ratio() for name in near}
    return sorted(near, key=lambda name: (_edits(wrong, name), -alike[name], name))[:3]


def _edits(one: str, other: str) -> int:
    """Letters to add, drop, replace, or exchange with the next, that make one word the other."""
    rows = [list(range(len(other) + 1))]
    for i, a in enumerate(one, 1):
        row = [i]
        for j, b in enumerate(other, 1):
            least = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (a != b))
            if i > 1 and j > 1 and (a, one[i - 2]) == (other[j - 2], b):
                least = min(least, rows[-2][j - 2] + 1)
            row.append(least)
        rows.append(row)
    return rows[-1][-1]


def raised_at(error: BaseException) -> str:
    """The error in one line, with file and line of the code that raised it."""
    if isinstance(error, SystemExit):
        return ends_the_program(error)
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {error.msg}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {type(error).__name__}: {one_line(str(error))}"


def ends_the_program(error: SystemExit) -> str:
    """What is wrong with a user's code that ended the program, which would look like success, with file and line."""
    return (
        f"{own_place(error)}this code ended the program (SystemExit: {one_line(str(error.code))}): let it raise an "
        'error instead, and let what it parses or runs as a script begin below `if __name__ == "__main__":`'
    )


def program(main: Callable[[], int]) -> int:
    """What a program's `main` returns; 1, with the reason on standard error, where a user's code ends the program."""
    try:
        return main()
    except SystemExit as error:
        print(ends_the_program(error), file=sys.stderr)
        return 1


def own_place(error: BaseException) -> str:
    """ "FILE:LINE: " of the innermost code that is a user's, not the suite's or a library's; empty where none is."""
    import sysconfig  # which looks at the whole installation

    suite = __file__.rpartition("/parallelbench/")[0]
    folders = [f"{suite}/{part}" for part in ("parallelbench", "launch", "analysis")]
    folders += map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))
    others = ("<", *(f"{folder}/" for folder in folders))
    places = [(frame.filename, str(frame.lineno)) for frame in traceback.extract_tb(error.__traceback__)]
    if "Original Traceback" in str(error):  # of another process: torch's workers send theirs as text
        places += re.findall(r'^ *File "(.+)", line (\d+)', str(error), re.MULTILINE)
    own = [place for place in places if not place[0].startswith(others)]
    return f"{':'.join(own[-1])}: " if own else ""


def place_of(function: Any) -> str:
    """ "FILE:LINE" where a function begins; its name where it has none, as a partial."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return repr(function) if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def count_of(n: int, noun: str, plural: str = "") -> str:
    """ "1 run", "2 runs"; "1,000 epochs"; `plural`: of a noun that takes more than an s."""
    return f"{n:,} {noun if n == 1 else plural or f'{noun}s'}"


def duration(seconds: float) -> str:
    """ "40 s", "3 min 5 s", "2 h 10 min"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def tellable(text: str) -> str:
    """A message of one or more lines as a terminal may get it.

    Characters that would steer the terminal, or can't be written, are escaped; what looks like a token is redacted.
    """
    return "".join(letter if _is_told(letter) else repr(letter)[1:-1] for letter in redacted(text))


def _is_told(letter: str) -> bool:
    """As it is. Of spaces other than the usual one, only the narrow one between a number and its unit: another one in
    a name would not be seen.
    """
    return letter in "\n\u202f" or letter.isprintable()


def refusal(text: str) -> str:
    """A message as the program prints it: each line says who refuses."""
    return "\n".join(f"parallelbench: {line}" for line in tellable(text).split("\n"))


def one_line(text: str, limit: int = 600) -> str:
    """`text` on one line of at most `limit` characters, all of which can be written to a file; tokens are redacted."""
    line = " ".join(redacted(text).encode(errors="replace").decode().split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
