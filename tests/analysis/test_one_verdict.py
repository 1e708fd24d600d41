"""The report, compare, claims and notebooks give one verdict on the same runs: refused alike, or the same ratio."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

from analysis import UnlikeWork, by, load, notebook, summary
from analysis.claims import Publication, judge, judge_all
from analysis.comparison.baseline import against_one_device
from analysis.comparison.baseline import refused as refused_beside_one_device
from analysis.comparison.configurations import gains, learned
from analysis.comparison.exclusions import excluded
from analysis.comparison.issues import Blocker, Caveat
from analysis.comparison.pairing import paired
from analysis.comparison.ratio import SpeedVerdict
from analysis.comparison.run import compared_runs
from analysis.figures import draw
from analysis.report import notes
from analysis.runs.published import LOADED
from parallelbench.cli import main
from parallelbench.errors import ConfigError
from parallelbench.measure.environment_match import MUST_MATCH, PACKED, REPORTED, SET_BY_LAUNCHER
from tests.analysis.factory import Fake, config, failed, published
from tests.analysis.test_claims import claim
from tests.analysis.test_compare import steady
from tests.analysis.test_notebooks import FOLDER

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from analysis.runs.reader import Runs

pytestmark = pytest.mark.slow

VARIABLES = [f"variables.{name}" for name in ("NCCL_ALGO", "GLOO_TUNED_TO", "OMP_PROC_BIND", "MKL_DYNAMIC")]
VARIABLES += [f"variables.{name}" for name in ("MALLOC_ARENA_MAX", "TORCH_LOGS", "PYTORCH_CUDA_ALLOC_CONF")]
TIMES = ((10.0, 7.0), (11.0, 7.5), (10.5, 7.4), (10.2, 7.1), (10.7, 7.3), (10.1, 7.2))
"""Of each repeat: single × 1, ddp × 2."""
ONE, TWO = {"strategy": "single", "devices": 1}, {"strategy": "ddp", "devices": 2}
FASTER = claim(contrasts=[{"from": TWO, "to": ONE}])
"""Its effect is the time of one device ÷ that of two: the speed-up."""
SHORTER = claim(contrasts=[{"from": ONE, "to": TWO}])


def environment(**entries: Any) -> str:
    """The usual environment, with these dotted entries; None: without the entry."""
    whole: dict[str, Any] = json.loads(Fake.environment)
    for key, value in entries.items():
        *parents, last = key.split(".")
        node = whole
        for parent in parents:
            node = node.setdefault(parent, {})
        if value is None:
            node.pop(last, None)
        else:
            node[last] = value
    return json.dumps(whole)


def measured(root: Path, one: dict[str, Any], other: dict[str, Any], *, repeats: Sequence[int] = range(6)) -> Runs:
    """single × 1 in the one environment, ddp × 2 in the other one in these repeats."""
    for repeat, (time_s, time_2_s) in enumerate(TIMES):
        entries = other if repeat in repeats else one
        published(config(root, repeat=repeat), steady(time_s, environment=environment(**one)))
        run = config(root, repeat=repeat, strategy="ddp", devices=2)
        published(run, steady(time_2_s, environment=environment(**entries)))
    return load(root)


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """What `measured` makes where the environments are the same; tests alter copies of its tables."""
    return measured(tmp_path_factory.mktemp("alike"), {}, {})


def in_environments(runs: Runs, one: dict[str, Any], other: dict[str, Any]) -> Runs:
    """The same runs, but ddp × 2 in the other environment: what `measured` with these would read from its folders."""
    texts = {"single": environment(**one), "ddp": environment(**other)}
    run = runs.run.with_columns(environment_json=pl.col("strategy").replace_strict(texts))
    return replace(runs, tables={**{name: runs.tables[name] for name in LOADED}, "run": run})


@pytest.mark.exhaustive
def test_what_is_altered_in_memory_is_what_folders_would_hold(alike: Runs, tmp_path: Path) -> None:
    one, other = {"packages.torch": "one"}, {"packages.torch": None}
    written, altered = measured(tmp_path, one, other), in_environments(alike, one, other)
    assert written.run["environment_json"].to_list() == altered.run["environment_json"].to_list()
    for name in LOADED:
        assert written.tables[name].equals(altered.tables[name]) or name == "run", name


def answers(runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What every room says about ddp × 2 against single × 1, in words."""
    with pytest.raises(UnlikeWork) as refusal:
        by(runs, "strategy", "single", "ddp", across=["devices"])
    (case,) = judge(runs, SHORTER, seed="0").cases
    assert case.verdict == "inconclusive"
    monkeypatch.setattr(notebook, "_WIDTH", 1000)
    notebook.claims(runs, "002")
    (scaling,) = draw(runs, ["scaling"])
    assert scaling.chart is None
    return {
        "headline": "\n".join(notes.headline(runs)),
        "warnings": "\n".join(notes.warnings(runs)),
        "compare": str(refusal.value),
        "claims": case.lacks,
        "notebook": capsys.readouterr().out,
        "figure": scaling.finding,
    }


def refused(runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """Every room refuses, with these words."""
    row = summary(runs).row(1, named=True)
    assert (row["configuration"], row["verdict"]) == ("ddp × 2", SpeedVerdict.NOT_COMPARABLE.value)
    for name in ("speed_up", "speed_up_low", "efficiency", "efficiency_with_startup", "energy_ratio"):
        assert row[name] is None, name
    assert row["speed_up_pairs"] == 0
    assert set(gains(runs)["configuration"]) == {"single × 1"}
    for room, answer in answers(runs, capsys, monkeypatch).items():
        assert words in answer, room
        assert "measure both in one environment" in answer, room
        assert "--across" in answer, room


@pytest.mark.parametrize(("number", "key"), list(enumerate(sorted({*MUST_MATCH, *VARIABLES} - {PACKED}))))  # a column
@pytest.mark.cases("*-packages.torch", "*-threads", "*-variables.GLOO_TUNED_TO")
def test_what_must_match_is_refused_everywhere(
    number: int, key: str, alike: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unlike or missing: of each key, every room tells the one, and a table the other."""
    unlike, missing = ((in_environments(alike, {key: "one"}, {key: other}), other) for other in ("another", None))
    (told, other), (runs, _) = (unlike, missing) if number % 2 else (missing, unlike)
    refused(told, capsys, monkeypatch, f"the sides differ in {key}: one and {other or 'null'}")
    assert summary(runs).row(1, named=True)["verdict"] == SpeedVerdict.NOT_COMPARABLE.value


@pytest.mark.exhaustive
def test_where_the_repeat_that_counts_is_in_another_environment_nothing_is_compared(tmp_path: Path) -> None:
    """A side's first repeat counts, and those that are like it."""
    runs = measured(tmp_path, {}, {"packages.torch": "2.11.0"}, repeats=[0])
    assert summary(runs).row(1, named=True)["verdict"] == SpeedVerdict.NOT_COMPARABLE.value
    (line,) = refused_beside_one_device(runs)
    assert "the sides differ in packages.torch: 2.15.0 and 2.11.0" in line


@pytest.mark.exhaustive
def test_a_later_repeat_in_another_environment_does_not_count(tmp_path: Path) -> None:
    row = summary(measured(tmp_path, {}, {"packages.torch": "2.11.0"}, repeats=[3])).row(1, named=True)
    assert (row["verdict"], row["speed_up_pairs"]) == (SpeedVerdict.FASTER.value, row["runs"] - 1)
    assert row["exclusions"] == "1 other environment"


ASYNC_ERRORS = "variables.TORCH_NCCL_ASYNC_ERROR_HANDLING"


@pytest.mark.parametrize("key", ["", *REPORTED, ASYNC_ERRORS, "load_average_1min", "variables.SLURM_JOB_ID"])
def test_what_may_differ_is_compared_everywhere_with_the_same_ratio(key: str, alike: Runs) -> None:
    runs = in_environments(alike, {key: "one"}, {key: "another"}) if key else alike
    row = summary(runs).row(1, named=True)
    ratio = (row["speed_up"], row["speed_up_low"], row["speed_up_high"])
    assert row["verdict"] == SpeedVerdict.FASTER.value
    assert sorted(gains(runs).filter(configuration="ddp × 2", kind="steady")["value"])[2:4] == pytest.approx(
        sorted(one / two for one, two in TIMES)[2:4], rel=1e-15
    )
    (compared,) = by(runs, "strategy", "ddp", "single", across=["devices"]).rows
    assert compared.time is not None
    assert (compared.time.median, compared.time.low, compared.time.high) == ratio
    (case,) = judge(runs, FASTER, seed="0").cases
    assert (case.median, case.low, case.high) == ratio
    assert f"{ratio[0]:.2f} times as fast" in notes.headline(runs)[0]
    notes_of_both = [*notes.warnings(runs), *by(runs, "strategy", "ddp", "single", across=["devices"]).notes]
    assert sum(f"differ in {key}" in note for note in notes_of_both) == (2 if key in REPORTED else 0) or not key


@pytest.mark.cases("cudnn_benchmark")
@pytest.mark.parametrize("key", SET_BY_LAUNCHER)
def test_what_the_launcher_sets_must_match_between_runs_on_equal_devices(key: str, tmp_path: Path) -> None:
    for repeat, time_s in enumerate((10.0, 11.0)):
        for batch, value in ((64, "one"), (128, "another")):
            run = config(tmp_path, repeat=repeat, batch_size=batch)
            published(run, steady(time_s, environment=environment(**{key: value})))
    with pytest.raises(UnlikeWork, match=f"the sides differ in {key}: one and another"):
        by(load(tmp_path), "batch_size", 64, 128)
    assert by(load(tmp_path), "batch_size", 64, 128, across=[key]).rows[0].time is not None
    (finding,) = [figure.finding for figure in draw(load(tmp_path), ["throughput_batch"])]
    assert f"is not compared: the sides differ in {key}: one and another" in finding


def test_across_compares_what_is_refused_otherwise(alike: Runs) -> None:
    runs = in_environments(alike, {}, {"packages.torch": "2.11.0"})
    (row,) = by(runs, "strategy", "single", "ddp", across=["devices", "packages.torch"]).rows
    assert row.verdict is SpeedVerdict.FASTER


THREADS = ("threads", "variables.OMP_NUM_THREADS")


def on(device_type: str, root: Path, key: str, nodes: int = 1) -> Runs:
    """single × 1 with "8" in this entry of the environment, ddp × 2 with "4"."""
    for repeat, times in enumerate(TIMES):
        for number, (ways, time_s) in enumerate(zip((ONE, TWO), times, strict=True)):
            run = config(root, repeat=repeat, **(ways | ({"nodes": nodes} if number else {})))
            entries = environment(**{key: ("8", "4")[number]})
            published(run, steady(time_s, environment=entries, device_type=device_type))
    return load(root)


@pytest.mark.cases("variables.OMP_NUM_THREADS")
@pytest.mark.parametrize("key", THREADS)
def test_on_gpus_the_launcher_shares_the_cores_out_among_devices(key: str, tmp_path: Path) -> None:
    runs = on("cuda", tmp_path, key)
    assert summary(runs).row(1, named=True)["verdict"] == SpeedVerdict.FASTER.value
    assert any(f"{key}: " in note for note in by(runs, "strategy", "single", "ddp", across=["devices"]).notes)
    assert any(key in warning for warning in notes.warnings(runs)), "a difference that the launcher explains is told"


@pytest.mark.cases("variables.OMP_NUM_THREADS")
@pytest.mark.parametrize("key", THREADS)
def test_on_cpus_a_device_has_its_threads_however_many_devices_there_are(key: str, tmp_path: Path) -> None:
    assert summary(on("cpu", tmp_path, key)).row(1, named=True)["verdict"] == SpeedVerdict.NOT_COMPARABLE.value


@pytest.mark.cases("1-not comparable")
@pytest.mark.parametrize(("nodes", "verdict"), [(1, SpeedVerdict.NOT_COMPARABLE), (2, SpeedVerdict.FASTER)])
def test_the_interface_is_another_only_between_nodes(nodes: int, verdict: SpeedVerdict, tmp_path: Path) -> None:
    runs = on("cpu", tmp_path, "variables.GLOO_SOCKET_IFNAME", nodes)
    assert summary(runs).row(1, named=True)["verdict"] == verdict.value


@pytest.mark.exhaustive
def test_threads_of_two_strategies_on_equal_devices_must_match(tmp_path: Path) -> None:
    for repeat in range(6):
        for strategy, threads in (("ddp", 1), ("fsdp", 8)):
            run = config(tmp_path, repeat=repeat, strategy=strategy, devices=2)
            published(run, steady(10.0 - threads, environment=environment(threads=threads), device_type="cuda"))
    with pytest.raises(UnlikeWork, match="the sides differ in threads: 1 and 8"):
        by(load(tmp_path), "strategy", "ddp", "fsdp")


@pytest.mark.parametrize("name", ["runtime", "memory", "time_to_accuracy"])
def test_no_figure_ranks_what_is_not_compared(name: str, alike: Runs) -> None:
    runs = in_environments(alike, {}, {"packages.torch": "2.11.0"})
    (figure,) = draw(runs, [name])
    assert "this does not rank them, since the sides differ in packages.torch: 2.15.0 and 2.11.0" in figure.finding
    (ranking,) = draw(alike, [name])
    assert "does not rank" not in ranking.finding


@pytest.mark.exhaustive
def test_an_effect_of_an_effect_holds_all_four_runs_against_each_other(tmp_path: Path) -> None:
    """The second effect's epochs hold 1,088 and 1,024 samples: the larger batch drops the rest."""
    for repeat in range(6):
        for samples in (1024, 1088):
            for batch, time_s in ((64, 10.0), (128, 6.0 if samples == 1024 else 3.0)):
                data = {"name": "synthetic", "train_samples": samples}
                published(config(tmp_path, repeat=repeat, batch_size=batch, data=data), steady(time_s + repeat / 100))
    asked = claim(contrasts=[{"rising": "batch_size"}], more={"rising": "train_samples"})
    (case,) = judge(load(tmp_path), asked, seed="0").cases
    assert (case.verdict, case.lacks) == (
        "inconclusive",
        "epochs hold 1,024 and 1,088 samples: compare samples per second",
    )


@pytest.mark.exhaustive
def test_the_best_of_several_is_chosen_among_runs_of_one_environment(tmp_path: Path) -> None:
    needed = {(64, 0.1): 10.0, (64, 0.2): 11.0, (128, 0.1): 5.0, (128, 0.2): 6.0}
    for repeat in range(6):
        for (batch, rate), time_s in needed.items():
            run = config(tmp_path, repeat=repeat, batch_size=batch, optimizer={"name": "sgd", "lr": rate})
            torch = {"packages.torch": "2.11.0" if rate == 0.2 else "2.15.0"}
            published(run, steady(time_s + repeat / 100, environment=environment(**torch)))
    (case,) = judge(load(tmp_path), claim(contrasts=[{"rising": "batch_size"}], best_of="optimizer.lr"), seed="0").cases
    assert case.verdict == "inconclusive"
    assert "packages.torch: 2.15.0 and 2.11.0" in case.lacks or "packages.torch: 2.11.0 and 2.15.0" in case.lacks


def test_accuracies_that_do_not_count_are_left_out_of_the_finding(tmp_path: Path) -> None:
    for repeat in range(2):
        for strategy, devices, accuracy in (("single", 1, 0.9), ("ddp", 2, 0.88)):
            run = config(tmp_path, repeat=repeat, strategy=strategy, devices=devices)
            published(run, Fake(test_accuracy=lambda _, at=accuracy: at))
    again = config(tmp_path, strategy="ddp", devices=2, measure={"parity": False})
    published(again, Fake(test_accuracy=lambda _: 0.88, parity_passed=None))
    runs = load(tmp_path)
    (twice,) = excluded(runs)["run_id"]
    assert twice not in set(learned(runs)["run_id"])
    (figure,) = draw(runs, ["accuracy"])
    assert "configurations differ by at most 2 percentage points" in figure.finding


@pytest.mark.exhaustive
def test_repeats_without_a_partner_must_have_the_same_environment(tmp_path: Path) -> None:
    """Else their times are not in the medians beside the speed-up."""
    before = summary(measured(tmp_path, {}, {})).row(1, named=True)
    for repeat in range(6, 10):
        run = config(tmp_path, repeat=repeat, strategy="ddp", devices=2)
        published(run, steady(5.0, environment=environment(**{"packages.torch": "2.11.0"})))
    row = summary(load(tmp_path)).row(1, named=True)
    assert row["exclusions"] == "4 other environment"
    alike = ("repeats", "verdict", "speed_up", "steady_epoch_time_s")
    assert [row[name] for name in alike] == [before[name] for name in alike]


def test_data_of_one_name_and_another_size_is_refused_everywhere(alike: Runs) -> None:
    """As a user's own data set may be, whose size depends on its files."""
    halved = pl.when(pl.col("strategy") == "ddp").then(pl.col("train_samples") // 2).otherwise("train_samples")
    run = alike.run.with_columns(train_samples=halved.cast(pl.Int64))
    runs = replace(alike, tables={**{name: alike.tables[name] for name in LOADED}, "run": run})
    assert summary(runs).row(1, named=True)["verdict"] == SpeedVerdict.NOT_COMPARABLE.value
    (case,) = judge(runs, SHORTER, seed="0").cases
    assert case.verdict == "inconclusive"
    assert "these are two data sets" in case.lacks
    (row,) = by(runs, "strategy", "single", "ddp", across=["devices"]).rows
    assert row.time is None


# --- what is no matter of the environment: when the sides were measured, and how much faster one may be


EVEN = (0.55, 0.555, 0.545, 0.56, 0.54, 0.55)
SCATTERED = (0.3, 0.5, 0.35, 0.45, 0.32, 0.42)
"""In their median 2.6 times as fast, by two devices; but their interval reaches down to 2.1."""
CIRCUMSTANCES: dict[str, tuple[float, tuple[float, ...], str, str]] = {
    "in turn": (5e4, EVEN, "faster", ""),
    "submits of one side after those of the other": (1e7, EVEN, "not interleaved", "measured apart"),
    "faster than its devices can make it": (5e4, tuple(share / 3 for share in EVEN), "not comparable", "not believed"),
    "seemingly faster than its devices": (5e4, SCATTERED, "faster", "more than the ideal 2 times"),
}
"""How much later than single × 1 each repeat of ddp × 2 began, its share of the time, the verdict, and its reason."""
MODELS = ("mlp", "cnn_small")


def in_circumstances(root: Path, later_s: float, shares: Sequence[float]) -> Runs:
    """Both configurations with two models, each repeat in a submit of its own."""
    for repeat, share in enumerate(shares):
        for at, ways, time_s in ((0.0, ONE, 10.0), (later_s, TWO, 10.0 * share)):
            for model in MODELS:
                started = {"started_at": Fake.started_at + 1e5 * repeat + at}
                published(config(root, repeat=repeat, model=model, **ways), steady(time_s, **started))
    return load(root)


def in_words(runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What each room says in words of ddp × 2 beside single × 1."""
    try:
        compared = "\n".join(by(runs, "strategy", "single", "ddp", across=["devices"]).notes)
    except ConfigError as error:
        compared = str(error)
    of_models = claim(
        contrasts=[{"from": ONE, "to": TWO}],
        more={"from": {"model": "mlp"}, "to": {"model": "cnn_small"}},
        expect={"between": [0.5, 2]},
    )
    effects = {"claims": judge(runs, SHORTER, seed="0"), "claims of effects": judge(runs, of_models, seed="0")}
    monkeypatch.setattr(notebook, "_WIDTH", 1000)
    notebook.claims(runs, "002")
    scaling, models = draw(runs, ["scaling", "models"])
    return {
        "warnings": "\n".join([*notes.headline(runs), *notes.warnings(runs)]),
        "compare": compared,
        **{
            room: "\n".join(line for case in each.cases for line in (case.lacks, *case.warnings))
            for room, each in effects.items()
        },
        "scaling": scaling.finding,
        "models": models.finding,
        "notebook": capsys.readouterr().out,
    }


@pytest.mark.cases("submits of one side after those of the other")
@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_every_room_says_the_same_of_when_and_how_much(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    later_s, shares, verdict, reason = CIRCUMSTANCES[name]
    runs = in_circumstances(tmp_path, later_s, shares)
    rows = summary(runs).filter(configuration="ddp × 2").to_dicts()
    assert [row["verdict"] for row in rows] == [verdict] * 2
    assert [row["speed_up_low"] is not None for row in rows] == [verdict == "faster"] * 2
    findings = [judge(runs, SHORTER, seed="0"), judge(runs, FASTER, seed="0")]
    decided = verdict == "faster"
    assert [case.verdict == "inconclusive" for each in findings for case in each.cases] == [not decided] * 4
    for room, words in in_words(runs, capsys, monkeypatch).items():
        assert not reason or reason in words or room == "notebook", (room, words)
        if not reason:
            assert not any(each in words for _, _, _, each in CIRCUMSTANCES.values() if each), room
    (runtime,) = draw(runs, ["runtime"])
    assert ("this does not rank them" in runtime.finding) == (not decided)
    if verdict != "not comparable":
        found = by(runs, "strategy", "single", "ddp", across=["devices"])
        assert [row.verdict.value for row in found.rows] == [verdict] * 2
        (shown,) = [line for line in notes.headline(runs) if line.startswith("ddp × 2 (digits · cnn_small)")]
        assert ("more than the ideal" in shown) == (reason.startswith("more than"))


@pytest.mark.exhaustive
def test_an_effect_of_effects_is_blocked_by_any_two_of_its_runs(tmp_path: Path) -> None:
    """Both effects are five times what two devices can do, so that the one ÷ the other is 1."""
    runs = in_circumstances(tmp_path, 5e4, [share / 5 for share in EVEN])
    more = {"from": {"model": "mlp"}, "to": {"model": "cnn_small"}}
    asked = claim(contrasts=[{"from": ONE, "to": TWO}], more=more, expect={"between": [0.9, 1.1]})
    (case,) = judge(runs, asked, seed="0").cases
    assert (case.verdict, "is not believed" in case.lacks) == ("inconclusive", True)


@pytest.mark.cases("1.8")
@pytest.mark.parametrize(
    ("share", "kind"), [(0.55, None), (0.4, Caveat.ABOVE_IDEAL), (0.1, Blocker.SUPERLINEAR)], ids=["1.8", "2.5", "10"]
)
def test_more_devices_of_one_strategy_are_not_faster_by_any_factor(
    tmp_path: Path, share: float, kind: Caveat | Blocker | None
) -> None:
    for repeat in range(6):
        for devices, time_s in ((2, 10.0), (4, 10.0 * share)):
            published(config(tmp_path, repeat=repeat, strategy="ddp", devices=devices), steady(time_s))
    sides = [[run for run in compared_runs(load(tmp_path)).values() if run.definition["devices"] == n] for n in (2, 4)]
    pairing = paired(*sides)
    kinds = [issue.kind for issue in (*pairing.blockers(), *pairing.caveats())]
    assert kinds == ([kind] if kind else [])
    assert [issue.kind for issue in pairing.exchanged().blockers()] == kinds[: kind is Blocker.SUPERLINEAR]


@pytest.mark.cases("True")
@pytest.mark.parametrize("apart", [False, True])
def test_a_figure_across_works_gives_the_verdict_of_compare(apart: bool, tmp_path: Path) -> None:
    for repeat, wobble in enumerate((1.0, 1.01, 0.99, 1.02, 0.98, 1.0)):
        for batch, time_s in ((64, 10.0), (128, 5.0 * wobble)):
            for strategy, devices in (("single", 1), ("ddp", 2), ("fsdp", 2)):
                at = Fake.started_at + 1e5 * repeat + (batch > 64) * (1e7 if apart else 5e4)
                run = config(tmp_path, repeat=repeat, batch_size=batch, strategy=strategy, devices=devices)
                published(run, steady(time_s, started_at=at))
    runs = load(tmp_path)
    (figure,) = draw(runs, ["throughput_batch"])
    compared = by(runs, "batch_size", 64, 128)
    for row in compared.rows:
        rate = row.ratios["throughput_samples_per_s"]
        assert rate is not None
        span = " (not interleaved)" if apart else f" ({rate.low:.2f}–{rate.high:.2f})"
        assert f"{rate.median:.2f} times as many{span} with {row.configuration}" in figure.finding
    assert ("measured apart" in figure.finding) is apart


@pytest.mark.exhaustive
def test_the_energy_of_all_configurations_is_judged_together(tmp_path: Path) -> None:
    """Of four, which no repeat tells from one device, none has an interval as if it were the only one."""
    for repeat, wobble in enumerate((1.0, 1.02, 0.98, 1.03, 0.97, 1.0)):
        for strategy, devices in (("single", 1), ("ddp", 2), ("fsdp", 2), ("zero1", 2), ("tensor_parallel", 2)):
            power_w = 300.0 / devices * (1.0 if devices == 1 else wobble)
            fake = steady(10.0, device_type="cuda", device_name="GPU", gpu_power_w=lambda e, r, w=power_w: w)
            published(config(tmp_path, repeat=repeat, strategy=strategy, devices=devices), fake)
    runs = load(tmp_path)
    pairings = against_one_device(runs)
    for row in summary(runs).filter(pl.col("devices") == 2).to_dicts():
        alone = pairings[row["group"], row["configuration"]].ratio("gpu_energy_per_sample_j")
        assert alone is not None
        widened = alone.at(0.05 / 4)
        assert (row["energy_ratio_low"], row["energy_ratio_high"]) == (widened.low, widened.high)
        assert row["energy_ratio_low"] < (alone.low or 0)


@pytest.mark.exhaustive
def test_a_claim_that_is_named_has_the_verdict_that_it_has_among_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One effect decides by itself, but not among ten."""
    wobble = (1.0, 1.03, 0.98, 1.04, 0.97, 1.02)
    for repeat, factor in enumerate(wobble):
        published(config(tmp_path / "runs", repeat=repeat), steady(10.0))
        published(config(tmp_path / "runs", repeat=repeat, strategy="ddp", devices=2), steady(9.35 * factor))
    named = {"section": "1", "quote": "shorter", "metric": "steady_epoch_time_s", "sweep": "demo"}
    named |= {"contrasts": [{"rising": "devices"}]}
    expected: list[dict[str, float]] = [{"below": 1.0}, *({"below": 0.93 + 0.001 * place} for place in range(1, 10))]
    claims = [named | {"name": f"claim_{place}", "expect": each} for place, each in enumerate(expected)]
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps({"seed": "9", "title": "mine", "claims": claims}))
    publications, runs = [Publication.read(path)], load(tmp_path / "runs")
    among = judge_all(runs, publications)[0]
    assert judge(runs, among.claim, seed="9").verdict != among.verdict, "else the test shows nothing"
    (alone,) = judge_all(runs, publications, names=["claim_0"])
    assert (alone.verdict, alone.cases) == (among.verdict, among.cases)
    assert main(["claims", str(tmp_path / "runs"), "claim_0", "--file", str(path)]) == 0
    assert f"claim_0: {among.verdict}" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_choice_that_lacks_a_candidate_in_one_repeat_is_judged(tmp_path: Path) -> None:
    needed = {(64, 0.1): 10.0, (64, 0.2): 11.0, (128, 0.1): 5.0, (128, 0.2): 6.0}
    for repeat in range(7):
        for (batch, rate), time_s in needed.items():
            run = config(tmp_path, repeat=repeat, batch_size=batch, optimizer={"name": "sgd", "lr": rate})
            if (repeat, batch, rate) == (2, 64, 0.2):
                failed(run, "nan", "the loss is not finite", epochs=1)
            else:
                published(run, steady(time_s + repeat / 100))
    asked = claim(contrasts=[{"rising": "batch_size"}], best_of="optimizer.lr")
    (case,) = judge(load(tmp_path), asked, seed="0").cases
    assert (case.verdict, len(case.effects)) == ("reproduced", 7)
    # What stands alone in its repeat must have the same environment all the same, or it does not count.
    run = config(tmp_path, repeat=7, batch_size=128, optimizer={"name": "sgd", "lr": 0.1})
    published(run, steady(5.0, environment=environment(**{"packages.torch": "2.11.0"})))
    published(config(tmp_path, repeat=7, batch_size=64, optimizer={"name": "sgd", "lr": 0.1}), steady(10.0))
    (case,) = judge(load(tmp_path), asked, seed="0").cases
    assert (case.verdict, len(case.effects)) == ("reproduced", 7)


def test_a_run_that_is_wrong_does_not_count_for_what_it_learned_because_its_times_are_invalid(tmp_path: Path) -> None:
    published(config(tmp_path), steady(10.0, oversubscribed=True))
    published(config(tmp_path, repeat=1), steady(10.0, oversubscribed=True))
    loaded = load(tmp_path)
    lost = pl.when(pl.col("run_id") == loaded.run["run_id"][0]).then(1).otherwise(0)
    epochs = loaded.epochs.with_columns(train_samples=pl.col("train_samples") + lost)
    runs = replace(loaded, tables={**{name: loaded.tables[name] for name in LOADED}, "epochs": epochs})
    found = dict(excluded(runs).select("run_id", "exclusion").rows())
    assert [found[run_id] for run_id in loaded.run["run_id"]] == ["miscounted", "oversubscribed"]
    assert set(learned(runs)["run_id"]) == {loaded.run["run_id"][1]}


def test_a_notebook_shows_the_medians_of_the_report(tmp_path: Path) -> None:
    metric = "steady_epoch_time_s"
    for repeat in range(6):
        taken = {"others_time_s": lambda epoch, rank: 10.0} if repeat > 2 else {}
        published(config(tmp_path, repeat=repeat), steady(10.0 if repeat < 3 else 20.0, first=12.0 + repeat, **taken))
    runs = load(tmp_path)
    page = json.loads((FOLDER / "quick_look.ipynb").read_text())
    sources = ["".join(cell["source"]) for cell in page["cells"] if cell["cell_type"] == "code"]
    (source,) = [source for source in sources if metric in source]
    table = eval(source, {"runs": runs, "summary": summary})
    assert table.select(metric, "repeats").rows() == summary(runs).select(metric, "repeats").rows()
    assert table["repeats"].to_list() == [3]
