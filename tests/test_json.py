"""`--json`: one object whose figures and verdicts are those that are printed without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.verbs.console import VERSION
from parallelbench import cli
from tests.analysis.factory import Fake, begin, config, failed, published
from tests.helpers import TINY
from tests.test_cli import here, listing, refused

__all__ = ["here"]


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """What --json says, and what is printed without it."""
    assert cli.main([*words, "--json"]) == code
    (line,) = capsys.readouterr().out.splitlines()
    assert cli.main(words) == code
    found = json.loads(line)
    assert found["version"] == VERSION
    return found, " ".join(capsys.readouterr().out.split())


def test_a_status_has_every_run_as_the_table_has_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published(config(here, epochs=1))
    failed(config(here, epochs=2), "oom", "out of [/memory]", epochs=1)
    begin(config(here, epochs=3), Fake())
    found, printed = told(capsys, "status", str(here))
    assert found["kind"] == "status"
    assert found["live"]
    for run in found["runs"]:
        assert Path(run["folder"]).name in printed
        assert run["state"] in printed
    assert {run["state"]: run["reason"] for run in found["runs"]}["oom"] == "out of [/memory]"
    assert "--watch goes on" in refused(capsys, "status", str(here), "--watch", "--json")


def test_a_plan_counts_what_is_to_start_and_how_long_it_takes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from launch.sweep import expand

    overrides = [*TINY, "epochs=1,2", "sweep.repeats=2", f"results={here}/r", "sweep.order=listed"]
    found, printed = told(capsys, "plan", *overrides)
    assert (found["accepted"], found["to_start"], found["estimated_time_s"]) == (True, 4, None)
    assert printed.endswith(
        "4 runs, 4 to start; none is done, so their time is not known yet: plan again after the first"
    )
    runs = [planned.run for planned in expand(overrides)]
    for run, took_s in ((runs[0], 10.0), (runs[1], 50.0)):
        folder = published(run)
        _take(folder.path, took_s)
    found, printed = told(capsys, "plan", *overrides)
    assert (found["to_start"], found["estimated_time_s"]) == (2, 60.0), "one more repeat of each configuration"
    assert "4 runs, 2 to start: about 1 min 0 s one after another, as long as the 2 done took" in printed
    assert [run["state"] for run in found["runs"]] == ["ok", "ok", "missing", "missing"]
    found, printed = told(capsys, "plan", *TINY, "strategy=single,ddp", "devices=2", "batch_size=33", code=2)
    assert {run["state"] for run in found["runs"]} == {"refused"}
    assert all(run["reason"] in printed for run in found["runs"])
    assert found["accepted"] is False


def _take(run: Path, seconds: float) -> None:
    """Let a published run have taken so long."""
    manifest = run / "result" / "manifest.json"
    plain = json.loads(manifest.read_text())
    info = json.loads((run / "attempts" / "1" / "attempt.json").read_text())
    plain["outcome"]["finished_at"] = info["launched_at"] + seconds
    manifest.write_text(json.dumps(plain))


@pytest.mark.exhaustive
def test_a_comparison_has_the_printed_verdict_and_gate(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for turn, (name, time_s) in enumerate((("a", 1.0), ("b", 1.2))):
        for repeat in range(4):
            place = 2 * repeat + (1 - turn if repeat % 2 else turn)  # a b b a a b b a
            took_s, at = time_s * (1 + repeat / 1000), 1.7e9 + 1e4 * place
            fake = Fake(epoch_time_s=lambda epoch, rank, took_s=took_s: took_s, started_at=at)
            published(config(here / name, repeat=repeat), fake)
    found, printed = told(capsys, "compare", "a", "b", "--fail-if-slower", "3%", code=1)
    (row,) = found["configurations"]
    assert row["verdict"] == "slower"
    assert row["verdict"] in printed
    assert row["ratio"] == pytest.approx(1.2)
    assert f"{row['ratio']:.3f} ({row['low']:.3f}–{row['high']:.3f})" in printed
    assert found["gate"]["exit_code"] == 1
    assert found["gate"]["message"] in printed
    assert told(capsys, "compare", "a", "b")[0]["gate"] is None


@pytest.mark.exhaustive
def test_claims_have_the_printed_verdicts(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for strategy, devices, time_s in (("single", 1, 1.0), ("ddp", 2, 0.6)):
        for repeat in range(4):
            fake = Fake(epoch_time_s=lambda epoch, rank, time_s=time_s: time_s)
            published(config(here, strategy=strategy, devices=devices, repeat=repeat), fake)
    assert cli.main(["claims", str(here), "--json"]) == 0
    names = [claim["claim"] for claim in json.loads(capsys.readouterr().out)["claims"][:3]]
    found, printed = told(capsys, "claims", str(here), *names)
    assert [claim["claim"] for claim in found["claims"]] == names
    assert all(f"{claim['claim']}: {claim['verdict']}" in printed for claim in found["claims"])


def test_doctor_says_the_same(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = listing(here)
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"processor", "memory", "packages"} <= {each["what"] for each in found["findings"]}
    assert all(each["finding"] for each in found["findings"])
    assert listing(here) == before
