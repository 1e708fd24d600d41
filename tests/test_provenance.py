"""What is recorded of every attempt of a run, and what of it must not change from one to the next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from parallelbench.measure import environment
from parallelbench.results.attempt import Attempt
from parallelbench.results.journal import Journal, read_entries
from parallelbench.training.session import RankSession, captured_environment, first_facts, later_facts
from parallelbench.world.machine import cpu_name
from parallelbench.world.world import World
from tests.analysis.factory import Fake, begin, component, config
from tests.ranks import run_ranks


def captured(monkeypatch: pytest.MonkeyPatch, commit: str, *, dirty: bool = False, **entries: Any) -> None:
    found = {"host": "n1", "git": {"commit": commit, "dirty": dirty}} | entries
    monkeypatch.setattr(environment, "capture", lambda gpus: found)


def beginning(attempt: Attempt) -> dict[str, Any]:
    return first_facts(attempt, captured_environment(World())) | {"device_name": cpu_name()}


def begun(root: Path, number: int) -> Attempt:
    attempt = Attempt(root / str(number))
    attempt.path.mkdir()
    attempt.describe(processes=1, device_type="cpu", oversubscribed=False, submit=f"submit {number}")
    return attempt


def going_on(facts: dict[str, Any], attempt: Attempt) -> dict[str, Any]:
    return facts | later_facts(attempt, World(), captured_environment(World()), before=facts)


def test_a_run_that_goes_on_under_another_commit_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured(monkeypatch, "aaa")
    facts = beginning(begun(tmp_path, 1))
    captured(monkeypatch, "aaa", host="n2")
    facts = going_on(facts, begun(tmp_path, 2))
    assert "resumed_elsewhere" not in facts, "another host of the same kind is no difference"
    captured(monkeypatch, "bbb", dirty=True)
    facts = going_on(facts, begun(tmp_path, 3))
    assert facts["resumed_elsewhere"] == "git.commit: aaa and bbb, git.dirty: False and True"
    captured(monkeypatch, "aaa", variables={"ATEN_CPU_CAPABILITY": "default"}, entries_version=2)
    facts = going_on(facts, begun(tmp_path, 4))
    assert facts["resumed_elsewhere"].startswith("git.commit: aaa and bbb"), "what attempt 3 was stays"
    attempts = json.loads(facts["attempts_json"])
    assert [(one["attempt"], one["submit"], one["commit"], one["dirty"], one["host"]) for one in attempts] == [
        (1, "submit 1", "aaa", False, "n1"),
        (2, "submit 2", "aaa", False, "n2"),
        (3, "submit 3", "bbb", True, "n1"),
        (4, "submit 4", "aaa", False, "n1"),
    ]
    assert all(one["began_at"] > 0 for one in attempts)


def test_a_run_that_goes_on_with_other_sources_of_a_plugin_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured(monkeypatch, "aaa", plugin={"sources": "mine@1", "git": {"commit": "c", "dirty": False}})
    facts = beginning(begun(tmp_path, 1))
    captured(monkeypatch, "aaa", plugin={"sources": "mine@1", "git": {"commit": "d", "dirty": True}})
    facts = going_on(facts, begun(tmp_path, 2))
    assert "resumed_elsewhere" not in facts, "its files are the same, whatever its repository's commit"
    captured(monkeypatch, "aaa", plugin={"sources": "mine@2", "git": None})
    facts = going_on(facts, begun(tmp_path, 3))
    assert facts["resumed_elsewhere"] == "plugin.sources: mine@1 and mine@2"
    attempts = json.loads(facts["attempts_json"])
    assert [one["plugin"]["sources"] for one in attempts] == ["mine@1", "mine@1", "mine@2"]


# --- several nodes

EPYC, XEON = {"host": "n1", "cpu": "EPYC"}, {"host": "n2", "cpu": "XEON"}


@pytest.mark.slow
def test_each_nodes_environment_is_asked_for_and_how_they_differ_is_recorded(tmp_path: Path) -> None:
    first, *_, last = run_ranks(on_nodes, 4, tmp_path, [EPYC, XEON])
    assert first == EPYC | {"gpus": ["GPU-0", "GPU-1"], "unlike_nodes": "cpu: EPYC on node 0; XEON on node 1"}
    assert last == {}, "one rank of each node looks"
    first, _, second, _ = run_ranks(on_nodes, 4, tmp_path, [EPYC, EPYC | {"host": "n2"}])
    assert first == EPYC | {"gpus": ["GPU-0", "GPU-1"]}
    assert second["gpus"] == ["GPU-2", "GPU-3"]


def on_nodes(rank: int, size: int, nodes: list[dict[str, Any]]) -> dict[str, Any]:
    """What this rank has captured where two ranks are on each of these nodes."""
    here = nodes[rank // 2]
    world = World(rank=rank, size=size, local_rank=rank % 2)
    own = mock.patch.object(World, "gpus", lambda self: [("a GPU", f"GPU-{self.rank}")])
    with own, mock.patch.object(environment, "capture", lambda gpus: here | {"gpus": gpus}):
        return captured_environment(world)


def test_a_run_that_goes_on_on_unlike_nodes_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured(monkeypatch, "aaa")
    facts = beginning(begun(tmp_path, 1))
    captured(monkeypatch, "aaa", unlike_nodes="cpu: EPYC on node 0; XEON on node 1")
    facts = going_on(facts, begun(tmp_path, 2))
    assert facts["resumed_elsewhere"] == "unlike_nodes: None and cpu: EPYC on node 0; XEON on node 1"


@pytest.mark.parametrize("launcher", [{"name": "local"}, {"name": "slurm", "time_limit_min": 60}])
def test_a_run_on_unlike_nodes_warns_and_knows_what_its_job_began_with(
    launcher: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config(tmp_path, launcher=component("launcher", launcher))
    _, attempt = begin(run, Fake())
    asked: dict[str, Any] = {}

    def capture(**given: Any) -> dict[str, Any]:
        asked.update(given)
        return {"unlike_nodes": "cpu: EPYC on node 0; XEON on node 1"}

    monkeypatch.setattr(environment, "capture", capture)
    path = attempt.path / "journal-rank0.jsonl"
    session = RankSession(run, attempt, journal=Journal(path), startup=mock.Mock())
    session._join(World())
    session._record_environment()
    session.leave()
    (warned,) = [entry["texts"] for entry in read_entries(path) if entry["event"] == "warned"]
    assert "its nodes are unlike (cpu: EPYC on node 0; XEON on node 1)" in warned[-1]
    assert asked.get("site") == (run.site if launcher["name"] == "slurm" else None)
