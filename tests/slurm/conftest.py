"""One real Slurm cluster per variant, shared by all tests that only want one to be there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.slurm import scheduler
from tests.slurm.cluster import Cluster
from tests.slurm.config import Variant
from tests.slurm.packages import UnavailableError
from tests.slurm.sweeps import Sweeps
from tests.warm import cold


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark whatever is in this folder, so that only `make test-slurm` runs it; the longest tests come early."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("slurm")
            item.add_marker("slow")
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    items[:] = dealt(items, workers=workers)


def dealt(items: list[pytest.Item], *, workers: int) -> list[pytest.Item]:
    """The same tests, of which each worker has an equal share at first: each share begins with one of the longest.

    Else one worker would be left with them, and the others would have nothing to do.
    """
    early = [item for item in items if item.get_closest_marker("early")]
    ordered = [item for item in items if item not in early]
    share = len(items) // workers
    for number, item in enumerate(early):
        ordered.insert(min(number * share, len(ordered)), item)
    return ordered


@pytest.fixture(scope="session", autouse=True)
def genuine(forks: None) -> Iterator[None]:
    """Start programs by exec: a cluster finds its jobs' processes by the environment that they were started with."""
    with cold():
        yield


def started(variant: Variant, **options: Any) -> Iterator[Cluster]:
    """For a fixture: a cluster, or a skipped test that says why there is none."""
    cluster = Cluster(variant, **options)
    try:
        cluster.__enter__()
    except UnavailableError as error:
        pytest.skip(f"no Slurm cluster: {error}")
    try:
        yield cluster
    finally:
        cluster.down()


@pytest.fixture(scope="session")
def accounting() -> Iterator[Cluster]:
    yield from started("accounting")


@pytest.fixture
def ours(accounting: Cluster) -> Cluster:
    """The same, as if it had just begun."""
    accounting.restore()
    return accounting


@pytest.fixture(scope="session")
def no_accounting() -> Iterator[Cluster]:
    yield from started("no_accounting")


@pytest.fixture(scope="session")
def cgroup() -> Iterator[Cluster]:
    yield from started("cgroup")


@pytest.fixture
def sweeps(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Sweeps]:
    """Tiny runs on the shared cluster with accounting, or on the one that the test names by parametrization."""
    cluster: Cluster = request.getfixturevalue(getattr(request, "param", "accounting"))
    cluster.restore()
    monkeypatch.setattr(scheduler, "PAUSES_S", (0.1,) * len(scheduler.PAUSES_S))
    yield Sweeps(cluster, tmp_path / "results", capsys, monkeypatch)
    cluster.run("scancel", f"--user={os.geteuid()}", check=False)


@pytest.fixture
def special(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster with options of its own."""
    yield from started(**{"variant": "no_accounting", **request.param})
