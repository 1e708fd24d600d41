"""Any baseline: made-up sweeps of a model that does not fit on one device, with their answers by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis import load, summary
from analysis.comparison.campaign import campaign, require_baseline
from analysis.comparison.sides import by
from analysis.figures import draw
from analysis.report import answers
from analysis.report.sentence import latex_table, sentences
from analysis.runs.reader import Runs
from launch.sweep.expansion import expand
from parallelbench import cli
from parallelbench.config.identity import run_id
from parallelbench.errors import ConfigError
from tests.analysis.factory import Fake, config, failed, published, steady
from tests.analysis.made_up import ROUND_S, WOBBLE, rows_of

EPOCHS_S = {("fsdp", 2): 20.0, ("fsdp", 4): 12.5, ("ddp", 4): 10.0, ("zero1", 4): 8.0}
"""Of each way, the time of an epoch; one device has not enough memory. Places are in this order."""


def measured(root: Path, ways: dict[tuple[str, int], float], *, lost: tuple[int, ...] = (), **more: Any) -> Runs:
    """Six repeats of each, in turn; those `lost` of the first one run out of memory."""
    for repeat, wobble in enumerate(WOBBLE):
        of_sweep = {"sweep_baseline": more["sweep_baseline"]} if "sweep_baseline" in more else {}
        failed(config(root, repeat=repeat, **of_sweep), "oom", "CUDA out of memory. Tried to allocate 2 GiB", epochs=0)
        for place, ((strategy, devices), time_s) in enumerate(ways.items()):
            keys = {"repeat": repeat, "strategy": strategy, "devices": devices, "sweep_place": place + 1} | more
            turn = place if repeat % 2 == 0 else len(ways) - place
            began = Fake.started_at + ROUND_S * (repeat + turn / 10)
            if place == 0 and repeat in lost:
                failed(config(root, **keys), "oom", "CUDA out of memory", epochs=1)
            else:
                # All of a repeat vary alike but for the second way, whose ratios vary.
                factor = wobble if place == 1 else 1.0
                published(config(root, **keys), steady(time_s * factor, started_at=began))
    return load(root)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results")
    measured(root, EPOCHS_S)
    return root


@pytest.fixture(scope="module")
def runs(results: Path) -> Runs:
    return load(results)


def rows(runs: Runs) -> dict[str, dict[str, Any]]:
    return {row["configuration"]: row for row in summary(runs).to_dicts()}


def test_the_fewest_devices_that_count_stand_for_one_device_that_has_not_enough_memory(runs: Runs) -> None:
    found = rows(runs)
    assert found["single × 1"]["verdict"] is None
    assert {row["baseline"] for name, row in found.items() if name != "single × 1"} == {"fsdp × 2"}
    assert found["fsdp × 2"]["verdict"] == "baseline"
    assert found["fsdp × 2"]["baseline_devices"] == 2
    assert found["ddp × 4"]["speed_up"] == pytest.approx(2.0)
    assert found["fsdp × 4"]["speed_up"] == pytest.approx(1.6)
    assert found["fsdp × 4"]["efficiency"] == pytest.approx(0.8)
    assert found["zero1 × 4"]["speed_up"] == pytest.approx(2.5)
    assert [found[name]["verdict"] for name in ("fsdp × 4", "ddp × 4")] == ["faster", "faster"]


def test_a_sentence_says_which_baseline_and_why(runs: Runs) -> None:
    others = answers.headline(runs)
    (said,) = [line for line in others if line.startswith("Baseline: ")]
    assert said == (
        "Baseline: Speed-ups are over fsdp × 2, the first one on the fewest devices that count, as single × 1 ran out "
        "of memory in 6 of 6 repeats. Those of ddp × 4 and zero1 × 4 are no scaling: their strategy is another one, "
        "too."
    )
    assert any("times as fast as fsdp × 2" in line for line in others)
    assert any("which fit although single × 1 ran out of memory): passed in 24 of 24 runs" in line for line in others)
    assert not any("as fast as one device" in line for line in others)
    told = {each.configuration: each.text for each in sentences(runs)}
    assert "times as fast as fsdp × 2" in told["ddp × 4"]


def test_beside_several_devices_of_another_strategy_no_ratio_is_scaling(runs: Runs) -> None:
    """On four devices zero1 takes 8 s and fsdp 12.5 s: it is 1.5625 times as fast. Four of fsdp's devices are 1.6 times
    as fast as two: 1.6 × 1.5625 = 2.5 says nothing of devices alone, though it is more than 4 ÷ 2.
    """
    found = rows(runs)
    assert found["zero1 × 4"]["speed_up"] == pytest.approx(1.6 * 1.5625, rel=1e-3)
    for name in ("zero1 × 4", "ddp × 4"):
        kinds = ("efficiency", "efficiency_low", "efficiency_high", "efficiency_with_startup")
        assert [found[name][kind] for kind in kinds] == [None] * 4
    assert found["fsdp × 4"]["efficiency"] == pytest.approx(1.6 / 2)
    told = answers.headline(runs)
    assert [line.partition(" ")[0] for line in told if "theoretical scaling" in line] == ["fsdp"]
    assert not any("ideal" in line for line in told), "nothing is above any"
    table = {line.partition(" ")[0]: line for line in latex_table(runs).splitlines() if "faster" in line}
    assert r"\%" not in table["zero1"]
    assert r"80.0\,\%" in next(
        line for line in latex_table(runs).splitlines() if line.startswith(r"fsdp \texttimes{}~4")
    )


def test_beside_several_devices_of_its_own_strategy_more_than_the_ideal_is_to_be_explained(tmp_path: Path) -> None:
    """20 s on two devices, and 9.8 s on four: 2.04 times as fast."""
    told = answers.headline(measured(tmp_path, {("fsdp", 2): 20.0, ("fsdp", 4): 9.8}))
    assert any(line.startswith("Trust: Explain before quoting: fsdp × 4, above the ideal.") for line in told)
    assert "explain why fsdp × 4 is above the ideal" in told[-1]


def test_the_figure_of_scaling_begins_at_the_baseline(runs: Runs) -> None:
    (figure,) = draw(runs, ["scaling"])
    ideal = {
        row["x"]: row["median"] for row in rows_of(figure.chart) if row["theory"] and "steady" in row["panel"].lower()
    }
    assert ideal == {2: 1.0, 4: 2.0}
    assert {row["variant"] for row in rows_of(figure.chart) if row["theory"]} == {"theoretical, fsdp"}
    labels = {row["configuration"]: row["label"] for row in rows_of(figure.chart) if row["label"]}
    assert not any("%" in (labels.get(name) or "") for name in ("ddp × 4", "zero1 × 4"))
    assert "zero1" not in figure.finding
    assert "80" in next(
        row["label"] for row in rows_of(figure.chart) if row["configuration"] == "fsdp × 4" and row["label"]
    )


def test_among_equals_the_first_of_the_sweeps_file_is_the_baseline_and_never_the_fastest(tmp_path: Path) -> None:
    of_four = {way: time_s for way, time_s in EPOCHS_S.items() if way[1] == 4}
    found = rows(measured(tmp_path, of_four))
    assert found["fsdp × 4"]["verdict"] == "baseline"
    assert found["ddp × 4"]["speed_up"] == pytest.approx(1.25)
    assert found["zero1 × 4"]["speed_up"] == pytest.approx(12.5 / 8)


def test_one_device_that_counts_is_the_baseline_however_few_of_its_repeats_do(tmp_path: Path) -> None:
    measured(tmp_path, EPOCHS_S)
    for repeat in range(6, 9):
        published(config(tmp_path, repeat=repeat), steady(40.0))
    assert {row["baseline"] for row in rows(load(tmp_path)).values()} == {"single × 1"}


def test_nothing_is_its_own_baseline_where_nothing_else_counts(tmp_path: Path) -> None:
    found = rows(measured(tmp_path, {("fsdp", 4): 12.5}))
    assert (found["fsdp × 4"]["verdict"], found["fsdp × 4"]["speed_up"]) == (None, None)


def test_repeats_in_which_the_baseline_failed_have_no_pair_and_are_told(tmp_path: Path) -> None:
    runs = measured(tmp_path, EPOCHS_S, lost=(1, 4))
    found = rows(runs)
    assert found["ddp × 4"]["speed_up_pairs"] == 4
    assert found["ddp × 4"]["baseline_failed"] == "2 of 6 oom"
    assert found["fsdp × 2"]["baseline_failed"] is None
    assert any("Of the repeats of fsdp × 2, 2 of 6 oom: left out." in line for line in answers.headline(runs))


@pytest.mark.parametrize("name", ["ddp × 4", "ddp x 4", "ddp x4", "ddp*4"])
def test_a_chosen_baseline_is_that_of_every_answer(results: Path, runs: Runs, name: str) -> None:
    chosen = replace(load(results), baseline=name)
    found = rows(chosen)
    assert found["ddp × 4"]["verdict"] == "baseline"
    assert found["fsdp × 2"]["speed_up"] == pytest.approx(0.5)
    assert found["fsdp × 2"]["efficiency"] is None, "another strategy, and half of the devices"
    assert found["zero1 × 4"]["speed_up"] == pytest.approx(1.25)
    assert any("as fast as ddp × 4" in line for line in answers.headline(chosen))
    compared = by(runs, "configuration", "ddp × 4", "zero1 × 4")
    ratio = compared.rows[0].time
    assert ratio is not None
    assert 1 / ratio.median == pytest.approx(found["zero1 × 4"]["speed_up"])
    assert (1 / ratio.high, 1 / ratio.low) == pytest.approx(
        (found["zero1 × 4"]["speed_up_low"], found["zero1 × 4"]["speed_up_high"])
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fsdp × 3", ["no configuration is called that", "fsdp × 4"]),
        ("single × 1", ["none of its runs counts", "oom in repeats 0, 1, 2, 3, 4, 5", "fsdp × 2"]),
    ],
)
def test_a_baseline_that_is_not_there_or_does_not_count_is_refused(runs: Runs, name: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        require_baseline(campaign(runs), name)
    for word in words:
        assert word in str(error.value)


def test_a_name_of_two_variants_is_refused_with_what_tells_them_apart(tmp_path: Path) -> None:
    for bucket, time_s in ((1, 8.0), (25, 6.0)):
        for repeat in range(4):
            way = {"strategy": {"name": "ddp", "bucket_mib": bucket}, "devices": 2}
            published(config(tmp_path, repeat=repeat, **way), steady(time_s))
    runs = load(tmp_path)
    with pytest.raises(ConfigError, match=r"ddp × 2, bucket mib 1\.0; ddp × 2, bucket mib 25\.0"):
        require_baseline(campaign(runs), "ddp × 2")
    require_baseline(campaign(runs), "ddp x 2, bucket mib 25.0")
    found = rows(replace(runs, baseline="ddp x 2, bucket mib 25.0"))
    assert found["ddp × 2, bucket mib 1.0"]["speed_up"] == pytest.approx(0.75)


def test_the_command_refuses_a_wrong_baseline_in_one_line(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(results), "--baseline", "fsdp × 3"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_of_two_kinds_of_work_each_has_a_baseline_of_its_own(tmp_path: Path) -> None:
    measured(tmp_path, EPOCHS_S)
    runs = measured(tmp_path, {("ddp", 4): 9.0, ("zero1", 4): 6.0}, batch_size=64)
    found = {(row["group"][-2:], row["configuration"]): row["baseline"] for row in summary(runs).to_dicts()}
    assert found["28", "ddp × 4"] == "fsdp × 2"
    assert found["64", "zero1 × 4"] == "ddp × 4"


def test_speed_ups_over_unlike_baselines_are_not_ranked(tmp_path: Path) -> None:
    """ddp × 4 is chosen, and one work lacks it: there fsdp × 2 and ddp × 2 are 2 and 1.5 times as fast as one device.
    Beside ddp × 4, of 10 s, fsdp × 2, × 4 and zero1 × 4 take 20, 12.5 and 8 s.
    """
    measured(tmp_path, EPOCHS_S)
    runs = measured(tmp_path, {("single", 1): 30.0, ("fsdp", 2): 15.0, ("ddp", 2): 20.0}, model="mlp")
    told = answers.headline(replace(runs, baseline="ddp × 4"))
    found = [line.partition(" (")[0] for line in told if " trains an epoch " in line]
    assert found == [
        "digits · mlp: fsdp × 2 trains an epoch 2.00 times as fast as one device",
        "digits · cnn_small: zero1 × 4 trains an epoch 1.25 times as fast as ddp × 4",
    ]


def test_the_same_strategy_on_two_nodes_is_another_configuration(tmp_path: Path) -> None:
    for repeat, wobble in enumerate(WOBBLE):
        failed(config(tmp_path, repeat=repeat), "oom", "out of memory", epochs=0)
        for nodes, time_s in ((1, 10.0), (2, 12.0 * wobble)):
            way = {"strategy": "fsdp", "devices": 4, "nodes": nodes, "sweep_place": nodes}
            published(config(tmp_path, repeat=repeat, **way), steady(time_s))
    found = rows(load(tmp_path))
    assert found["fsdp × 4 on 2 nodes"]["baseline"] == "fsdp × 4"
    assert found["fsdp × 4 on 2 nodes"]["speed_up"] == pytest.approx(10 / 12, rel=1e-6)
    assert found["fsdp × 4 on 2 nodes"]["efficiency"] == pytest.approx(10 / 12, rel=1e-6), "as many devices"


def test_a_sweeps_baseline_that_can_not_be_followed_is_told_and_the_default_taken(tmp_path: Path) -> None:
    runs = measured(tmp_path, EPOCHS_S, sweep_baseline="dpp × 4")
    assert rows(runs)["fsdp × 2"]["verdict"] == "baseline"
    told = "The baseline of the sweep is not taken (sweep.baseline=dpp × 4: no configuration is called that)"
    assert any(told in line for line in answers.headline(runs))


def test_the_latest_submit_says_the_baseline_and_another_sweeps_is_not_imposed(tmp_path: Path) -> None:
    for repeat in range(4):
        for place, (strategy, devices, time_s) in enumerate((("ddp", 2, 10.0), ("ddp", 4, 6.0), ("fsdp", 4, 5.0))):
            name = {"sweep_baseline": "ddp × 4"} if repeat >= 2 else {}
            run = config(tmp_path / "one", repeat=repeat, strategy=strategy, devices=devices, sweep_place=place, **name)
            published(run, steady(time_s))
    assert rows(load(tmp_path / "one"))["ddp × 4"]["verdict"] == "baseline"
    for repeat in range(4):
        published(config(tmp_path / "one", repeat=repeat, sweep_name="other"), steady(20.0))
    found = load(tmp_path / "one")
    assert rows(found)["single × 1"]["verdict"] == "baseline"
    assert any("not all of these runs are of a sweep that names it" in line for line in answers.headline(found))


def test_one_lost_repeat_is_not_said_not_to_fit(tmp_path: Path) -> None:
    runs = measured(tmp_path, {("fsdp", 2): 20.0, ("ddp", 4): 10.0}, lost=(1,))
    (line,) = [line for line in answers.headline(runs) if line.startswith("Memory:")]
    assert "single does not fit on 1 device (out of memory in 6 of 6 runs)" in line.replace("repeats", "runs")
    assert "fsdp is out of memory on 2 (1 of 6 runs)" in line


def test_no_shortfall_is_told_over_a_baseline_that_idles_itself(tmp_path: Path) -> None:
    for repeat in range(4):
        failed(config(tmp_path, repeat=repeat), "oom", "out of memory", epochs=0)
        for devices, bubble, time_s in ((2, 0.2, 10.0), (4, 3 / 7, 7.0)):
            run = config(tmp_path, repeat=repeat, strategy="pipeline", model="vit_tiny", devices=devices)
            published(run, steady(time_s, theoretical_bubble=bubble))
    (figure,) = draw(load(tmp_path), ["bubble"])
    assert "lacks" not in figure.finding
    assert figure.chart is None or all(row["value"] is None for row in rows_of(figure.chart))


def test_two_baselines_in_one_panel_have_no_line_of_the_ideal(tmp_path: Path) -> None:
    for repeat in range(4):
        for strategy, devices, time_s in (
            *(("fsdp", 2, 10.0), ("fsdp", 4, 6.0)),
            *(("tf_single", 1, 20.0), ("tf_mirrored", 2, 12.0)),
        ):
            published(config(tmp_path, repeat=repeat, strategy=strategy, devices=devices), steady(time_s))
    (figure,) = draw(load(tmp_path), ["scaling"])
    assert not any(row["theory"] for row in rows_of(figure.chart))


def test_sets_of_options_of_one_device_alone_are_compared_with_the_first(tmp_path: Path) -> None:
    """As of a user's program with two flags on one device; beside several devices each is the baseline of its own."""
    for place, (jit, time_s) in enumerate(((False, 10.0), (True, 8.0))):
        for repeat in range(4):
            strategy = {"name": "tf_single", "xla": jit}
            published(config(tmp_path, repeat=repeat, strategy=strategy, sweep_place=place), steady(time_s))
    alone = summary(load(tmp_path))
    assert alone["verdict"].to_list()[0] == "baseline"
    assert alone["speed_up"].to_list() == [1.0, pytest.approx(1.25)]
    for repeat in range(4):
        strategy = {"name": "tf_mirrored", "xla": True}
        published(config(tmp_path, repeat=repeat, strategy=strategy, devices=2), steady(4.0))
    found = rows(load(tmp_path))
    (with_both,) = [row for name, row in found.items() if name.startswith("tf_mirrored")]
    assert with_both["speed_up"] == pytest.approx(2.0)
    assert [row["verdict"] for row in found.values()].count("baseline") == 2


SWEEP = ("sweep=adhoc", "data=digits", "model=mlp", "device=cpu", "epochs=2")


def test_a_sweep_says_each_configurations_place_and_its_baseline_which_change_no_run_id() -> None:
    words = [*SWEEP, "strategy=ddp,fsdp", "devices=2,4", "sweep.repeats=3"]
    plain = expand([*words, "sweep.order=interleaved"])
    named = expand([*words, "sweep.order=interleaved", "sweep.baseline=fsdp x 2"])
    places = {(each.run.strategy.name, each.run.devices): each.run.sweep_place for each in plain}
    assert places == {("ddp", 2): 0, ("ddp", 4): 1, ("fsdp", 2): 2, ("fsdp", 4): 3}
    assert {each.run.sweep_baseline for each in named} == {"fsdp x 2"}
    assert [run_id(each.run) for each in plain] == [run_id(each.run) for each in named]


def test_a_sweeps_own_baseline_holds_until_another_one_is_asked_for(tmp_path: Path) -> None:
    runs = measured(tmp_path, EPOCHS_S, sweep_baseline="ddp × 4")
    assert rows(runs)["ddp × 4"]["verdict"] == "baseline"
    assert rows(replace(runs, baseline="zero1 × 4"))["zero1 × 4"]["verdict"] == "baseline"


def test_ratios_of_several_devices_without_one_of_one_device_are_in_the_csv(results: Path) -> None:
    cli.main(["report", str(results)])
    table = pl.read_csv(results / "report" / "tables" / "configurations.csv")
    baselines = dict(table.select("configuration", "baseline").rows())
    assert baselines["zero1 × 4"] == "fsdp × 2"
