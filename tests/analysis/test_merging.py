"""`report A B`: folders of several machines in one report, of which each machine's runs are compared by themselves."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

from analysis import facts, load, summary
from analysis.comparison.exclusions import excluded
from analysis.folders import load_all, replications
from analysis.report import page as page_module
from parallelbench import cli
from parallelbench.errors import ConfigError
from tests.analysis.factory import Fake, as_words, config, failed, published, words_of

if TYPE_CHECKING:
    from pathlib import Path

    from parallelbench.results.folder import RunFolder

pytestmark = pytest.mark.slow

ENVIRONMENT = json.loads(Fake().environment)
TOLD = ["configuration", "steady_epoch_time_s", "speed_up", "speed_up_pairs", "runs", "repeats"]


def on(host: str | None, time_s: float, **entries: Any) -> Fake:
    environment = ENVIRONMENT | {"host": host} | entries
    return Fake(epoch_time_s=lambda epoch, rank: time_s, environment=json.dumps(environment))


def measured(root: Path, host: str | None, single_s: float, ddp_s: float, *, repeats: int = 3, **run: Any) -> Path:
    """Repeats of one device and of two in a folder of one machine."""
    for repeat in range(repeats):
        published(config(root, repeat=repeat, **run), on(host, single_s))
        published(config(root, strategy="ddp", devices=2, repeat=repeat, **run), on(host, ddp_s))
    return root


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """The same runs on two machines, of which the second is twice as fast and scales worse."""
    return [
        measured(tmp_path / "a", "alpha", 10.0, 6.0),
        measured(tmp_path / "b", "beta", 5.0, 4.0),
    ]


def by_group(paths: list[Path]) -> dict[str, list[tuple[Any, ...]]]:
    rows = summary(load_all(paths))
    return {str(group): members.select(TOLD).rows() for (group,), members in rows.group_by("group")}


@pytest.mark.exhaustive
def test_a_run_that_was_measured_elsewhere_is_kept_by_host_and_no_duplicate(two: list[Path]) -> None:
    runs = load_all(two)
    assert runs.run.height == runs.run["run_id"].n_unique() == 12
    assert runs.skipped == ()
    assert excluded(runs).is_empty()
    assert by_group(two) == {
        "digits · cnn_small · machine alpha": [("single × 1", 10.0, 1.0, 3, 3, 3), ("ddp × 2", 6.0, 10 / 6, 3, 3, 3)],
        "digits · cnn_small · machine beta": [("single × 1", 5.0, 1.0, 3, 3, 3), ("ddp × 2", 4.0, 5 / 4, 3, 3, 3)],
    }


@pytest.mark.exhaustive
def test_one_device_of_another_machine_is_no_baseline(tmp_path: Path) -> None:
    for repeat in range(3):
        published(config(tmp_path / "a", repeat=repeat), on("alpha", 10.0))
        published(config(tmp_path / "b", strategy="ddp", devices=2, repeat=repeat), on("beta", 5.0))
    rows = summary(load_all([tmp_path / "a", tmp_path / "b"]))
    assert dict(rows.select("configuration", "speed_up").rows()) == {"single × 1": 1.0, "ddp × 2": None}
    (tmp_path / "c").mkdir()
    for folder in ("a", "b"):
        shutil.copytree(tmp_path / folder / "demo", tmp_path / "c" / folder)
    together = summary(load(tmp_path / "c"))
    assert dict(together.select("configuration", "speed_up").rows())["ddp × 2"] == 2.0, "the hosts alone are alike"


@pytest.mark.exhaustive
def test_folders_that_share_a_host_are_one_machine(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for repeat in range(3):
        published(config(paths[0], repeat=repeat), on("alpha", 10.0))
        published(config(paths[1], strategy="ddp", devices=2, repeat=repeat), on("alpha", 8.0))
    measured(paths[2], "beta", 5.0, 4.0)
    shutil.copytree(next(paths[0].glob("demo/*-r0-*")), paths[1] / "demo" / next(paths[0].glob("demo/*-r0-*")).name)
    same = load_all(paths[:2])
    assert same.machines == {}
    assert dict(summary(same).select("configuration", "speed_up").rows()) == {"single × 1": 1.0, "ddp × 2": 1.25}
    assert [("the same run as" in each.reason, each.path.parent.parent) for each in same.skipped] == [(True, paths[0])]
    every = by_group(paths)
    assert every["digits · cnn_small · machine alpha"][1] == ("ddp × 2", 8.0, 1.25, 3, 3, 3)
    assert every["digits · cnn_small · machine beta"][1] == ("ddp × 2", 4.0, 1.25, 3, 3, 3)


def test_machines_of_one_name_are_told_apart_by_their_ids_and_folders_taken_for_one_are_told(tmp_path: Path) -> None:
    for name, entries in (("a", {"machine": "one"}), ("b", {"machine": "two"}), ("c", {"machine": "one"}), ("old", {})):
        published(config(tmp_path / name, seed=["a", "b", "c", "old"].index(name)), on("localhost", 1.0, **entries))
    a, b, c, old = (tmp_path / name for name in ("a", "b", "c", "old"))
    assert list(load_all([a, b]).of_machines) == [f"localhost ({a})", f"localhost ({b})"]
    assert replications(load_all([a, c])) == [f"taken for one machine: {a} and {c} (host localhost)"]
    assert replications(load_all([a, old])) == [f"taken for one machine: {a} and {old} (host localhost)"]
    told = replications(load_all([a, b, c]))
    assert told[0] == f"taken for one machine: {a} and {c} (host localhost)"
    assert told[1].startswith("Runs of 2 machines: ")
    assert replications(load(a)) == []


def test_a_cluster_has_several_hosts_and_chains_of_folders_are_one(tmp_path: Path) -> None:
    hosts = {"a": ("n1", "n2"), "b": ("n3", "n4"), "c": ("n2", "n3"), "d": ("other",)}
    for name, of in hosts.items():
        for repeat, host in enumerate(of):
            published(config(tmp_path / name, repeat=repeat, seed="abcd".index(name)), on(host, 1.0))
    runs = load_all([tmp_path / name for name in hosts])
    assert list(runs.of_machines) == ["n1 and 3 more", "other"]
    assert runs.of_machines["n1 and 3 more"].folders == tuple(tmp_path / name for name in "abc")
    apart = load_all([tmp_path / "a", tmp_path / "b"])
    assert list(apart.of_machines) == ["n1 and 1 more", "n3 and 1 more"]


def test_equal_names_of_unlike_machines_and_unrecorded_hosts_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for name, fake in (
        ("a", on("localhost", 1.0, cpu="One")),
        ("b", on("localhost", 2.0, cpu="Other")),
        ("c", on(None, 3.0)),
        ("d", on(None, 4.0)),
    ):
        published(config(tmp_path / name), fake)
    runs = load_all([tmp_path / name for name in "abcd"])
    assert list(runs.of_machines) == [
        f"localhost ({tmp_path / 'a'})",
        f"localhost ({tmp_path / 'b'})",
        str(tmp_path / "c"),
        str(tmp_path / "d"),
    ]
    assert facts(runs)["group"].n_unique() == 4


@pytest.mark.exhaustive
def test_what_each_machine_measured_is_as_in_its_own_report(tmp_path: Path) -> None:
    """Also where two sweeps have measured the same runs, of which the larger one's are read."""
    a = measured(tmp_path / "a", "alpha", 10.0, 6.0)
    measured(tmp_path / "a", "alpha", 20.0, 11.0, sweep_name="again")
    for repeat in range(3):
        fsdp = config(tmp_path / "a", strategy="fsdp", devices=2, repeat=repeat, sweep_name="again")
        published(fsdp, on("alpha", 10.0))
    b = measured(tmp_path / "b", "beta", 5.0, 4.0)
    every = by_group([a, b])
    for path, machine in ((a, "alpha"), (b, "beta")):
        alone = summary(load(path)).select(TOLD).rows()
        assert every[f"digits · cnn_small · machine {machine}"] == alone
    assert ("fsdp × 2", 10.0, 2.0, 3, 3, 3) in every["digits · cnn_small · machine alpha"]


@pytest.mark.exhaustive
def test_a_run_that_died_early_has_the_device_of_its_own_machine(two: list[Path]) -> None:
    run = config(two[1], strategy="fsdp", devices=2)
    failed(run, "error", "died", epochs=0)
    path = next(two[1].glob("demo/*fsdp*/attempts/*/journal-rank0.jsonl"))
    path.unlink()
    rows = facts(load_all(two)).filter(strategy="fsdp")
    assert rows["group"].to_list() == ["digits · cnn_small · machine beta"]


def damage(run: RunFolder) -> None:
    table = run.result / "epochs.parquet"
    content = bytearray(table.read_bytes())
    content[len(content) // 2] ^= 0xFF
    table.write_bytes(bytes(content))


@pytest.mark.exhaustive
def test_a_folder_of_which_nothing_can_be_read_keeps_none_of_the_others_from_being_told(two: list[Path]) -> None:
    bad = published(config(two[0].parent / "c"), on("gamma", 1.0))
    damage(bad)
    assert list(load_all([*two, two[0].parent / "c"]).of_machines) == ["alpha", "beta"]
    runs = load_all([two[0], two[0].parent / "c"])
    assert [skipped.path for skipped in runs.skipped] == [bad.path]
    assert (runs.machines, summary(runs).height) == ({}, 2)
    assert replications(runs) == []


@pytest.mark.exhaustive
def test_the_report_tells_the_machines_and_their_replications(
    two: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "draw", lambda runs: [])
    published(config(two[1], strategy="fsdp", devices=2), on("beta", 3.0))
    out = two[0].parent / "both"
    assert cli.main(["report", *map(str, two), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    lines = [
        "Runs of 2 machines: alpha (6 runs) and beta (7 runs). Within this report each is compared with runs of its "
        f"own machine only; `parallelbench compare {two[0]} {two[1]}` compares machines.",
        "6 runs were measured on more than one of them: replications, of which each machine's counts by itself.",
    ]
    words = words_of((out / "index.html").read_text())
    for line in lines:
        assert line in printed
        assert as_words(line) in words
    assert "digits · cnn_small · machine alpha" in words
    table = pl.read_csv(out / "tables" / "runs.csv")
    assert sorted(table["group"].unique()) == [f"digits · cnn_small · machine {name}" for name in ("alpha", "beta")]
    assert cli.main(["compare", *map(str, two)]) in (0, 2)


def test_samples_of_telemetry_have_the_ids_of_the_merged_runs(tmp_path: Path) -> None:
    for name in ("alpha", "beta"):
        fake = on(name, 1.0)
        fake.gpu_power_w = lambda epoch, rank: 100.0
        published(config(tmp_path / name), fake)
    runs = load_all([tmp_path / "alpha", tmp_path / "beta"])
    assert sorted(runs.telemetry["run_id"].unique()) == sorted(runs.run["run_id"])


def test_what_is_no_set_of_folders_is_refused(two: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = map(str, two)
    empty = two[0].parent / "empty"
    empty.mkdir()
    for folders, why in (
        ([a, a], "are the same folder: name it once"),
        ([a, f"{a}/demo"], f"{a}/demo lies in {a}, whose runs include its own"),
        ([f"{a}/demo", a], f"{a}/demo lies in {a}, whose runs include its own"),
        ([a, f"{b}/none"], f"{b}/none is no folder"),
        ([a, str(empty)], f"{empty} holds no runs"),
    ):
        assert cli.main(["report", *folders, "--out", str(two[0].parent / "out")]) == 2
        assert why in capsys.readouterr().err
    assert cli.main(["report", a, b]) == 2
    assert "name its folder with --out DIR" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="lies in"):
        load_all([a, f"{a}/demo"])
