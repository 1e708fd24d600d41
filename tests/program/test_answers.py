"""What a report says of programs, of results made by hand: speed-ups, start-up, waits, late ranks, losses that part."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from analysis import load, summary
from analysis.figures import draw
from analysis.report.programs import checks_of_programs, times_of_programs
from analysis.report.sentence import sentences
from launch.sweep.compose import Extension
from launch.sweep.expansion import expand
from launch.verbs.bundle import planned_again
from parallelbench.config.identity import run_id
from parallelbench.errors import ConfigError
from parallelbench.frameworks.program import _sources
from parallelbench.results.folder import RunFolder
from parallelbench.results.journal import Journal, read_tables
from parallelbench.results.publish import publish
from parallelbench.results.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from parallelbench.config.run import RunConfig

STEPS = 25
"""Of a window, by default."""


def runs(folder: Path, *overrides: str) -> list[RunConfig]:
    (folder / "code").mkdir(exist_ok=True)
    words = ["program=python train.py {flags}", f"program.folder={folder / 'code'}", f"results={folder}", "device=cpu"]
    return [planned.run for planned in expand([*words, "sweep.repeats=4", "flags=[]", *overrides])]


def measured(
    run: RunConfig,
    step_s: float,
    *,
    at: float,
    waiting: float = 0.0,
    late: Callable[[int], float] = lambda rank: 0.0,
    loss: Callable[[int], float] | None = None,
    startup_s: float = 5.0,
    loader_samples: int | None = None,
) -> None:
    """Publish a run whose steps took so long, with that share of waiting, and so late ranks."""
    folder = RunFolder.of(run)
    folder.write_intent(run, [])
    attempt = folder.claim()
    assert attempt is not None
    attempt.write_config(run)
    attempt.describe(processes=1, device_type="cpu", oversubscribed=False)
    keys = {"run_id": run_id(run), "attempt": 1}
    journal = Journal(attempt.path / "journal-rank0.jsonl")
    environment = {"entries_version": 5, "framework": "program", "packages": {"torch": "2.15.0"}}
    parts = {"startup_model_s": startup_s, "startup_first_step_s": 0.0, "startup_s": startup_s}
    facts = {
        "loader_samples_per_step": loader_samples,
        "device_name": "cpu",
        "processes": run.devices,
        "environment_json": json.dumps(environment),
    }
    journal.event("facts", **facts, **parts, **run.strategy.own_columns(run))
    samples = run.strategy.own_columns(run)["global_batch_size"]

    def write(table: str, **row: Any) -> None:
        journal.write(table, [dict.fromkeys(column.name for column in TABLES[table]) | keys | row])

    for epoch in range(1, run.epochs + 1):
        began = at + epoch * STEPS * step_s
        for rank in range(run.devices):
            write(
                "ranks",
                epoch=epoch,
                rank=rank,
                local_rank=rank,
                node="n",
                device_uuid=f"cores {rank}",
                epoch_time_s=STEPS * step_s,
                training_started_at=began,
                training_ended_at=began + STEPS * step_s,
                others_time_s=0.0,
                cpu_time_s=STEPS * step_s,
                host_peak_rss_bytes=10**8,
                data_wait_s=waiting * STEPS * step_s,
                data_wait_share=waiting,
                forward_s=(0.3 + late(rank)) * STEPS * step_s,
            )
        if loss is not None:
            write("losses", epoch=epoch, step=1, steps=1, train_loss=loss(epoch))
        taken = None if samples is None else samples * STEPS
        write("epochs", epoch=epoch, steps=STEPS, train_samples=taken, finished_at=began + STEPS * step_s)
    journal.event("finished", outcome="ok", done="timed 100 steps")
    journal.close()
    outcome = attempt.finish("ok", "timed 100 steps")
    publish(folder, run, attempt, outcome, read_tables(attempt.path))


def in_turn(planned: list[RunConfig], step_s: Callable[[RunConfig], float], **more: Any) -> None:
    """Measure all in the order in which they were planned, each with a little noise of its own."""
    for number, run in enumerate(planned):
        measured(run, step_s(run) * (1 + run.repeat / 1000), at=1.7e9 + 1e3 * number, **more)


@pytest.mark.parametrize(
    ("scaling", "step_s", "speed_up"),
    [("strong", {1: 0.02, 2: 0.0125}, 1.6), ("weak", {1: 0.02, 2: 0.025}, 1.6)],
)
def test_the_speed_up_is_that_of_samples(
    scaling: str, step_s: dict[int, float], speed_up: float, tmp_path: Path
) -> None:
    """256 samples in 20 and in 12.5 ms; or 256 in 20 ms, and 512 in 25 ms."""
    words = ("devices=1,2", "batch_size=256", f"scaling={scaling}", "program.samples_per_step={global_batch_size}")
    in_turn(runs(tmp_path, *words), lambda run: step_s[run.devices])
    one, two = summary(load(tmp_path)).sort("devices").to_dicts()
    assert (one["verdict"], two["verdict"]) == ("baseline", "faster")
    assert two["speed_up"] == pytest.approx(speed_up, rel=1e-3)
    assert two["efficiency"] == pytest.approx(speed_up / 2, rel=1e-3)
    assert two["throughput_samples_per_s"] == pytest.approx(256 / 0.02 * speed_up, rel=0.01)
    # 5 s to start, then five rows of 25 steps: 2.5 s on one device.
    assert one["total_time_s"] == pytest.approx(5 + 5 * STEPS * 0.02, rel=0.01)
    assert one["group"] == "train"


def test_what_is_alike_on_both_sides_explains_nothing_and_a_paper_names_the_script(tmp_path: Path) -> None:
    words = ("devices=1,2", "batch_size=256", "program.samples_per_step={global_batch_size}")
    in_turn(runs(tmp_path, *words), lambda run: 0.025 / run.devices, waiting=0.2, loss=lambda epoch: 1 / epoch)
    found = load(tmp_path)
    waits, *_ = times_of_programs(found)
    assert "alike, so they explain no difference" in waits
    (losses,) = [line for line in checks_of_programs(found) if "losses" in line]
    assert losses.endswith("the losses that 2 configurations print are alike.")
    (quoted,) = [each.text for each in sentences(found) if each.text]
    assert quoted.startswith("On 2 cores of cpu, train.py on 2 devices ran its steps 2.00 times as fast as one device")


def test_losses_that_end_near_each_other_are_not_said_to_be_alike(tmp_path: Path) -> None:
    curves: tuple[Callable[[int], float], ...] = (lambda epoch: 1.0 / epoch, lambda epoch: 1.02 / epoch)
    for number, run in enumerate(runs(tmp_path, "devices=1,2")):
        measured(run, 0.02, at=1.7e9 + 1e3 * number, loss=curves[run.devices - 1])
    assert any("end within 5" in line for line in checks_of_programs(load(tmp_path)))


def test_flags_and_sources_make_configurations_of_one_group(tmp_path: Path) -> None:
    in_turn(runs(tmp_path, "flags=--ddp,--fsdp"), lambda run: 0.02 if run.strategy.axes["flags"] == "--ddp" else 0.03)  # type: ignore[attr-defined]
    table = summary(load(tmp_path)).sort("configuration").to_dicts()
    assert ["--ddp" in row["configuration"] for row in table] == [True, False]
    assert ["--fsdp" in row["configuration"] for row in table] == [False, True]
    assert {row["group"] for row in table} == {"train"}


def test_the_causes_of_slow_steps_come_first(tmp_path: Path) -> None:
    planned = runs(tmp_path, "devices=2")
    in_turn(planned, lambda _: 0.02, waiting=0.34, late=lambda rank: 0.2 * rank, loss=lambda epoch: 2.0 / epoch)
    (waits, late, rest), (samples, losses) = times_of_programs(load(tmp_path)), checks_of_programs(load(tmp_path))
    assert samples.startswith("Samples per step are not known")
    assert waits.startswith("Waiting for data: 34")
    assert "more workers of the DataLoader" in waits
    assert "rank 1 with program × 2, by 20" in late
    assert "py-spy" in rest
    assert "was not checked" in losses


def test_a_batch_of_each_rank_that_is_taken_for_all_is_the_first_sentence(tmp_path: Path) -> None:
    planned = runs(tmp_path, "devices=2", "batch_size=32", "program.samples_per_step={batch_size}")
    in_turn(planned, lambda _: 0.02, loader_samples=64)
    first, *_ = checks_of_programs(load(tmp_path))
    assert "program × 2: 64, not 32" in first


def test_losses_that_part_are_told_with_where(tmp_path: Path) -> None:
    """Two devices learn as one does in the first three rows, and then no more."""
    for number, run in enumerate(runs(tmp_path, "devices=1,2")):
        parts = run.devices == 2
        measured(
            run,
            0.02,
            at=1.7e9 + 1e3 * number,
            loss=lambda epoch, parts=parts: 1.0 / epoch if epoch < 4 or not parts else 0.5,
        )
    (told,) = (line for line in checks_of_programs(load(tmp_path)) if "losses" in line)
    assert "Printed losses part: program × 2 from program × 1" in told
    assert "from step 77 on" in told  # 0.2 beside 0.5; the fourth row's first step follows 1 + 3 × 25
    (figure,) = draw(load(tmp_path), ["printed_losses"])
    assert figure.chart is not None
    assert "program × 2 from program × 1 from step 77 on" in figure.finding


def test_a_rerun_executes_no_command_that_came_with_a_bundle_and_says_how_to_get_it(tmp_path: Path) -> None:
    in_turn(runs(tmp_path, "flags=--ddp"), lambda _: 0.02)
    with pytest.raises(ConfigError, match=r"executes no commands .* program='python train.py \{flags\}'"):
        planned_again(load(tmp_path), tmp_path / "again", [], Extension())


def test_states_of_the_sources_are_told_by_the_files_that_changed(tmp_path: Path) -> None:
    for content in ("batch = 1", "batch = 2"):
        (tmp_path / "code").mkdir(exist_ok=True)
        (tmp_path / "code" / "loader.py").write_text(content)
        _sources.cache_clear()
        in_turn(runs(tmp_path), lambda _: 0.02)
    (told,) = (line for line in checks_of_programs(load(tmp_path)) if "Several states" in line)
    assert told == "Several states of train were measured: loader.py changed between them."


def test_the_same_program_in_another_folder_is_the_same_configuration(tmp_path: Path) -> None:
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        in_turn(runs(tmp_path / place), lambda _: 0.02)
    definitions = [summary(load(tmp_path / place))["configuration"].to_list() for place in ("a", "b")]
    assert definitions == [["program × 1"], ["program × 1"]]
