"""Bundles: one archive that holds all of a folder's results, is refused once tampered with, and is run again."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from msgspec import structs

from analysis import load, summary
from launch.slurm import submit
from launch.sweep import one_run
from launch.sweep.compose import NOTHING
from launch.verbs.bundle import SUMS, _day, planned_again, require_readable, unpack, usual_author, write
from parallelbench import cli
from parallelbench.errors import ConfigError, StorageError
from tests.analysis.factory import EPOCH_EVERY_S, Fake, config, failed, foreign, published
from tests.helpers import TINY
from tests.launch.fake_slurm import ON_SITE, FakeSlurm
from tests.test_cli import here, refused

__all__ = ["here"]

DOCS = Path(__file__).resolve().parents[2] / "docs"
Members = dict[str, bytes]
FILES = {"a/one.txt": b"1", "a/two.txt": b"22", "results.json": b"{}"}


@pytest.fixture
def results(here: Path) -> Path:
    for repeat in range(2):
        published(config(here / "results", repeat=repeat))
        published(config(here / "results", strategy="ddp", devices=2, repeat=repeat, optimizer="adam"))
    failed(config(here / "results", strategy="fsdp", devices=2), "oom", "out of memory", epochs=1)
    return here / "results"


def listed(page: Path) -> set[str]:
    """Files and folders at the top of a bundle that the tables of a page name."""
    return set(re.findall(r"^\| `([^`/]+/?)", page.read_text(), re.MULTILINE))


def empty(here: Path) -> Path:
    (here / "unpacked").mkdir()
    return here / "unpacked"


def made(*arguments: str) -> Path:
    assert cli.main(["bundle", *arguments]) == 0
    return Path(arguments[arguments.index("--out") + 1])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_bundle_has_what_a_reader_needs(results: Path, here: Path) -> None:
    """Results that their sums prove, and a citation."""
    published(foreign(config(here / "results", devices=2), "mine"))
    bundle = made(
        "results", "--out", "paper.tar.gz", "--title", "On digits", "--author", "Doe, Jane", "--author", "ACME"
    )
    root = unpack(bundle, empty(here))
    assert root.name == "paper"
    subprocess.run(["sha256sum", "--strict", "--quiet", "-c", SUMS], cwd=root, check=True)
    assert (root / "report" / "index.html").read_text().startswith("<!doctype html>")
    assert "optimizer.lr" in (root / "report" / "tables" / "hyperparameters.csv").read_text()
    runs = load(root / "results")
    assert runs.skipped == ()
    columns = ["run_id", "state", "outcome", "reason", "config_json"]
    assert runs.run.select(columns).sort("run_id").equals(load(results).run.select(columns).sort("run_id"))
    assert runs.epochs.height == load(results).epochs.height
    (environment,) = json.loads((root / "environment.json").read_text())
    assert (environment["environment"]["host"], len(environment["runs"])) == ("here", 6)
    assert sorted(runs.run["outcome"]) == [*["ok"] * 5, "oom"]
    assert len(list((root / "results").glob("*/*/config.yaml"))) == 6
    kept = {path.name for path in root.rglob("*")}
    assert not kept & {"log.txt", "heartbeat", "checkpoints", ".compacted.zip"}
    assert "outcome.json" in kept
    blank = [path.name for path in (root / "results").rglob("*") if path.is_file() and not path.read_bytes().strip()]
    assert not blank, "files that were reserved for errors, of which there were none"
    top = {path.name + "/" * path.is_dir() for path in root.iterdir()}
    assert listed(root / "README.md") == top - {"README.md"}
    assert listed(DOCS / "publication.md") >= top
    citation = yaml.safe_load((root / "CITATION.cff").read_text())
    last = datetime.fromtimestamp(Fake().started_at + 3 * EPOCH_EVERY_S + 500, tz=UTC)
    assert [citation[key] for key in ("cff-version", "type", "title")] == ["1.2.0", "dataset", "On digits"]
    assert citation["authors"] == [{"family-names": "Doe", "given-names": "Jane"}, {"name": "ACME"}]
    assert citation["date-released"] == last.strftime("%Y-%m-%d")
    assert citation["references"][0]["title"] == "parallelbench"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_rerun_asks_for_the_data_first_and_trains_what_was_bundled(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published(config(here / "results", data="mnist"))
    made("results", "--out", "a.tar.gz")
    assert f"CITATION.cff names {usual_author()} as author" in capsys.readouterr().out
    for word in ("epochs=1", "+seed=1", "optimizer.lr=1", "results=x"):
        assert f"{word}: a rerun trains what was bundled" in refused(capsys, "rerun", "a.tar.gz", word)
    assert "site=nowhere" in refused(capsys, "rerun", "a.tar.gz", "site=nowhere")
    message = refused(capsys, "rerun", "a.tar.gz", f"site.data_dir={here / 'data'}")
    assert "data=mnist is not prepared" in message
    assert not (here / "a-rerun").exists()


def test_runs_that_only_prepare_data_have_a_day(here: Path) -> None:
    prepare = {"engine": "numpy", "recipe": "normalise", "threads": 1, "executions": 1}
    folder = published(config(here / "results", epochs=0, preprocess=prepare))
    (attempt,) = folder.attempts()
    info = attempt.info()
    assert info is not None
    assert _day(load(here / "results")) == datetime.fromtimestamp(info.launched_at, tz=UTC).strftime("%Y-%m-%d")


def test_the_same_files_make_the_same_archive(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    sums = {write(tmp_path / place / "a.tar.gz", FILES) for place in (".", "other")}
    assert len(sums) == 1
    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "other" / "a.tar.gz").read_bytes()


def repacked(tmp_path: Path, change: Callable[[Members], None]) -> Path:
    """An archive of `FILES` whose members somebody changed afterwards."""
    path = tmp_path / "changed.tar.gz"
    write(path, FILES)
    with tarfile.open(path) as archive:
        members = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    change(members)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m.update({"changed/a/two.txt": b"23"}), "a/two.txt has another sha256 than SHA256SUMS says"),
        (lambda m: m.update({"changed/a/three.txt": b"3"}), "a/three.txt is not in SHA256SUMS"),
        (lambda m: m.pop("changed/a/one.txt"), "a/one.txt is missing, and in SHA256SUMS"),
        (lambda m: m.pop("changed/SHA256SUMS"), "SHA256SUMS is missing or unreadable"),
        (lambda m: m.update({"changed/SHA256SUMS": b"nonsense"}), "SHA256SUMS is missing or unreadable"),
        (lambda m: m.update({"../up.txt": b"x"}), "../up.txt would be unpacked elsewhere"),
        (lambda m: m.update({"changed/../../up.txt": b"x"}), "changed/../../up.txt would be unpacked elsewhere"),
        (lambda m: m.update({"/up.txt": b"x"}), "/up.txt would be unpacked elsewhere"),
        (lambda m: m.update({"changed/./up.txt": b"x"}), "up.txt is not in SHA256SUMS"),
        (lambda m: m.update({"other/up.txt": b"x"}), "it holds 2 files and folders"),
        (lambda m: m.update({"changed/a/one.txt/up.txt": b"x"}), "can't write"),
        (lambda m: m.update({"changed/SHA256SUMS/up.txt": b"x"}), "can't write"),
    ],
)
def test_a_tampered_bundle_is_refused_and_the_file_is_named(
    tmp_path: Path, change: Callable[[Members], None], why: str
) -> None:
    path, into = repacked(tmp_path, change), tmp_path / "inner" / "into"
    into.mkdir(parents=True)
    with pytest.raises((ConfigError, StorageError)) as error:
        unpack(path, into)
    assert why in str(error.value)
    assert all(into in found.parents for found in tmp_path.rglob("up.txt"))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes) -> None:
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo("a/link")
        member.type, member.linkname = kind, "/etc/passwd"
        archive.addfile(member)
    (tmp_path / "into").mkdir()
    with pytest.raises(ConfigError, match="a/link"):
        unpack(path, tmp_path / "into")
    assert not list((tmp_path / "into").iterdir())


@pytest.mark.parametrize("listed", [True, False])
def test_a_link_within_a_bundle_is_no_file_of_it(tmp_path: Path, listed: bool) -> None:
    path = tmp_path / "a.tar.gz"
    sums = b"".join(b"%s  %s\n" % (hashlib.sha256(b"1").hexdigest().encode(), name) for name in (b"one", b"two"))
    with tarfile.open(path, "w:gz") as archive:
        for name, content in (("a/one", b"1"), ("a/SHA256SUMS", sums if listed else sums.splitlines(True)[0])):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("a/two")
        link.type, link.linkname = tarfile.SYMTYPE, "one"
        archive.addfile(link)
    (tmp_path / "into").mkdir()
    with pytest.raises(ConfigError, match="a/two is no plain file"):
        unpack(path, tmp_path / "into")


def test_what_is_no_bundle_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here / "a.tar.gz", FILES)
    whole = (here / "a.tar.gz").read_bytes()
    (here / "cut.tar.gz").write_bytes(whole[: len(whole) // 2])
    (here / "text.tar.gz").write_text("no archive")
    (here / "flipped.tar.gz").write_bytes(whole[:60] + bytes([whole[60] ^ 0xFF]) + whole[61:])
    write(here / "later.tar.gz", FILES | {"bundle.json": b'{"bundle_version": 7, "parallelbench": "9.0"}'})
    for name, why in (
        ("none.tar.gz", "is no file"),
        (".", "is no file"),
        ("cut.tar.gz", "is no bundle, or damaged"),
        ("text.tar.gz", "is no bundle, or damaged"),
        ("flipped.tar.gz", "damaged"),
        ("a.tar.gz", "bundle.json is missing or unreadable"),
        ("later.tar.gz", "is a bundle of version 7, and this release reads 1"),
    ):
        assert why in refused(capsys, "rerun", name)
    assert sorted(path.name for path in here.iterdir() if path.is_dir()) == []


@pytest.mark.exhaustive
@pytest.mark.slow
def test_what_can_not_be_bundled_is_refused(results: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "there.tar.gz").write_text("")
    (here / "empty").mkdir()
    for words, why in (
        (["results", "--author", "Doe, "], "expected a name"),
        (["empty"], "empty holds no runs"),
        (["results", "--out", "there.tar.gz"], "there.tar.gz exists"),
        (["results", "--out", "a.zip"], "a bundle is a file NAME.tar.gz"),
        (["results", "--out", "a\\b.tar.gz"], "a bundle is a file NAME.tar.gz"),
        (["results", "--out", "none/a.tar.gz"], "is no folder"),
    ):
        assert why in refused(capsys, "bundle", *words)
    shutil.rmtree(results)
    failed(config(results), "oom", "out of memory", epochs=1)
    assert "holds no finished run" in refused(capsys, "bundle", "results")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_each_run_is_bundled_once_and_nothing_that_is_damaged(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for sweep, time_s in (("one", 1.0), ("two", 2.0)):
        for strategy, devices in (("single", 1), ("ddp", 2)):
            run = config(here / "results", sweep_name=sweep, strategy=strategy, devices=devices)
            published(run, Fake(epoch_time_s=lambda epoch, rank, time_s=time_s: time_s))  # type: ignore[misc]
    bad = published(config(here / "results", sweep_name="bad", seed=1)).path
    (bad / "result" / "epochs.parquet").write_bytes(b"")
    root = unpack(made("results", "--out", "a.tar.gz"), empty(here))
    assert sorted(path.name for path in (root / "results").iterdir()) == ["one"]
    printed = capsys.readouterr().out
    assert printed.count("left out: results/two/") == 2
    assert f"left out: {bad.relative_to(here)}: its result is damaged" in printed
    assert printed.count("left out: ") == 3
    runs, bundled = load(here / "results"), load(root / "results")
    assert summary(bundled).drop("group").equals(summary(runs).drop("group"))
    require_readable(bundled, Path("a.tar.gz"))
    assert len(planned_again(bundled, here / "again", [], NOTHING)) == 2


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_bundle_is_run_again_and_agrees(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = ("strategy=single", "epochs=2", "optimizer.lr=0.1,0.2", "measure.probe=false", "sweep.name=tiny")
    assert cli.main(["submit", *TINY, *runs]) == 0
    failed(config(here / "results", sweep_name="tiny"), "oom", "out of memory", epochs=1)
    bundle = made("results/tiny", "--out", "tiny.tar.gz")
    shutil.rmtree(here / "results")
    capsys.readouterr()
    assert cli.main(["rerun", str(bundle), "--out", "again"]) == 0
    printed = capsys.readouterr().out
    assert "not trained again, since they did not train to their end: 1 run of the bundle" in printed
    assert "Agreeing with the bundle in losses, accuracy and parity: 2 of 2 runs" in printed
    assert printed.count("the same") == 2
    assert printed.splitlines()[-1] == "again"
    assert len(list((here / "again" / "tiny").glob("*/result/manifest.json"))) == 2
    before = {path: path.stat().st_mtime_ns for path in (here / "again").rglob("*.parquet")}
    assert cli.main(["rerun", str(bundle), "--out", "again"]) == 0
    assert {path: path.stat().st_mtime_ns for path in (here / "again").rglob("*.parquet")} == before, "trained once"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_results_that_nobody_measured_do_not_agree(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Made-up losses of a run that trains: what trains again has others."""
    run = one_run([*TINY, "strategy=single", "epochs=2", "measure.probe=false", "sweep.name=tiny"]).run
    published(run, Fake(parity_passed=None))
    made("results", "--out", "tiny.tar.gz")
    capsys.readouterr()
    assert cli.main(["rerun", "tiny.tar.gz"]) == 1
    printed = capsys.readouterr().out
    assert "Agreeing with the bundle in losses, accuracy and parity: 0 of 1 run" in printed
    assert "apart (" in printed
    assert (here / "tiny-rerun" / "tiny").is_dir()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_queued_runs_are_compared_once_their_jobs_have_ended(
    here: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run = one_run([*TINY, "strategy=single", "epochs=2", "sweep.name=tiny"]).run
    published(run)
    made("results", "--out", "tiny.tar.gz")
    jobs: list[int] = []

    def sbatch(*_: object) -> str:
        jobs.append(1)
        return str(len(jobs))

    monkeypatch.setattr(submit, "sbatch", sbatch)
    capsys.readouterr()
    assert cli.main(["rerun", "tiny.tar.gz", *ON_SITE]) == 1
    printed = capsys.readouterr().out
    assert "not trained yet" in printed
    assert "1 have no result: the same command goes on" in printed
    assert len(jobs) == 1
    published(structs.replace(run, results=str(here / "tiny-rerun")))
    assert cli.main(["rerun", "tiny.tar.gz", *ON_SITE]) == 0
    assert "Agreeing with the bundle in losses, accuracy and parity: 1 of 1 run" in capsys.readouterr().out
    assert len(jobs) == 1
