"""Folders of results with one thing wrong in each, made by a seed."""

from __future__ import annotations

import json
import random
import shutil
from typing import TYPE_CHECKING, Any

import polars as pl

from parallelbench.results.folder import file_sha256
from tests.analysis.factory import Fake, begin, config, failed, published

if TYPE_CHECKING:
    from pathlib import Path

ODD: tuple[Any, ...] = (
    *(None, -1, 0, 2**63, 1e308, -1e-308, "", "x" * 5000, "\x1b[31m", "[/red]", [], {}, [[]], True, "ok"),
)
CONTENTS = (
    *(
        b"",
        b"\0" * 100,
        b"{",
        b"[" * 100_000,
        b"null",
        b"{}",
        b"\xff\xfe",
        b"a: &x [*x]",
        b"x" * 200_000,
        b"---\n---\n",
    ),
)


def corrupted(root: Path, count: int, seed: int) -> list[str]:
    """`count` sweeps below `root`, each a copy of a whole one with something wrong; returns their paths."""
    draw = random.Random(seed)
    whole = root / "whole"
    for strategy, devices in (("single", 1), ("ddp", 2), ("fsdp", 2)):
        for repeat in range(3):
            time_s = {"single": 1.0, "ddp": 0.6, "fsdp": 0.7}[strategy] * (1 + repeat / 100)
            run = config(whole, strategy=strategy, devices=devices, repeat=repeat)
            published(run, Fake(epoch_time_s=lambda epoch, rank, time_s=time_s: time_s))
    failed(config(whole, epochs=7), "oom", "out of [/memory]", epochs=1)
    begin(config(whole, epochs=8), Fake())
    folders = [str(whole), str(whole / "demo"), str(next((whole / "demo").iterdir()))]
    for number in range(count):
        folder = root / f"c{number}"
        for chosen in draw.sample(sorted((whole / "demo").iterdir()), 2):
            shutil.copytree(chosen, folder / chosen.name)
        run = draw.choice(sorted(folder.iterdir()))
        draw.choice((_replace_file, _replace_file, _change_json, _change_json, _change_table))(run, draw)
        folders.append(str(draw.choice((folder, run))))
    return folders


def _replace_file(run: Path, draw: random.Random) -> None:
    """A file becomes something else, or nothing."""
    file = draw.choice(sorted(path for path in run.rglob("*") if path.is_file()))
    content = file.read_bytes()
    file.unlink()
    how = draw.choice(("gone", "content", "half", "flipped", "folder", "loop", "link"))
    if how == "content":
        file.write_bytes(draw.choice(CONTENTS))
    elif how == "half":
        file.write_bytes(content[: len(content) // 2])
    elif how == "flipped":
        at = draw.randrange(len(content) or 1)
        file.write_bytes(content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :])
    elif how == "folder":
        file.mkdir()
    elif how in ("loop", "link"):
        file.symlink_to({"loop": file, "link": "/etc/hostname"}[how])


def _change_json(run: Path, draw: random.Random) -> None:
    """One value of a record or a manifest becomes an odd one, or is left out."""
    file = draw.choice(sorted(run.rglob("*.json")) or [run / "result" / "manifest.json"])
    if not file.is_file():
        return
    try:
        plain = json.loads(file.read_bytes())
    except ValueError:
        return
    node = plain
    while isinstance(node, dict) and node:
        key = draw.choice(sorted(node))
        if isinstance(node[key], dict) and draw.random() < 0.7:
            node = node[key]
            continue
        if draw.random() < 0.2:
            del node[key]
        else:
            node[key] = draw.choice(ODD)
        break
    file.write_text(json.dumps(plain))


def _change_table(run: Path, draw: random.Random) -> None:
    """A table with odd values, fewer rows or other columns, of which the manifest has the right sha256."""
    manifest = run / "result" / "manifest.json"
    if not manifest.is_file():
        return
    plain = json.loads(manifest.read_bytes())
    table = draw.choice(sorted(plain["tables"]))
    file = manifest.with_name(f"{table}.parquet")
    frame = pl.read_parquet(file)
    column = draw.choice(frame.columns)
    how = draw.choice(
        ("null", "nan", "inf", "huge", "negative", "zero", "dropped", "renamed", "empty", "twice", "text")
    )
    if how in ("null", "nan", "inf", "huge", "negative", "zero") and frame.schema[column].is_numeric():
        value = {"null": None, "nan": "nan", "inf": "inf", "huge": 1e18, "negative": -1.0, "zero": 0.0}[how]
        odd = pl.lit(value).cast(pl.Float64).cast(frame.schema[column], strict=False)
        frame = frame.with_columns(odd.alias(column))
    elif how == "dropped":
        frame = frame.drop(column)
    elif how == "renamed":
        frame = frame.rename({column: f"{column}_"})
    elif how == "empty":
        frame = frame.clear()
    elif how == "twice":
        frame = pl.concat([frame, frame])
    else:
        frame = frame.with_columns(pl.lit("\x1b[31mtext").alias(column))
    frame.write_parquet(file)
    plain["tables"][table] |= {"bytes": file.stat().st_size, "sha256": file_sha256(file), "rows": frame.height}
    manifest.write_text(json.dumps(plain))
