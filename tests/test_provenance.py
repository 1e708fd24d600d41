"""What is recorded of every attempt of a run, and what of it must not change from one to the next."""

from __future__ import annotations

import json
from typing import Any

import pytest

from parallelbench.measure import environment
from parallelbench.training.session import first_facts, later_facts
from parallelbench.world.machine import cpu_name
from parallelbench.world.world import World


def captured(monkeypatch: pytest.MonkeyPatch, commit: str, *, dirty: bool = False, **entries: Any) -> None:
    found = {"host": "n1", "git": {"commit": commit, "dirty": dirty}} | entries
    monkeypatch.setattr(environment, "capture", lambda framework, plugin: found)


def going_on(facts: dict[str, Any], attempt: int) -> dict[str, Any]:
    return facts | later_facts(attempt, World(), before=facts)


def test_a_run_that_goes_on_under_another_commit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    captured(monkeypatch, "aaa")
    facts: dict[str, Any] = first_facts(1) | {"device_name": cpu_name()}
    captured(monkeypatch, "aaa", host="n2")
    facts = going_on(facts, 2)
    assert "resumed_elsewhere" not in facts, "another host of the same kind is no difference"
    captured(monkeypatch, "bbb", dirty=True)
    facts = going_on(facts, 3)
    assert facts["resumed_elsewhere"] == "git.commit: aaa and bbb, git.dirty: False and True"
    captured(monkeypatch, "aaa", variables={"ATEN_CPU_CAPABILITY": "default"}, entries_version=2)
    facts = going_on(facts, 4)
    assert facts["resumed_elsewhere"].startswith("git.commit: aaa and bbb"), "what attempt 3 was stays"
    attempts = json.loads(facts["attempts_json"])
    assert [(one["attempt"], one["commit"], one["dirty"], one["host"]) for one in attempts] == [
        (1, "aaa", False, "n1"),
        (2, "aaa", False, "n2"),
        (3, "bbb", True, "n1"),
        (4, "aaa", False, "n1"),
    ]
    assert all(one["began_at"] > 0 for one in attempts)


def test_a_run_that_goes_on_with_other_sources_of_a_plugin_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    captured(monkeypatch, "aaa", plugin={"sources": "mine@1", "git": {"commit": "c", "dirty": False}})
    facts: dict[str, Any] = first_facts(1, plugin="mine") | {"device_name": cpu_name()}
    captured(monkeypatch, "aaa", plugin={"sources": "mine@1", "git": {"commit": "d", "dirty": True}})
    facts = going_on(facts, 2)
    assert "resumed_elsewhere" not in facts, "its files are the same, whatever its repository's commit"
    captured(monkeypatch, "aaa", plugin={"sources": "mine@2", "git": None})
    facts = going_on(facts, 3)
    assert facts["resumed_elsewhere"] == "plugin.sources: mine@1 and mine@2"
    attempts = json.loads(facts["attempts_json"])
    assert [one["plugin"]["sources"] for one in attempts] == ["mine@1", "mine@1", "mine@2"]
