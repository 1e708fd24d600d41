"""Two versions: of what a configuration means, in run ids; of the tables, in results. A new column reruns nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from analysis import load
from analysis.runs import published
from launch.states import glance
from parallelbench.config import identity
from parallelbench.config.identity import run_id
from parallelbench.results import publish, tables
from tests.analysis import factory
from tests.faults import fault
from tests.helpers import TINY, configured

OF_A_RELEASE = {
    TINY: "7e66367e5ba839dd36f81dbf18df6c85b08aed4e471a7d4860a5fa317a7d7bed",
    (*TINY, "strategy=ddp", "devices=2"): "38fa8e77915de68c5ddc1149b04ef47d75f5faf50d4d9d599d991e209918e85c",
    (*TINY, "strategy=pipeline", "devices=2", "model=mlp", "loader=dataloader"): (
        "d33e923fedfdfe139c85745b560edc5960542d9489fea784b1da46b9e7732801"
    ),
    ("data=digits", "model=vit_tiny", "strategy=fsdp", "devices=4", "precision=bf16", "repeat=3"): (
        "2e171b94d12c6e6cc653d29dc28b657d35b5ee76eb7ab285a6cd11927092a828"
    ),
    ("strategy=parameter_server", "devices=3", "optimizer=adagrad"): (
        "5c400799bf8d49528948ef4120e788d38a735f9706726f4251143bc9180abdd5"
    ),
    (*TINY, "launcher=slurm"): "7e66367e5ba839dd36f81dbf18df6c85b08aed4e471a7d4860a5fa317a7d7bed",
    (*TINY, "launcher.oversubscribe=true", "optimizer=sgd", "optimizer.lr=0.1"): (
        "c1edec97e7587aa1ce44f6b92f98e3b7c0a454fd7b163f536db773e5bb7e7a6c"
    ),
    (*TINY, "launcher.pack=true"): "5d4ae9d216987fc1842cc29e6dfd70beadabd4db596e85bae2d5082ac2274030",
    (*TINY, "launcher=inline"): "b15066beb2b95d2256a967bd041070280889e7e63a383f34672da5cdc3d00153",
}
"""Overrides → the run id that the release before gave them, when both versions were one."""


@pytest.mark.parametrize("overrides", OF_A_RELEASE, ids=lambda overrides: " ".join(overrides[-2:]))
def test_run_ids_are_those_of_the_release_before(overrides: tuple[str, ...]) -> None:
    assert run_id(configured(*overrides)) == OF_A_RELEASE[overrides]


def test_another_meaning_of_configurations_is_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "CONFIGURATION_VERSION", identity.CONFIGURATION_VERSION + 1)
    assert run_id(configured(*TINY)) != OF_A_RELEASE[TINY]


@fault(
    "storage and input",
    "Results of another version of the tables",
    injection="the tables of the program that reads and plans have the next version",
    outcome="nothing runs again; the report names the result, its version and the remedy",
)
def test_a_new_version_of_the_tables_reruns_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = factory.config(tmp_path)
    before = factory.published(run)
    known, state, version = run_id(run), glance(before), tables.TABLES_VERSION
    for module in (tables, publish, published):
        monkeypatch.setattr(module, "TABLES_VERSION", version + 1)
    assert (run_id(run), glance(before)) == (known, state)
    after = factory.published(factory.config(tmp_path, repeat=1))
    assert json.loads((after.result / "manifest.json").read_bytes())["schema_version"] == version + 1
    metadata = pq.read_schema(after.result / "run.parquet").metadata
    assert metadata[b"schema_version"] == str(version + 1).encode()
    runs = load(tmp_path)
    assert runs.run["folder"].to_list() == [str(after.path)]
    (skipped,) = runs.skipped
    assert skipped.path == before.path
    assert f"of version {version} of the tables, and this program reads version {version + 1}" in skipped.reason
