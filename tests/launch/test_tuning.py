"""tune=true: one choice for all that do the same work, kept, of what no override decides, at equal losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from launch import tuning
from launch.sweep import PlannedRun, expand
from launch.tuning import Choice, applied, open_keys, read, stages, tuned, work_of, worth
from parallelbench.cli import main
from parallelbench.config.build import from_mapping, to_mapping
from parallelbench.errors import ConfigError
from parallelbench.results.folder import find_runs
from parallelbench.training.tuning import (
    FIRST_LOSS_TOLERANCE,
    GAIN,
    LOSS_TOLERANCE,
    Findings,
    Patch,
    Trial,
    patched,
    search,
)
from parallelbench.world import machine
from tests.helpers import TINY

FAST = {"precision": "bf16", "optimizer.implementation": "fused"}


def plan(*overrides: str) -> list[PlannedRun]:
    return expand([*TINY, "tune=true", *overrides])


def chosen(patch: Patch, device_type: str = "cpu") -> Choice:
    trials = [Trial(patch={}, step_time_s=2.0, loss=1.0), Trial(patch=patch, step_time_s=1.0, loss=1.0)]
    findings = Findings(trials=trials, chosen=patch)
    return Choice(work="it", device_type=device_type, findings=findings, took_s=1.0, machine="m", chosen_at=0.0)


class Trials:
    """Pretends to try, and counts."""

    def __init__(self, patch: Patch) -> None:
        self.patch, self.asked = patch, 0

    def __call__(self, _: Sequence[PlannedRun]) -> Choice:
        self.asked += 1
        return chosen(self.patch)


# --- what is shared


@pytest.mark.exhaustive
@pytest.mark.slow
def test_all_runs_of_a_model_share_a_choice_and_other_models_have_their_own(tmp_path: Path) -> None:
    trials = Trials(FAST)
    sweep = ["strategy=ddp,model_parallel", "devices=1,2", "sweep.repeats=2", "batch_size=8,16", f"results={tmp_path}"]
    runs = tuned(plan("model=mlp", *sweep), trials, lambda _: None)
    assert trials.asked == 1
    assert len(runs) == 3 * 2 * 2
    assert {(each.run.precision, each.run.optimizer.implementation) for each in runs} == {("bf16", "fused")}  # type: ignore[attr-defined]
    works = [
        ("model=mlp",),
        ("model=logistic_regression",),
        ("model=mlp", "optimizer=sgd"),
        ("model=mlp", "device=cuda"),
    ]
    on_slurm = ("model=mlp", "device=auto", "launcher=slurm", "site=asu_sol")
    assert len({work_of(plan(*work)[0]) for work in works}) == 4
    assert work_of(plan(*on_slurm)[0]) != work_of(plan("model=mlp")[0]), "other devices"
    assert work_of(plan(*on_slurm)[0]) == work_of(
        plan("model=mlp", "launcher=slurm", "site=local_cluster", "device=cuda")[0]
    )


def test_a_choice_that_a_later_strategy_can_not_do_is_refused_with_the_fix(tmp_path: Path) -> None:
    run = plan("strategy=fsdp", "devices=2", f"results={tmp_path}")[0]
    with pytest.raises(ConfigError, match=r"chosen without this run, which can't use it .*fp16.*parallelbench tune"):
        applied(run, chosen({"precision": "fp16"}, "cuda"))


def test_with_and_without_are_two_runs(tmp_path: Path) -> None:
    runs = tuned(expand([*TINY, "tune=true,false", f"results={tmp_path}"]), Trials(FAST), lambda _: None)
    assert sorted(each.run.precision for each in runs) == ["bf16", "fp32"]


def test_a_choice_is_kept(tmp_path: Path) -> None:
    trials, said = Trials(FAST), list[str]()
    first = tuned(plan(f"results={tmp_path}"), trials, said.append)
    again = tuned(plan(f"results={tmp_path}"), trials, said.append)
    assert trials.asked == 1
    assert [each.run for each in first] == [each.run for each in again]
    assert said == [
        "tuned for it on cpu: precision=bf16 optimizer.implementation=fused, 2.00 times as fast as without "
        "(2 trials in 1 s)"
    ]
    tuned(plan(f"results={tmp_path}"), Trials({}), said.append, again=True)
    assert read(tmp_path / "adhoc")[work_of(plan(f"results={tmp_path}")[0])].findings.chosen == {}


def test_without_tune_nothing_is_tried_and_nothing_differs(tmp_path: Path) -> None:
    runs = expand([*TINY, f"results={tmp_path}"])
    assert tuned(runs, None, lambda _: None) == runs
    assert [each.run for each in runs] == [each.run for each in plan(f"results={tmp_path}")]
    assert not list(tmp_path.iterdir())


def test_the_overrides_of_a_tuned_run_make_it_again(tmp_path: Path) -> None:
    (planned,) = plan(f"results={tmp_path}")
    patch = FAST | {"channels_last": True, "loader": stages([planned.run], "cpu", ["loader"])[0][0]["loader"]}
    run = applied(planned, chosen(patch))
    assert [each.run for each in expand(run.overrides)] == [run.run]


# --- what is open


@pytest.mark.parametrize(
    ("overrides", "left"),
    [
        ([], ["precision", "channels_last", "optimizer.implementation", "loader"]),
        (["precision=bf16"], ["channels_last", "optimizer.implementation", "loader"]),
        (["loader=dataloader", "optimizer.implementation=foreach"], ["precision", "channels_last"]),
        (["precision=bf16,fp32", "channels_last=true"], ["optimizer.implementation", "loader"]),
    ],
)
def test_what_an_override_decides_is_not_tried(overrides: list[str], left: list[str]) -> None:
    for planned in plan(*overrides):
        assert open_keys(planned) == left
        keys = {key for stage in stages([planned.run], "cpu", left) for patch in stage for key in patch}
        assert keys == set(left)


def test_every_patch_is_a_run_and_none_is_the_run_as_it_is() -> None:
    (planned,) = plan()
    for device_type in ("cpu", "cuda"):
        for stage in stages([planned.run], device_type, open_keys(planned)):
            for patch in stage:
                run = from_mapping(patched(to_mapping(planned.run), patch))
                assert run != planned.run


def test_only_what_all_strategies_can_do_is_tried() -> None:
    alone, sharded = plan("strategy=single"), plan("strategy=fsdp", "devices=2")

    def tried(*runs: PlannedRun) -> list[Any]:
        (stage,) = stages([each.run for each in runs], "cuda", ["precision"])
        return [patch["precision"] for patch in stage]

    assert tried(*alone) == ["tf32", "bf16", "fp16"]
    assert tried(*sharded) == tried(*alone, *sharded) == ["tf32", "bf16"]


# --- what is chosen


def tries(times: dict[str, float], losses: dict[str, tuple[float, float]] | None = None) -> Callable[[Patch], Trial]:
    """Trials whose time per step and losses (the first, their mean) follow from the value of `a`."""

    def trial(patch: Patch) -> Trial:
        name = patch.get("a", "")
        first, mean = (losses or {}).get(name, (1.0, 1.0))
        return Trial(patch=patch, step_time_s=times[name], first_loss=first, loss=mean)

    return trial


def test_the_fastest_wins_unless_the_gain_is_noise() -> None:
    stage = [{"a": "x"}, {"a": "y"}]
    assert search([stage], tries({"": 1.0, "x": 0.9, "y": 0.8})).chosen == {"a": "y"}
    assert search([stage], tries({"": 1.0, "x": 1 - GAIN / 2, "y": 1.1})).chosen == {}
    assert search([stage], tries({"": 1.0, "x": 0.8, "y": 0.8 * (1 - GAIN / 2)})).chosen == {"a": "x"}


@pytest.mark.parametrize(
    ("first", "mean", "words"),
    [
        (1 + 1.1 * FIRST_LOSS_TOLERANCE, 1.0, "computes a different result"),
        (1 - 1.1 * FIRST_LOSS_TOLERANCE, 1.0, "computes a different result"),
        (1.0, 1 + 1.1 * LOSS_TOLERANCE, "trains worse"),
        (1.0, float("nan"), "the loss becomes nan"),
        (1.0, float("inf"), "the loss becomes inf"),
    ],
)
def test_what_trains_worse_is_not_chosen_however_fast(first: float, mean: float, words: str) -> None:
    found = search([[{"a": "x"}]], tries({"": 1.0, "x": 0.1}, {"x": (first, mean)}))
    assert found.chosen == {}
    assert words in found.trials[1].refused


def test_what_trains_as_well_or_better_may_be_chosen() -> None:
    for mean in (1 + 0.9 * LOSS_TOLERANCE, 0.1):
        assert search([[{"a": "x"}]], tries({"": 1.0, "x": 0.1}, {"x": (1.01, mean)})).chosen == {"a": "x"}


def test_later_stages_start_from_what_won() -> None:
    times = {(): 1.0, ("a",): 0.8, ("b",): 0.1, ("a", "b"): 0.5}

    def trial(patch: Patch) -> Trial:
        return Trial(patch=patch, step_time_s=times[tuple(sorted(patch))], first_loss=1.0, loss=1.0)

    found = search([[{"a": 1}], [{"b": 1}]], trial)
    assert [each.patch for each in found.trials] == [{}, {"a": 1}, {"a": 1, "b": 1}]
    assert found.chosen == {"a": 1, "b": 1}


def test_settings_that_fail_are_passed_over_even_those_that_were_asked_for() -> None:
    def trial(patch: Patch) -> Trial:
        found = Trial(patch=patch, step_time_s=1.0, first_loss=1.0, loss=float("nan") if patch == {"a": 2} else 1.0)
        return found if patch else Trial(patch=patch, refused="out of memory")

    assert search([[{"a": 1}]], trial).chosen == {"a": 1}
    assert search([[{"a": 2}]], trial).chosen == {}
    assert search([[{"a": 2}, {"a": 1}]], trial).chosen == {"a": 1}


def test_trials_end_when_their_time_is_up() -> None:
    def trial(patch: Patch) -> Trial:
        return Trial(patch=patch, step_time_s=1.0, first_loss=1.0, loss=1.0, took_s=10.0)

    stage = [{"a": number} for number in range(5)]
    for steps_worth, tried in ((0.0, 0), (9.0, 0), (10.0, 1), (19.0, 1), (20.0, 2), (1000.0, 5)):
        found = search([stage], trial, steps_worth=steps_worth)
        assert (len(found.trials) - 1, found.left) == (tried, 5 - tried)


def test_what_a_trial_may_cost_is_a_share_of_runs_that_several_devices_share() -> None:
    alone, shared, longer = (
        plan("strategy=single", "epochs=2")[0].run,
        plan("strategy=ddp", "devices=2", "epochs=2")[0].run,
        plan("strategy=single", "epochs=50")[0].run,
    )
    steps = alone.steps_per_epoch
    assert worth([alone], alone) == 10 * steps
    assert worth([shared], alone) == 10 * steps / 2
    assert worth([shared, longer], alone) == 2 * steps / 2 + 50 * steps


# --- for users


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (None, r"tuned.json can't be read .*: delete it to choose anew"),
        ({"loader": {}}, "names no loader where it sets one: delete it"),
        ({"site.setup": ["rm -r ~"]}, "sets site.setup, which no trial chooses: delete it"),
    ],
)
def test_a_file_that_no_trial_wrote_is_refused(patch: Patch | None, message: str, tmp_path: Path) -> None:
    (planned,) = plan(f"results={tmp_path}")
    (tmp_path / "adhoc").mkdir()
    (tmp_path / "adhoc" / tuning.FILE).write_text("{")
    if patch is not None:
        tuning.write(tmp_path / "adhoc", {work_of(planned): chosen(patch)})
    with pytest.raises(ConfigError, match=message):
        tuned([planned], None, lambda _: None)


def test_the_largest_batch_is_tried(tmp_path: Path) -> None:
    planned = expand(["data=synthetic", "data.train_samples=60000", "batch_size=32,1024,128", f"results={tmp_path}"])
    assert tuning.largest([each.run for each in planned]).batch_size == 1024
    weak = ["scaling=weak", "batch_size=64", "strategy=ddp", "devices=4", "launcher.oversubscribe=true"]
    (planned_weak,) = expand(["data=synthetic", "data.train_samples=60000", *weak, f"results={tmp_path}"])
    (small,) = [each.run for each in planned if each.run.batch_size == 128]
    assert tuning.largest([planned_weak.run, small]).batch_size == 128  # on one device the other takes 64, not 256


def test_nothing_is_tried_on_a_login_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_slurm = [*TINY, "launcher=slurm", "site=local_cluster", "tune=true", f"results={tmp_path}"]
    assert main(["submit", *on_slurm]) == 2
    assert "Run `parallelbench tune` with the same overrides in a job" in capsys.readouterr().err
    (planned,) = expand(on_slurm)
    tuned(expand([*on_slurm, "device=cuda"]), Trials(FAST), lambda _: None)
    with pytest.raises(ConfigError, match="nothing has been tried"):
        tuning.known([planned])
    tuned([planned], Trials(FAST), lambda _: None)
    (known,) = tuning.known([planned])
    assert known.run.precision == "bf16"


def test_what_trains_on_gpus_is_not_tried_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "check_data", lambda _: None)
    on_slurm = plan("device=auto", "launcher=slurm", "site=asu_sol", f"results={tmp_path}")
    if machine.this_machine().device_type("auto") == "cpu":
        with pytest.raises(ConfigError, match=r"train on cuda, which this machine does not have.*srun --gpus=1"):
            tuning.try_out_here(on_slurm)


def test_a_data_set_that_is_not_there_is_named(tmp_path: Path) -> None:
    runs = expand(["data=cifar10", "tune=true", f"site.data_dir={tmp_path}", f"results={tmp_path}"])
    with pytest.raises(ConfigError, match=f"run `parallelbench prepare data=cifar10 site.data_dir={tmp_path}`"):
        tuning.try_out_here(runs)


def test_a_trial_that_can_not_work_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "before_the_program", lambda: None)
    monkeypatch.setattr(tuning.sys, "executable", "/bin/false")  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"the trial of logistic_regression .* failed: exit code 1"):
        tuning.try_out_here(plan(f"results={tmp_path}"))


@pytest.mark.slow
def test_a_sweep_is_tuned_once_and_trains_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = ("strategy=ddp", "devices=1,2", "launcher.oversubscribe=true")
    overrides = [*TINY, *two, "tune=true", f"results={tmp_path}"]
    assert main(["submit", *overrides]) == 0
    assert capsys.readouterr().out.count("tuned for logistic_regression (tried with synthetic") == 1
    (choice,) = read(tmp_path / "adhoc").values()
    assert choice.findings.trials[0].patch == {}
    runs = find_runs(tmp_path)
    assert [run.state().label for run in runs] == ["ok"] * 2
    for run in runs:
        plain = to_mapping(run.config())
        assert patched(plain, choice.findings.chosen) == plain
    assert main(["submit", *overrides]) == 0
    assert "tuned for" not in capsys.readouterr().out
    assert find_runs(tmp_path) == runs, "nothing new"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_verb_tries_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *TINY, f"results={tmp_path}", "precision=fp32"]) == 0
    assert "uses these settings for 1 run" in capsys.readouterr().out.replace("\n", " ")
    assert find_runs(tmp_path) == []
    (choice,) = read(tmp_path / "adhoc").values()
    assert not any("precision" in trial.patch for trial in choice.findings.trials)
