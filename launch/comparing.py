"""The verb `compare`: from two folders, or two values of one key, to verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from analysis import Comparison
    from launch.compose import Extension


def compare(
    folders: Sequence[str],
    extension: Extension,
    console: Console,
    *,
    by: str | None,
    across: str,
    fail_if_slower: str | None,
) -> int:
    """Print how the second side does beside the first; the exit code is 0, or the gate's where a margin is given."""
    from analysis import verdicts

    margin = None if fail_if_slower is None else verdicts.percentage(fail_if_slower)
    comparison = _comparison(folders, extension, by=by, across=tuple(filter(None, across.split(","))))
    console.print(verdicts.table(comparison), crop=False)
    for line in verdicts.notes(comparison):
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
    if margin is None:
        return 0
    gate = verdicts.gate(comparison, margin=margin)
    print(gate.message)
    return gate.code


def _comparison(folders: Sequence[str], extension: Extension, *, by: str | None, across: Sequence[str]) -> Comparison:
    import analysis

    if by is not None:
        (folder,) = folders if len(folders) == 1 else ("",)
        if not folder:
            raise ConfigError("--by compares runs of one folder: name one DIR, or leave out --by")
        return analysis.by(analysis.load(folder, plugin=extension.plugin), *_choice(by), across=across)
    if len(folders) != 2:
        raise ConfigError("compare takes two folders, or one and --by KEY=A,B, e.g. --by strategy=ddp,fsdp")
    one, other = (analysis.load(folder, plugin=extension.plugin) for folder in folders)
    if one.root.resolve() == other.root.resolve():
        raise ConfigError(f"{folders[0]} and {folders[1]} are the same folder: a comparison needs two")
    return analysis.compare(one, other, across=across)


def _choice(by: str) -> tuple[str, str, str]:
    key, equals, values = by.partition("=")
    one, comma, other = values.partition(",")
    if not (key and equals and one and comma and other) or "," in other or one == other:
        raise ConfigError(f"--by {by}: expected a key and two values of it, e.g. --by strategy=ddp,fsdp")
    return key, one, other
