"""What is in a bundle: configurations, results, report, environments, commands, citation."""

from __future__ import annotations

import hashlib
import io
import json
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

from analysis.csv_file import without_tokens
from launch.bundle.citation import citation
from launch.bundle.commands import commands
from parallelbench.config.identity import CONFIGURATION_VERSION
from parallelbench.errors import ConfigError, count_of
from parallelbench.redaction import kind_of_token, redacted
from parallelbench.results.files import read_record
from parallelbench.results.folder import RunFolder
from parallelbench.results.tables import TABLES_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from analysis.reader import Runs

BUNDLE_VERSION = 1
"""Version of the archive's layout, which is in `INDEX`."""
INDEX = "bundle.json"
RESULTS, REPORT = "results", "report"
Files = dict[str, Path | bytes]
"""Name in the bundle → a file, or its content."""

_OF_ATTEMPT = ("supervisor.json", "config.yaml", "attempt.json", "outcome.json", "error-rank*.json")
_JOURNALS = "journal-rank*.jsonl"
"""Of runs without a result: what they measured before they failed."""


def contents(runs: Runs, report: Path, *, name: str, title: str, authors: Sequence[str]) -> Files:
    """The files of a bundle with this name, but for their sums. `report`: a report on these runs, as it was written."""
    rows = _measured(runs).filter(_HAS_ENDED).sort("launched_at", nulls_last=True)
    files: Files = {}
    index: list[dict[str, Any]] = []
    for row in rows.iter_rows(named=True):
        run = RunFolder(Path(row["folder"]))
        place = f"{RESULTS}/{run.path.parent.name}/{run.path.name}"
        if any(known["folder"] == place for known in index):
            raise ConfigError(f"two sweeps in {runs.root} are called {run.path.parent.name}: bundle each by itself")
        files |= {f"{place}/{inner}": path for inner, path in _of_run(run)}
        told = ("run_id", "outcome", "data", "model", "strategy", "devices", "repeat", "device_type", "device_name")
        index.append({"folder": place} | {key: row[key] for key in told})
    files |= {f"{REPORT}/{path.relative_to(report)}": path for path in report.rglob("*") if path.is_file()}
    texts = {
        INDEX: _json(_versions() | {"title": title, "runs": index}),
        "environment.json": _json(_environments(runs)),
        "commands.sh": commands(runs, bundle=f"{name}.tar.gz"),
        "CITATION.cff": citation(title=title, authors=authors, day=_day(runs), version=version("parallelbench")),
        "README.md": _readme(name, title, len(index)),
    }
    return files | {file: text.encode() for file, text in texts.items()}


_HAS_ENDED = pl.col("state").is_in(["done", "failed"])


def _measured(runs: Runs) -> pl.DataFrame:
    """The rows of the run table, also of runs that a second sweep has measured: its others are compared with them."""
    every = [runs.run, *(there.run for there in runs.sweeps.values())]
    return pl.concat(every).unique("folder", keep="first", maintain_order=True)


def left_out(runs: Runs) -> list[str]:
    """What of a folder is in no bundle, and why, in lines: what has not ended, damaged results, and copies."""
    measured = _measured(runs)
    unended = measured.filter(~_HAS_ENDED).select("folder", "state").rows()
    skipped = [each for each in runs.skipped if str(each.path) not in set(measured["folder"])]
    lines = (*(f"{folder}: {state}" for folder, state in unended), *(f"{each.path}: {each.reason}" for each in skipped))
    return [f"left out: {line}" for line in lines]


def without_secrets(files: Files) -> tuple[Files, list[str]]:
    """The same files without what looks like a token, and what was replaced or left out, in lines."""
    kept = {name: content for name, content in files.items() if not kind_of_token(name)}
    lines = [f"left out: {redacted(name)}: its name looks like a secret" for name in files.keys() - kept.keys()]
    changed = {name: clean for name, content in kept.items() if (clean := _redacted(name, content)) is not None}
    for name in [each for each in changed if each.startswith(f"{RESULTS}/") and each.endswith(".parquet")]:
        folder, _, table = name.removesuffix(".parquet").rpartition("/")
        manifest = msgspec.json.decode(
            changed.get(f"{folder}/manifest.json") or _bytes(kept[f"{folder}/manifest.json"])
        )
        of_table = {"bytes": len(changed[name]), "sha256": hashlib.sha256(changed[name]).hexdigest()}
        manifest["tables"][table] |= of_table
        changed[f"{folder}/manifest.json"] = msgspec.json.encode(manifest)
    lines += [f"replaced in {name}: what looks like a secret" for name in changed if not name.endswith("manifest.json")]
    return kept | changed, sorted(lines)


def _redacted(name: str, content: Path | bytes) -> bytes | None:
    """A file's content without what looks like a token; None where there is nothing like it."""
    if not name.endswith(".parquet"):
        text = _bytes(content).decode(errors="surrogateescape")
        return None if (clean := redacted(text)) == text else clean.encode(errors="surrogateescape")
    texts = pl.scan_parquet(content).select(pl.col(pl.String)).collect()
    if without_tokens(texts, but=()).equals(texts):
        return None
    written = io.BytesIO()
    without_tokens(pl.read_parquet(content), but=()).write_parquet(written)
    return written.getvalue()


def _bytes(content: Path | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()


def _of_run(run: RunFolder) -> Iterator[tuple[str, Path]]:
    """The files of a run that say what was asked and what came of it; no logs, traces, checkpoints and blank files."""
    published = run.manifest() is not None
    patterns = ["config.yaml", "overrides.txt", *(f"attempts/*/{name}" for name in _OF_ATTEMPT)]
    patterns += ["result/*.parquet", "result/manifest.json"] if published else [f"attempts/*/{_JOURNALS}"]
    for pattern in patterns:
        for path in sorted(run.path.glob(pattern)):
            if path.is_file() and not path.is_symlink() and not _is_blank(path):
                yield path.relative_to(run.path).as_posix(), path


def _is_blank(path: Path) -> bool:
    """Whether it is a file that was reserved for the case of an error, and never written."""
    return path.suffix == ".json" and not path.read_bytes().strip()


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def _versions() -> dict[str, Any]:
    return {
        "bundle_version": BUNDLE_VERSION,
        "parallelbench": version("parallelbench"),
        "tables_version": TABLES_VERSION,
        "configuration_version": CONFIGURATION_VERSION,
    }


def _environments(runs: Runs) -> list[dict[str, Any]]:
    """The distinct environments, each with the runs that recorded it."""
    rows = runs.run.drop_nulls("environment_json").group_by("environment_json", maintain_order=True).agg("slug").rows()
    return [{"runs": slugs, "environment": json.loads(content)} for content, slugs in rows]


def _day(runs: Runs) -> str:
    """The day of the last measurement, in UTC."""
    last = runs.epochs["finished_at"].max()
    return datetime.fromtimestamp(float(last), tz=UTC).strftime("%Y-%m-%d")  # type: ignore[arg-type]


def _readme(name: str, title: str, runs: int) -> str:
    return f"""# {title}

{count_of(runs, "run")}, measured with parallelbench {version("parallelbench")}.

| file | what it is |
|---|---|
| `report/index.html` | figures, tables and claims on one page; opens offline |
| `report/tables/` | the tables as CSV and LaTeX, `hyperparameters.csv` among them |
| `results/` | of each run its configuration, its attempts, and what it measured, as Parquet |
| `environment.json` | machine, versions and variables of the runs |
| `commands.sh` | the command that measures each run again |
| `CITATION.cff` | how to cite these results |
| `bundle.json` | versions of the suite, its tables and its configurations; all runs with id and outcome |
| `SHA256SUMS` | the sha256 of each file: `sha256sum -c SHA256SUMS` |

`parallelbench rerun {name}.tar.gz` trains these runs again and says what agrees.
"""


def require_known(root: Path, bundle: Path) -> None:
    """Raise `ConfigError` for an unpacked bundle that this release can't read."""
    try:
        index = msgspec.json.decode(read_record(root / INDEX))
        found = index["bundle_version"]
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{bundle} is no bundle: {INDEX} is missing or unreadable") from None
    if found != BUNDLE_VERSION:
        raise ConfigError(
            f"{bundle} is a bundle of version {found}, and this release reads {BUNDLE_VERSION}: install the release "
            f"that made it (parallelbench {index.get('parallelbench')})"
        )
