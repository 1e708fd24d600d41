"""Clusters that demand a workload characterization key: the site has one, or the user's default is taken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.conftest import started
from tests.slurm.jobs import show
from tests.slurm.sweeps import Sweeps, closed


@pytest.fixture
def keyed() -> Iterator[Cluster]:
    """A cluster that takes no job with a key that is not the user's."""
    for cluster in started("accounting", wckeys=True):
        cluster.run("sacctmgr", "--immediate", "add", "user", "root", "account=root", "wckey=paper")
        yield cluster


def test_a_workloads_key_is_the_sites_and_none_of_submitits(
    keyed: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweeps = Sweeps(keyed, tmp_path / "results", capsys, monkeypatch)
    with closed(keyed):
        assert sweeps.submit()[0] == 0
        assert sweeps.submit("site.wckey=paper", "seed=1")[0] == 0
        keys = [show(keyed, job)["WCKey"] for _, job in sweeps.queue()]
        assert (len(keys), keys.count("paper")) == (2, 1), keys
        code, text = sweeps.submit("site.wckey=other", "seed=2")
        assert code == 2
        assert "check site.wckey" in " ".join(text.split())
        assert len(sweeps.queue()) == 2
