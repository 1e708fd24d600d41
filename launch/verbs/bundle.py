"""The verbs for a publication: `bundle` packs results with all that belongs to them, `rerun` trains them again."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import pwd
import shlex
import shutil
import tarfile
import tempfile
import uuid
import zlib
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl
import yaml
from msgspec import structs
from rich.table import Table

from analysis import load, text
from analysis.comparison.counterparts import agreements
from analysis.comparison.exclusions import require_finished
from analysis.report.page import write_report_of
from launch.checks import prepare_all
from launch.launcher import SubmitOptions, launcher_of
from launch.local import EXIT_INTERRUPTED
from launch.sweep import PlannedRun, one_run
from launch.verbs.console import console, existing, say
from parallelbench.config.identity import CONFIGURATION_VERSION, run_id
from parallelbench.config.sites import LocalLauncher, SlurmLauncher
from parallelbench.errors import ConfigError, count_of, no_permission, one_line
from parallelbench.redaction import kind_of_token, redacted
from parallelbench.results.files import storage_errors
from parallelbench.results.folder import RunFolder, file_sha256
from parallelbench.results.tables import TABLES_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import Console

    from analysis.comparison.counterparts import Agreement
    from analysis.runs.reader import Runs
    from launch.sweep.compose import Extension
    from parallelbench.config.run import RunConfig


BUNDLE_VERSION = 1
"""Version of the archive's layout, which is in `INDEX`."""
INDEX = "bundle.json"
RESULTS, REPORT = "results", "report"
SUMS = "SHA256SUMS"
"""The file with the others' sha256, as `sha256sum -c` reads it."""
SUFFIX = ".tar.gz"
Files = dict[str, Path | bytes]
"""Name in the bundle → a file, or its content."""


def bundle(
    folder: str, extension: Extension, *, out: str | None, title: str | None, authors: Sequence[str] | None
) -> int:
    """Write one archive of all runs below a folder; the last line printed is its path."""
    runs = load(existing(folder), plugin=extension.plugin)
    require_finished(runs)
    path = Path(out).expanduser() if out else Path(f"{runs.root.resolve().name}-bundle{SUFFIX}")
    _require_new(path)
    sweeps = ", ".join(sorted(set(runs.run["sweep"])))
    names = authors or [usual_author()]
    with tempfile.TemporaryDirectory() as temporary:
        page = write_report_of(runs, Path(temporary) / "report")
        name, titled = path.name.removesuffix(SUFFIX), title or f"Measurements with parallelbench: {sweeps}"
        files = contents(runs, page.parent, name=name, title=titled, authors=names)
        refuse_secrets(files)
        checksum = write(path, files)
    for line in left_out(runs):
        say(line)
    if not authors:
        say(f'CITATION.cff names {names[0]} as author: --author "Family, Given" names others')
    say(f"{count_of(len(files) + 1, 'file')}, sha256 {checksum}; publish the sha256 beside the bundle")
    say(f"next: parallelbench rerun {shlex.quote(str(path))}")
    print(path)
    return 0


def _require_new(path: Path) -> None:
    if not path.name.endswith(SUFFIX) or path.name.startswith(".") or "\\" in path.name:
        raise ConfigError(
            f"--out {path}: a bundle is a file NAME{SUFFIX}, without a dot before it or a backslash in it"
        )
    if path.exists():
        raise ConfigError(f"{path} exists: delete it, or name another file with --out FILE")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path.absolute().parent} is no folder: make it, or name another file with --out FILE")


# --- what is in it

_OF_ATTEMPT = ("supervisor.json", "config.yaml", "attempt.json", "outcome.json", "error-rank*.json")
_JOURNALS = "journal-rank*.jsonl"
"""Of runs without a result: what they measured before they failed."""


def contents(runs: Runs, report: Path, *, name: str, title: str, authors: Sequence[str]) -> Files:
    """The files of a bundle with this name, but for their sums. `report`: a report on these runs, as it was written."""
    rows = runs.run.filter(_HAS_ENDED).sort("launched_at", nulls_last=True)
    files: Files = {}
    for row in rows.iter_rows(named=True):
        run = RunFolder(Path(row["folder"]))
        place = f"{RESULTS}/{run.path.parent.name}/{run.path.name}"
        if f"{place}/config.yaml" in files:
            raise ConfigError(f"two sweeps in {runs.root} are called {run.path.parent.name}: bundle each by itself")
        files |= {f"{place}/{inner}": path for inner, path in _of_run(run)}
    files |= {f"{REPORT}/{path.relative_to(report)}": path for path in report.rglob("*") if path.is_file()}
    texts = {
        INDEX: _json(
            {
                "bundle_version": BUNDLE_VERSION,
                "parallelbench": version("parallelbench"),
                "tables_version": TABLES_VERSION,
                "configuration_version": CONFIGURATION_VERSION,
                "title": title,
            }
        ),
        "environment.json": _json(_environments(runs)),
        "CITATION.cff": citation(title=title, authors=authors, day=_day(runs), version=version("parallelbench")),
        "README.md": _readme(name, title, rows.height),
    }
    return files | {file: text.encode() for file, text in texts.items()}


_HAS_ENDED = pl.col("state").is_in(["done", "failed"])


def left_out(runs: Runs) -> list[str]:
    """What of a folder is in no bundle, and why, in lines: what has not ended, damaged results, and copies."""
    unended = [f"{folder}: {state}" for folder, state in runs.run.filter(~_HAS_ENDED).select("folder", "state").rows()]
    lines = (*unended, *(f"{each.path}: {each.reason}" for each in runs.skipped))
    return [f"left out: {line}" for line in lines]


def _of_run(run: RunFolder) -> Iterator[tuple[str, Path]]:
    """The files of a run that say what was asked and what came of it; no logs, traces, checkpoints and blank files."""
    published = run.manifest() is not None
    patterns = ["config.yaml", "overrides.txt", *(f"attempts/*/{name}" for name in _OF_ATTEMPT)]
    patterns += ["result/*.parquet", "result/manifest.json"] if published else [f"attempts/*/{_JOURNALS}"]
    for pattern in patterns:
        for path in sorted(run.path.glob(pattern)):
            # Files that were reserved for the case of an error may be blank.
            if path.is_file() and not path.is_symlink() and (path.suffix != ".json" or path.read_bytes().strip()):
                yield path.relative_to(run.path).as_posix(), path


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def _environments(runs: Runs) -> list[dict[str, Any]]:
    """The distinct environments, each with the runs that recorded it."""
    rows = runs.run.drop_nulls("environment_json").group_by("environment_json", maintain_order=True).agg("slug").rows()
    return [{"runs": slugs, "environment": json.loads(content)} for content, slugs in rows]


def _day(runs: Runs) -> str:
    """The day of the last measurement, in UTC; a run that only prepares data has no epochs."""
    times = runs.epochs["finished_at"].drop_nulls().to_list() or runs.run["launched_at"].drop_nulls().to_list()
    return datetime.fromtimestamp(max(times), tz=UTC).strftime("%Y-%m-%d")


def _readme(name: str, title: str, runs: int) -> str:
    return f"""# {title}

{count_of(runs, "run")}, measured with parallelbench {version("parallelbench")}.

| file | what it is |
|---|---|
| `report/index.html` | figures, tables and claims on one page; opens offline |
| `report/tables/` | the tables as CSV, those of configurations and claims as LaTeX, too |
| `results/` | of each run its overrides and configuration, its attempts, and what it measured, as Parquet |
| `environment.json` | machine, versions and variables of the runs |
| `CITATION.cff` | how to cite these results |
| `bundle.json` | versions of the suite, its tables and its configurations |
| `SHA256SUMS` | the sha256 of each file: `sha256sum -c SHA256SUMS` |

`parallelbench rerun {name}.tar.gz` trains these runs again and says what agrees.
"""


CFF_VERSION = "1.2.0"


def citation(*, title: str, authors: Sequence[str], day: str, version: str) -> str:
    """The file's text. `day`: of the last measurement, as 2026-11-23. `version`: the suite's."""
    suite: dict[str, Any] = {
        "type": "software",
        "title": "parallelbench",
        "version": version,
        "authors": [{"name": "The parallelbench authors"}],
    }
    content: dict[str, Any] = {
        "cff-version": CFF_VERSION,
        "message": "If you use these results, please cite them as below.",
        "type": "dataset",
        "title": title,
        "authors": [_author(name) for name in authors],
        "date-released": day,
        "references": [suite],
    }
    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def _author(name: str) -> dict[str, str]:
    """ "Family, Given" is a person; a name without a comma is given as it is: a group, say."""
    if not all(part.strip() for part in name.split(",")) or name.count(",") > 1:
        raise ConfigError(f'--author {name!r}: expected a name, or "Family, Given"')
    family, comma, given = (part.strip() for part in name.partition(","))
    return {"family-names": family, "given-names": given} if comma else {"name": family}


def usual_author() -> str:
    """The full name of this account, or its login."""
    try:
        account = pwd.getpwuid(os.getuid())
    except KeyError:  # containers may have no such entry
        return f"user {os.getuid()}"
    full_name = account.pw_gecos.partition(",")[0].strip()
    return full_name or account.pw_name


def refuse_secrets(files: Files) -> None:
    """Raise `ConfigError` that names the first file that holds what looks like a token, or is named so."""
    for name, content in files.items():
        if kind := kind_of_token(name) or _kind_of_token_in(name, content):
            raise ConfigError(
                f"{redacted(name)} holds what looks like a secret ({kind}), and a bundle is published: remove it from "
                "that file, or take its run out with `parallelbench forget RUN`"
            )


def _kind_of_token_in(name: str, content: Path | bytes) -> str:
    if not name.endswith(".parquet"):
        written = content if isinstance(content, bytes) else content.read_bytes()
        return kind_of_token(written.decode(errors="surrogateescape"))
    columns = pl.scan_parquet(content).select(pl.col(pl.String)).collect()
    words = (word for column in columns for word in column.unique().drop_nulls())
    return next(filter(None, map(kind_of_token, words)), "")


def write(path: Path, files: Mapping[str, Path | bytes]) -> str:
    """Write an archive of these files, in a folder of its own name; returns its sha256.

    The same files make the same bytes, whenever and by whomever they are packed. It appears whole, or not at all.
    """
    sums = "".join(f"{_sha256(files[name])}  {name}\n" for name in sorted(files))
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    with storage_errors(path, option="--out FILE"):
        try:
            with (
                temporary.open("xb") as file,
                gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed,
                tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
            ):
                for name in (SUMS, *sorted(files)):
                    content = sums.encode() if name == SUMS else files[name]
                    _add(archive, f"{path.name.removesuffix(SUFFIX)}/{name}", content)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return file_sha256(path)


def _sha256(content: Path | bytes) -> str:
    return hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else file_sha256(content)


def _add(archive: tarfile.TarFile, name: str, content: Path | bytes) -> None:
    member = tarfile.TarInfo(name)
    member.mode = 0o644
    with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
        member.size = file.seek(0, os.SEEK_END)
        file.seek(0)
        archive.addfile(member, file)


# --- training it again


def rerun(archive: str, extension: Extension, *, overrides: Sequence[str], out: str | None) -> int:
    """Train the runs of a bundle again, and print what agrees; 1 where something does not."""
    path = Path(archive).expanduser()
    results = Path(out).expanduser() if out else Path(f"{path.name.removesuffix(SUFFIX)}-rerun")
    with tempfile.TemporaryDirectory() as temporary:
        root = unpack(path, Path(temporary))
        require_known(root, path)
        bundled = load(root / RESULTS, plugin=extension.plugin)
        require_readable(bundled, path)
        plan = planned_again(bundled, results, overrides, extension)
        if others := bundled.run.height - len(plan):
            say(f"not trained again, since they did not train to their end: {count_of(others, 'run')} of the bundle")
        if (code := train(list(plan.values()), console())) == EXIT_INTERRUPTED:
            return code
        again = load(results, plugin=extension.plugin)
        found = agreements(bundled, again, {known: run_id(planned.run) for known, planned in plan.items()})
    console().print(_table(found))
    say(_summed_up(found))
    print(results)
    return 0 if all(each.agrees for each in found) else 1


_UNREADABLE = (tarfile.TarError, EOFError, OSError, zlib.error)


def unpack(path: Path, into: Path) -> Path:
    """Unpack a bundle into an empty folder; returns the folder of its files.

    Raises `ConfigError` that names the file where the archive is damaged, holds what would lie outside of that folder,
    or holds other files than its sums, or files with other contents.
    """
    with _opened(path) as archive:
        size, free = sum(member.size for member in archive.getmembers()), shutil.disk_usage(into).free
        if size > free:
            raise ConfigError(
                f"{path} takes {size:,} bytes unpacked, and {free:,} are free: set TMPDIR to a larger disk"
            )
        with storage_errors(into, option="TMPDIR=DIR"):
            for member in archive.getmembers():  # tarfile's own filters came with Python 3.11.4
                _unpack_file(path, archive, member, into)
    tops = sorted(into.iterdir())
    if len(tops) != 1 or not tops[0].is_dir():
        raise ConfigError(f"{path} is no bundle: it holds {len(tops)} files and folders, and a bundle holds one folder")
    _require_sums(path, tops[0])
    return tops[0]


def _unpack_file(path: Path, archive: tarfile.TarFile, member: tarfile.TarInfo, into: Path) -> None:
    """Unpack a file that lies below the folder, and refuse all else: links, devices, names that lead elsewhere."""
    name = PurePosixPath(member.name)
    content = archive.extractfile(member) if member.isreg() else None
    if content is None:
        raise _refused(path, member.name, "is no plain file")
    if name.is_absolute() or ".." in name.parts:
        raise _refused(path, member.name, "would be unpacked elsewhere")
    target = into / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with content, target.open("wb") as file:
        shutil.copyfileobj(content, file)


@contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    if not path.is_file():
        raise ConfigError(f"{path} is no file: name a bundle, as `parallelbench bundle DIR` writes it")
    try:
        with tarfile.open(path, "r:gz") as archive:
            yield archive
    except PermissionError as error:
        raise ConfigError(no_permission(error)) from None
    except _UNREADABLE as error:
        what = one_line(str(error)) or type(error).__name__
        raise ConfigError(f"{path} is no bundle, or damaged ({what}): get it again") from None


def _require_sums(path: Path, root: Path) -> None:
    try:
        lines = (root / SUMS).read_text(encoding="utf-8").splitlines()
        listed = {name: checksum for checksum, name in (line.split("  ", 1) for line in lines)}
    except (OSError, ValueError):
        raise ConfigError(f"{path} is no bundle: {SUMS} is missing or unreadable") from None
    names = {file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_symlink() or not file.is_dir()}
    for name in sorted((names - {SUMS}) | listed.keys()):
        if name not in listed:
            raise _refused(path, name, f"is not in {SUMS}")
        if name not in names or (root / name).is_symlink():
            raise _refused(path, name, f"is missing, and in {SUMS}")
        if file_sha256(root / name) != listed[name]:
            raise _refused(path, name, f"has another sha256 than {SUMS} says")


def _refused(path: Path, name: str, why: str) -> ConfigError:
    return ConfigError(f"{path} was tampered with, or damaged: {name} {why}; get it again from where it was published")


def require_known(root: Path, bundle: Path) -> None:
    """Raise `ConfigError` for an unpacked bundle that this release can't read."""
    try:
        index = msgspec.json.decode((root / INDEX).read_bytes())
        found = index["bundle_version"]
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{bundle} is no bundle: {INDEX} is missing or unreadable") from None
    if found != BUNDLE_VERSION:
        raise ConfigError(
            f"{bundle} is a bundle of version {found}, and this release reads {BUNDLE_VERSION}: install the release "
            f"that made it (parallelbench {index.get('parallelbench')})"
        )


_OURS = ("launcher", "site")
"""What may be chosen when runs are trained again: none of it changes what is trained."""


def require_readable(bundled: Runs, bundle: Path) -> None:
    """Raise `ConfigError` for a bundle with results that can't be read, or without any."""
    for skipped in bundled.skipped:
        raise ConfigError(f"{bundle} holds results that can't be read: {skipped.path.name}: {skipped.reason}")
    if bundled.run.filter(state="done").is_empty():
        raise ConfigError(f"{bundle} holds no finished run: there is nothing to train again")


def planned_again(
    bundled: Runs, results: Path, overrides: Sequence[str], extension: Extension
) -> dict[str, PlannedRun]:
    """Bundled run id → the run to train, of those that trained to their end, in the order in which they were measured.

    `overrides` choose launcher and site. Raises `ConfigError` for others, and for runs of a class that is not there.
    """
    for word in overrides:
        if word.partition("=")[0].lstrip("+").partition(".")[0] not in _OURS:
            raise ConfigError(
                f"{word}: a rerun trains what was bundled; only launcher and site are chosen anew, e.g. "
                "site.data_dir=DIR launcher.timeout_s=600"
            )
    here = one_run(overrides, extension).run
    rows = bundled.run.filter(state="done").sort("launched_at", nulls_last=True).select("run_id", "folder").rows()
    plan = {}
    for known, folder in rows:
        run = RunFolder(Path(folder)).config(extension.plugin)
        if run.strategy.starts_ranks:
            raise ConfigError(
                f"{Path(folder).name} is a program of its author's: a rerun executes no commands that come with a "
                f"bundle. Get the program, and submit it yourself: program={shlex.quote(run.strategy.command)}"  # type: ignore[attr-defined]
            )
        ours = structs.replace(run, results=str(results), launcher=_launcher(run, here), site=here.site)
        plan[known] = PlannedRun(ours, (Path(folder) / "overrides.txt").read_text(encoding="utf-8").splitlines())
    return plan


def _launcher(run: RunConfig, here: RunConfig) -> object:
    """This machine's launcher, with those options of the run's that are a part of its id."""
    launcher = structs.replace(here.launcher, oversubscribe=run.launcher.oversubscribe)
    if isinstance(launcher, (LocalLauncher, SlurmLauncher)):
        return structs.replace(launcher, pack=run.launcher.packed)
    return launcher


def train(plan: Sequence[PlannedRun], console: Console) -> int:
    """Check all runs, then train those that are missing, sweep by sweep; `EXIT_INTERRUPTED`, or the last exit code."""
    launcher = launcher_of(plan[0].run)
    prepared = prepare_all(plan, launcher.prepare)
    code = 0
    by_sweep = sorted(prepared, key=lambda item: str(item.folder.path.parent))
    for _, members in groupby(by_sweep, key=lambda item: item.folder.path.parent):
        code = launcher.submit(list(members), SubmitOptions(), console)
        if code == EXIT_INTERRUPTED:
            break
    return code


def _table(found: Sequence[Agreement]) -> Table:
    """One row per run: what agrees, and both times."""
    shown = Table(box=None, pad_edge=False)
    for heading in ("run", "losses", "test accuracy", "parity", "time per epoch", "agrees"):
        shown.add_column(heading, overflow="fold")
    for each in found:
        if each.unfinished:
            shown.add_row(each.run, each.unfinished, "", "", "", "no")
            continue
        losses = each.losses.value if not each.difference else f"{each.losses.value} ({each.difference:.2g} apart)"
        accuracies, times = " → ".join(map(text.percent, each.accuracies)), " → ".join(map(text.seconds, each.times_s))
        within = "" if each.allowed_accuracy is None else f" (± {text.percent(each.allowed_accuracy)})"
        parity = " → ".join(map(text.parity, each.parity))
        data = "" if each.same_data else ", on other data"
        row = (each.run, losses + data, accuracies + within, parity, times, "yes" if each.agrees else "no")
        shown.add_row(*row)
    return shown


def _summed_up(found: Sequence[Agreement]) -> str:
    agreeing = sum(each.agrees for each in found)
    waiting = sum(bool(each.unfinished) for each in found)
    rest = f"; {waiting} have no result: the same command goes on" if waiting else ""
    return (
        f"Agreeing with the bundle in losses, accuracy and parity: {agreeing} of {count_of(len(found), 'run')}{rest}. "
        "Left is the bundle's, right is this machine's. Times are told, not judged."
    )
