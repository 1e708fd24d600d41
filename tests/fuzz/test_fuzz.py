"""2,000 commands by a grammar, and others that are stopped, find no room, or meet: no traceback, exit code 0, 1 or 2,
one clear message, nothing written elsewhere, no result lost.
"""

from __future__ import annotations

import random
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from analysis import load
from parallelbench import cli
from parallelbench.errors import MOST_REFUSALS
from parallelbench.results.folder import RunFolder
from tests.analysis.factory import config, published
from tests.fuzz.corrupted import corrupted
from tests.fuzz.grammar import Command, Grammar
from tests.test_cli import here, listing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["here"]
pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

SEED = 14
COUNTS = {"configured": 450, "own": 450, "on_folder": 1100}
INTERRUPTED, ON_A_SMALL_DISK = 24, 12
TOGETHER = 50
"""After so many commands it is looked whether they wrote anything."""
LIMIT_S = 20
"""Of processor time, for every command; a command that waits for something is ended after `HANGS_S`."""
HANGS_S = 200


class TooLong(BaseException):
    """A command did not end."""


@contextmanager
def watched() -> Iterator[None]:
    """End what runs longer than `LIMIT_S` on a processor, or hangs."""

    def end(number: int, _: Any) -> None:
        raise TooLong(signal.Signals(number).name)

    signals = {signal.ITIMER_PROF: (signal.SIGPROF, LIMIT_S), signal.ITIMER_REAL: (signal.SIGALRM, HANGS_S)}
    before = {number: signal.signal(number, end) for number, _ in signals.values()}
    for timer, (_, seconds) in signals.items():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer, (number, _) in signals.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


def problem(command: Command, capsys: pytest.CaptureFixture[str], *, codes: tuple[int, ...] = (0, 1, 2)) -> str:
    """What is wrong with how the program took a command; empty: nothing."""
    try:
        with watched():
            code: object = cli.main(command.words)
    except SystemExit as ended:  # argparse's way to end
        code = ended.code
    except (Exception, KeyboardInterrupt, TooLong) as error:
        capsys.readouterr()
        return f"{type(error).__name__}: {str(error)[:300]}"
    printed = capsys.readouterr()
    if code not in codes:
        return f"exit code {code}"
    return _said_badly(code, printed.out, printed.err)


def written_elsewhere(before: dict[str, int], commands: list[Command]) -> list[str]:
    """What changed since, besides the sweeps whose runs were to be forgotten."""
    after, root = listing(Path.cwd().parent), Path.cwd().parent
    sweeps = [Path(folder).absolute().parent for command in commands for folder in command.writes]
    changed = [root / path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
    return sorted(str(path) for path in changed if not any(path.is_relative_to(sweep) for sweep in sweeps))


def _said_badly(code: object, out: str, errors: str) -> str:
    """Whether what was printed is no clear message."""
    if any(not (letter.isprintable() or letter in "\n ") for letter in errors):
        return f"unprintable {errors[:200]!r}"
    if "Traceback" in out + errors:
        return "a traceback"
    lines = errors.splitlines()
    if code == 2 and not lines:
        return (
            ""
            if "refused" in out or "UNDECIDED" in out or '"gate"' in out
            else f"exit code 2 in silence: {out[:200]!r}"
        )
    if code == 2 and not lines[-1].startswith("parallelbench"):
        return f"an unclear message {lines[-1][:200]!r}"
    if bool(lines) and lines[0].startswith("usage: "):
        return ""
    if code == 2 and len(lines) > MOST_REFUSALS + 1:
        return f"{len(lines)} lines"
    return "" if code != 2 or all(line.startswith("parallelbench: ") for line in lines) else "a line of nobody's"


@pytest.fixture
def grammar(here: Path, monkeypatch: pytest.MonkeyPatch) -> Grammar:
    """About 60 corrupted folders beside whole ones."""
    monkeypatch.setattr(sys, "stdin", None)
    folders = corrupted(here / "zoo", 60, SEED)
    files = []
    for number, content in enumerate((b"", b"claims: x", b"seed: a\nclaims: [1]", b"a: &x [*x]", b"\xff", b"[" * 9999)):
        file = here / f"claims{number}.yaml"
        file.write_bytes(content)
        files.append(str(file))
    known = [*folders, str(here), "/proc", "/dev/null", "nowhere", "", "."]
    return Grammar(SEED, known, [*files, "nowhere"], here.parent / "confs")


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", COUNTS)
def test_no_command_ends_in_a_traceback(grammar: Grammar, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    make: Callable[[], Command] = getattr(grammar, kind)
    commands, found = [make() for _ in range(COUNTS[kind])], {}
    for start in range(0, len(commands), TOGETHER):
        some, before = commands[start : start + TOGETHER], listing(Path.cwd().parent)
        found |= {command.words: text for command in some if (text := problem(command, capsys))}
        if elsewhere := written_elsewhere(before, some):
            found[("any of these", str([command.words for command in some]))] = f"wrote {elsewhere[:3]}"
    assert not found, "\n".join(f"{text}: {words}"[:400] for words, text in found.items())


# --- commands that are stopped, that find no room, and that meet


@pytest.fixture
def sweep(here: Path) -> Path:
    """Twelve runs that are done."""
    for strategy, devices in (("single", 1), ("ddp", 2)):
        for repeat in range(6):
            published(config(here / "results", strategy=strategy, devices=devices, repeat=repeat))
    return here / "results" / "demo"


def runs_of(sweep: Path) -> set[str]:
    """The names of the runs that can be read."""
    return set(load(sweep).run["slug"])


@contextmanager
def interrupted(calls: int) -> Iterator[None]:
    """As if Ctrl-C came after a verb's so many calls of functions: the same whatever else the machine does."""
    left = None

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal left
        name = frame.f_code.co_name
        if frame.f_code is cli._do.__code__:
            left = calls if event == "call" else None
        elif left is not None and event == "call":
            left -= 1
            if left <= 0 and name not in ("__del__", "__exit__"):  # what Python finishes at any rate
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)


def test_commands_that_are_interrupted_lose_no_result(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw, whole = random.Random(SEED), runs_of(sweep)
    apart = ("compare", str(sweep), "--by", "strategy=single,ddp", "--across", "devices")
    readers = (("status", str(sweep)), apart, ("claims", str(sweep)))
    for words in readers:
        assert cli.main(words) == 0  # modules are loaded once
    capsys.readouterr()
    for _ in range(INTERRUPTED):
        gone = str(sweep / draw.choice(sorted(whole)))
        words = draw.choice((*readers, ("forget", gone), ("bundle", str(sweep), "--out", "bundle.tar.gz")))
        before = listing(sweep)
        with interrupted(int(10 ** draw.uniform(1, 4.5))):
            found = problem(Command(words), capsys, codes=(0, 1, 2, 130))
        assert not found, (words, found)
        if words[0] != "forget":
            assert listing(sweep) == before
        left = runs_of(sweep)
        assert whole - left <= {Path(gone).name}, "another run is lost"
        if words[0] == "forget" and left != whole:
            whole = left
        if len(whole) < 8:
            whole |= _again(sweep)


def _again(sweep: Path) -> set[str]:
    for strategy, devices in (("single", 1), ("ddp", 2)):
        for repeat in range(6):
            run = config(sweep.parent, strategy=strategy, devices=devices, repeat=repeat)
            if not RunFolder.of(run).path.exists():
                published(run)
    return runs_of(sweep)


def test_what_finds_no_room_says_so_and_leaves_nothing(
    sweep: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python 3.11 keeps a module of which half was written
    before, draw = listing(sweep), random.Random(SEED)
    writers = (
        ("report", str(sweep), "--figure", "runtime", "--out", "figure"),
        ("bundle", str(sweep), "--out", "bundle.tar.gz"),
        ("init", "me"),
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for number in range(ON_A_SMALL_DISK):
        words = writers[number % len(writers)]
        resource.setrlimit(resource.RLIMIT_FSIZE, (draw.choice((0, 1, 400, 3000)), hard))
        try:
            found = problem(Command(words), capsys)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not found, (words, found)
        assert listing(sweep) == before
        left = sorted(path.name for path in Path.cwd().iterdir())
        assert not [name for name in left if name.endswith((".tmp", ".gz"))], left
        shutil.rmtree("me", ignore_errors=True)
        shutil.rmtree("figure", ignore_errors=True)


def test_two_commands_at_once_lose_no_result(sweep: Path) -> None:
    whole = runs_of(sweep)
    first, second, *_ = sorted(str(sweep / name) for name in whole)
    pairs = (
        (("forget", first), ("forget", first)),
        (("forget", second), ("status", str(sweep))),
        (("init", "me"), ("init", "me")),
    )
    for pair in pairs:
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "parallelbench.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            for words in pair
        ]
        said = [each.communicate(timeout=HANGS_S)[0] for each in started]
        assert all(b"Traceback" not in output for output in said), said
        codes = sorted(each.returncode for each in started)
        assert codes[0] == 0, (pair, codes, said)
        assert codes[1] in (0, 2), (pair, codes, said)
    assert runs_of(sweep) == whole - {Path(first).name, Path(second).name}
