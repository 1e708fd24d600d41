"""The commands that a refusal names do what it says: compare the sides anyway, or measure both alike."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any

import pytest

from analysis import UnlikeWork, by, load, summary
from analysis.claims.effects import effects
from analysis.claims.verdict import pairing_of
from analysis.comparison.baseline import against_one_device, refusals
from analysis.comparison.issues import command_line
from analysis.comparison.pairing import paired
from analysis.comparison.ratio import ENOUGH_REPEATS
from analysis.comparison.run import compared_runs
from analysis.report import notes
from launch.sweep.expansion import expand
from parallelbench.cli import main
from parallelbench.config.identity import run_id
from tests.analysis.factory import config, foreign, published, steady
from tests.analysis.made_up import environment
from tests.analysis.test_claims import claim
from tests.analysis.test_one_verdict import SHORTER

if TYPE_CHECKING:
    from pathlib import Path

    from analysis.comparison.issues import Command, Remedies
    from analysis.runs.reader import Runs

pytestmark = pytest.mark.slow

GPIPE = {"name": "pipeline", "schedule": "gpipe", "micro_batches": 4}
TWO = ({"strategy": "ddp"}, {"strategy": "pipeline"}, {"strategy": GPIPE})
"""Strategies on two devices. Two are called pipeline, so the names of these configurations have commas."""
OLD = {"packages.torch": "2.11.0"}


def measured(root: Path, *, repeats: int = 2, **changes: Any) -> Runs:
    """single × 1, and several strategies on two devices under another torch."""
    for repeat in range(repeats):
        published(config(root, repeat=repeat, **changes), steady(10.0 + repeat))
        for time_s, ways in enumerate(TWO, start=4):
            run = config(root, repeat=repeat, devices=2, **changes, **ways)
            published(run, steady(time_s + repeat / 2, environment=environment(**OLD)))
    return load(root)


def compares(command: Command, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command prints; it names the folder, both sides and all that may differ."""
    capsys.readouterr()
    assert main(list(command)) == 0, command
    return capsys.readouterr().out


def asks_for(command: Command) -> set[str]:
    """The ids of the runs that a submission would measure."""
    verb, *overrides = command
    assert verb == "submit"
    return {run_id(planned.run) for planned in expand(overrides)}


def ids(runs: Runs, *configurations: dict[str, Any]) -> set[str]:
    """The runs of these configurations, of as many repeats as a verdict takes."""
    assert set(runs.run["repeat"]) < set(range(ENOUGH_REPEATS))
    every = range(ENOUGH_REPEATS)
    return {run_id(config(runs.root, repeat=repeat, **each)) for repeat in every for each in configurations}


@pytest.mark.exhaustive
def test_what_the_report_refuses_is_compared_and_measured_by_its_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, Any] = {
        "batch_size": 64,
        "model": {"name": "cnn_small"},
        "optimizer": {"name": "sgd", "lr": 0.2},
    }
    runs = measured(tmp_path, **changes)
    (refusal,) = refusals(runs)
    assert len(refusal.configurations) == 3
    for each in refusal.configurations:
        (time_s,) = summary(runs).filter(configuration=each)["steady_epoch_time_s"]
        assert f" {time_s:.3g} " in compares(remedies_for(runs, each).compare, capsys)
    asked = asks_for(refusal.issue.remedies.submit)
    first = next(ways for ways in TWO if asked & ids(runs, {"devices": 2} | changes | ways))
    assert asked == ids(runs, changes, {"devices": 2} | changes | first)
    told = notes.headline(runs)[0]
    assert f"`{command_line(refusal.issue.remedies.compare)}`" in told
    assert f"`{command_line(refusal.issue.remedies.submit)}`" in told


def remedies_for(runs: Runs, configuration: str) -> Remedies:
    """Those of one configuration against single × 1."""
    (pairing,) = [pairing for key, pairing in against_one_device(runs).items() if key[1] == configuration]
    (issue,) = pairing.blockers()
    assert pairing.remedies().submit
    return issue.remedies


@pytest.mark.exhaustive
def test_groups_that_differ_otherwise_are_compared_by_one_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for batch_size, entry in ((64, OLD), (128, {"variables.NCCL_ALGO": "Tree"})):
        for repeat in range(2):
            published(config(tmp_path, repeat=repeat, batch_size=batch_size), steady(10.0))
            run = config(tmp_path, repeat=repeat, batch_size=batch_size, strategy="ddp", devices=2)
            published(run, steady(6.0, environment=environment(**entry)))
    one, other = refusals(load(tmp_path))
    assert [len(each.issue.differences) for each in (one, other)] == [1, 1]
    assert set(one.issue.remedies.compare[-1].split(",")) == {"packages.torch", "variables.NCCL_ALGO"}
    for each in (one, other):
        assert "batch size 64" in compares(each.issue.remedies.compare, capsys)


@pytest.mark.exhaustive
def test_refusals_of_a_claim_and_of_a_comparison_name_commands_that_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = measured(tmp_path)
    (effect,) = effects(runs, SHORTER)
    (issue,) = pairing_of(runs, effect.runs).blockers()
    assert "single × 1 → ddp × 2" in compares(issue.remedies.compare, capsys)
    assert main(["plan", *issue.remedies.submit[1:]]) == 0
    with pytest.raises(UnlikeWork) as caught:
        by(runs, "configuration", "single × 1", "ddp × 2")
    assert "ddp × 2" in compares(caught.value.remedies.compare, capsys)
    for submit in (issue.remedies.submit, caught.value.remedies.submit):
        assert asks_for(submit) == ids(runs, {}, {"strategy": "ddp", "devices": 2})
    command = command_line(caught.value.remedies.compare)
    assert main(["compare", str(tmp_path), "--by", "configuration=single × 1,ddp × 2"]) == 2
    assert command in capsys.readouterr().err


@pytest.mark.exhaustive
def test_of_sides_with_several_strategies_a_command_names_one_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for repeat in range(3):
        for strategy, devices in (("single", 1), ("ddp", 2), ("ddp", 4), ("fsdp", 2)):
            published(config(tmp_path, repeat=repeat, strategy=strategy, devices=devices), steady(10.0 / devices))
    assert main(["compare", str(tmp_path), "--by", "strategy=single,ddp"]) == 2
    (command,) = re.findall("`parallelbench (.*)`", capsys.readouterr().err)
    assert "single × 1 → ddp × 2" in compares(tuple(shlex.split(command)), capsys)


@pytest.mark.exhaustive
def test_the_report_names_no_command_that_other_groups_would_have_refused(tmp_path: Path) -> None:
    for batch_size, ways in ((64, TWO[:0]), (128, TWO[:1]), (256, TWO[:1])):
        published(config(tmp_path, batch_size=batch_size), steady(10.0))
        for way in ways:
            run = config(tmp_path, batch_size=batch_size, devices=2, **way)
            published(run, steady(6.0, environment=environment(**OLD)))
    command = refusals(load(tmp_path))[0].issue.remedies.compare
    assert main(list(command)) == 0


@pytest.mark.exhaustive
def test_further_repeats_come_after_those_that_do_not_count(tmp_path: Path) -> None:
    for repeat in range(5):
        published(config(tmp_path, repeat=repeat), steady(10.0 + repeat))
        fake = steady(6.0 + repeat / 2, parity_passed=repeat < 2)
        published(config(tmp_path, repeat=repeat, strategy="ddp", devices=2), fake)
    warning = next(line for line in notes.warnings(load(tmp_path)) if "sweep.repeats" in line)
    assert "add 4 repeats per side, in turn (sweep.repeats=9)." in warning


@pytest.mark.exhaustive
def test_runs_that_differ_in_another_key_are_compared_by_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for repeat in range(2):
        for batch_size, entries in ((64, {}), (128, OLD)):
            run = config(tmp_path, repeat=repeat, batch_size=batch_size)
            published(run, steady(10.0, environment=environment(**entries)))
    runs = load(tmp_path)
    rising = claim(contrasts=[{"rising": "batch_size"}], metric="throughput_samples_per_s")
    (effect,) = effects(runs, rising)
    (issue,) = pairing_of(runs, effect.runs).blockers()
    assert issue.remedies.compare[-4:] == ("--by", "batch_size=64,128", "--across", "packages.torch")
    assert "single × 1" in compares(issue.remedies.compare, capsys)
    assert asks_for(issue.remedies.submit) == ids(runs, {"batch_size": 64}, {"batch_size": 128})


def test_what_is_not_of_the_suite_is_not_submitted_by_a_command(tmp_path: Path) -> None:
    published(config(tmp_path))
    published(foreign(config(tmp_path, devices=2), "mine"))
    known = list(compared_runs(load(tmp_path)).values())
    remedies = paired([run for run in known if run.definition["devices"] == 1], known[:0]).remedies()
    assert remedies == type(remedies)()
    one, other = sorted(known, key=lambda run: run.definition["devices"])
    remedies = paired([one], [other]).remedies()
    assert remedies.submit == ()
    assert remedies.compare[-1] == "configuration=single × 1,mine × 2"
