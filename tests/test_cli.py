"""The program at its edge: what is refused, in which words, and that nothing is written then."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.slurm.queue import Tracker
from parallelbench import cli
from parallelbench.results.folder import RunFolder
from tests.analysis.factory import Fake, begin, config, failed, published
from tests.faults import fault
from tests.helpers import TINY


def listing(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.lstat().st_mtime_ns for path in folder.rglob("*")}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory on a machine without GPUs."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("parallelbench.world.machine.visible_gpus", lambda: ())
    return folder


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a refusal: exit code 2, one line on stderr, nothing on stdout."""
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("parallelbench: ")
    assert len(printed.err.splitlines()) == 1
    return printed.err.strip()


# --- where it is called


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize(
    "words",
    [
        ["plan", "strategy=ddp", "devices=1,2", "sweep.unfit=left_out", "batch_size=127"],
        ["plan", "model=×"],
        ["submit", "--help"],
        ["help"],
        ["status", "results"],
        ["status", "nowhere\udcff…"],
    ],
)
def test_a_terminal_that_lacks_characters_gets_escapes(
    here: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], encoding: str
) -> None:
    """Characters that a stream's encoding lacks would raise: no error, other than those of argparse, may come out."""
    published(config(here / "results"))
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding, errors="strict"))
    with contextlib.suppress(SystemExit):
        assert cli.main(words) in (0, 2)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    assert sys.stdout.buffer.getvalue() or sys.stderr.buffer.getvalue()  # type: ignore[attr-defined]


def test_a_working_folder_that_is_gone_is_told_in_a_sentence(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here.rmdir()
    for words in (["plan"], ["submit"], ["status", "results"], ["doctor"], ["init", "mine"]):
        assert refused(capsys, *words).startswith("parallelbench: the folder that you are in is gone")


# --- options and overrides


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["advise", "--objective", "money"], "--objective: money is no choice: did you mean energy or memory? valid:"),
        (["report", "here", "--width", "86"], "--width: 86 is no choice: did you mean 85? valid: 85, 175"),
        (["report", "here", "--target", "many"], "--target: many is not valid: expected a test accuracy, e.g. 0.95"),
    ],
)
def test_an_options_value_that_is_none_says_what_is_one(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    assert expected in capsys.readouterr().err


@pytest.mark.exhaustive
@given(
    st.permutations([["--conf", "mine"], ["--plugin=package"], ["--retry", "oom"], ["epochs=1"], ["~sweep"], ["a=b"]])
)
def test_options_and_overrides_mix_freely(words: list[list[str]]) -> None:
    options = cli._options(["submit", *itertools.chain.from_iterable(words)])
    assert (options.conf, options.plugin, options.retry) == ("mine", "package", "oom")
    assert options.overrides == [text for (text, *_) in words if not text.startswith("--")], "in their order"


def test_options_may_come_first_where_overrides_are_about_something_else() -> None:
    assert cli._options(["doctor", "--json", "nodes=2"]).overrides == ["nodes=2"]
    assert cli._options(["doctor", "--conf", "my/conf", "site=mine"]).conf == "my/conf"
    assert cli._options(["status", "--watch", "results"]).folder == "results"


# --- bad input

ANYWAY = "launcher.oversubscribe=true"
BAD = [
    ["epohcs=2"],  # a key
    ["epochs=many"],  # a value
    ["batch_size=33", "strategy=ddp", "devices=2", ANYWAY],  # what a component can't do
    ["data=mnist", "site.data_dir=nowhere"],  # what this machine lacks
]
"""One of each kind; `tests/test_refusals.py` has what is said."""


@pytest.mark.parametrize("verb", ["run", "submit"])
@pytest.mark.parametrize("overrides", BAD, ids=lambda overrides: overrides[0])
def test_bad_input_is_refused_in_one_line_and_nothing_is_written(
    here: Path, capsys: pytest.CaptureFixture[str], verb: str, overrides: list[str]
) -> None:
    assert overrides[0].partition("=")[0] in refused(capsys, verb, *overrides)
    assert listing(here) == {}


@pytest.mark.parametrize(
    ("verb", "advice"),
    [
        ("run", "use `parallelbench submit`"),
        ("show", "use `parallelbench plan`"),
        ("prepare", "one data set at a time"),
    ],
)
def test_who_wants_several_is_told_how(here: Path, capsys: pytest.CaptureFixture[str], verb: str, advice: str) -> None:
    assert "data=digits,synthetic asks for several runs: " in (told := refused(capsys, verb, "data=digits,synthetic"))
    assert advice in told
    assert advice in refused(capsys, verb, "sweep=demo")


def test_results_below_a_file_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "file").write_text("mine")
    for results in ("file", "file/below/it"):
        message = refused(capsys, "run", *TINY, f"results={results}")
        assert f"results={results} can't be written" in message
        assert "choose another folder with results=DIR" in message
    assert (here / "file").read_text() == "mine"


def test_results_on_a_read_only_disk_are_refused(
    small_disk: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert "can't be written" in refused(capsys, "run", *TINY, f"results={small_disk}/results")
    assert listing(small_disk) == {}


@pytest.mark.parametrize("verb", ["status", "report"])
def test_folders_that_are_none_are_refused(here: Path, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert "nowhere is no folder" in refused(capsys, verb, "nowhere")
    (here / "file").write_text("")
    assert "file is no folder" in refused(capsys, verb, "file")
    assert list(listing(here)) == ["file"]


@pytest.mark.parametrize("words", [["status"], ["advise", "--from"], ["calibrate", "--out"], ["run", "--plugin"]])
def test_a_home_of_nobody_is_refused(here: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert "no user here has: write the path out" in refused(capsys, *words, "~no-such-user/made.parquet")
    assert listing(here) == {}


READERS = [["status"], ["report"], ["claims"], ["compare", "--by", "strategy=ddp,fsdp"]]
"""Verbs that read the runs of one folder."""


def told(capsys: pytest.CaptureFixture[str], verbs: list[list[str]], folder: Path) -> str:
    """What all these verbs say of a folder."""
    (message,) = {refused(capsys, verb, str(folder), *options) for verb, *options in verbs}
    return message.removeprefix(f"parallelbench: {folder} ")


@pytest.mark.slow
def test_every_verb_refuses_a_folder_without_runs_in_the_same_words(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = "name a results folder, a sweep's folder, or a run's, or start runs first, e.g. parallelbench submit"
    assert told(capsys, READERS, here).startswith(f"holds no runs: {usual}")
    published(config(here))
    assert told(capsys, READERS, next((here / "demo").iterdir()) / "attempts").startswith(f"holds no runs: {usual}")


def test_every_verb_refuses_a_folder_without_finished_runs_in_the_same_words(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "foreign" / "run").mkdir(parents=True)
    (here / "foreign" / "run" / "config.yaml").write_text("theme: dark\n")
    words = told(capsys, READERS[1:], here / "foreign")
    assert words.startswith(f"holds no readable run ({here}/foreign/run: it has no result, and its configuration ")
    failed(config(here), "oom", "out of memory", epochs=1)
    begin(config(here, repeat=1), Fake())
    assert told(capsys, READERS[1:], here / "demo") == (
        f"holds no finished run (1 oom and 1 running): `parallelbench status {here}/demo` says why, and what to do"
    )
    assert cli.main(["status", str(here / "demo")]) == 0


def test_what_is_too_much_leaves_no_folder(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.slurm.submit.track", lambda found, *_, **__: {sweep: Tracker() for sweep in found})
    slurm = ["launcher=slurm", "site=default", "device=cuda", "--max-gpu-hours=0.001"]
    assert "over --max-gpu-hours=0.001" in refused(capsys, "submit", *slurm)
    assert listing(here) == {}


@pytest.mark.parametrize("hours", ["nan", "inf", "-1", "many"])
def test_what_is_no_number_of_hours_lifts_no_limit(here: Path, capsys: pytest.CaptureFixture[str], hours: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["submit", f"--max-gpu-hours={hours}"])
    assert "expected a number of hours" in capsys.readouterr().err


# --- what is only looked at


def test_plan_lists_every_run_and_writes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "sweep=demo", "launcher.oversubscribe=true"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("digits-cnn_small-")]
    assert len(lines) == 24
    assert all("missing" in line for line in lines)
    assert sum("ddp" in line and "2 cpu" in line for line in lines) == 8
    assert listing(here) == {}


def test_show_says_what_run_would_refuse(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "strategy=ddp"]) == 0
    printed = capsys.readouterr()
    assert "run id" in printed.out
    assert printed.err.startswith("parallelbench: this run would be refused: strategy=ddp needs two devices or more")
    assert cli.main(["show", "launcher=slurm", "site=asu_sol", "site.data_dir=here"]) == 0
    printed = capsys.readouterr()
    assert "\ndevice: cuda\n" in printed.out, "that of the site, not of this machine"
    assert printed.err == ""


def test_status_names_every_run_whatever_its_state(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published(config(here, epochs=1))
    failed(
        config(here, epochs=2),
        "error",
        "Errors like [red]this[/] or [/that] are text: [enforce fail at a.cc:1]",
        epochs=0,
    )
    damaged = published(config(here, epochs=3))
    (damaged.result / "run.parquet").unlink()
    begin(config(here, epochs=4), Fake())
    for foreign in ("[red]foreign", "notes"):
        (here / "demo" / foreign).mkdir()
        (here / "demo" / foreign / "config.yaml").write_text("defaults: [a]")
        (here / "demo" / foreign / "attempts" / "x").mkdir(parents=True)
    (here / "demo" / "empty").mkdir()
    (here / "demo" / "half" / "attempts" / "1").mkdir(parents=True)
    (here / "demo" / "half" / "config.yaml").write_text("")
    before = listing(here)
    assert cli.main(["status", str(here)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "[red]this[/] or [/that] are text: [enforce fail at a.cc:1]" in text
    assert "[red]foreign" in text
    assert "missing or damaged" in text
    assert text.startswith("1 error, 1 killed, 2 missing, 1 ok, 1 running, 1 storage")
    assert listing(here) == before


# --- what was done before


def test_submit_says_what_failed_for_good_and_starts_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from launch.sweep import expand

    overrides = [*TINY, "epochs=1,2", "results=r"]
    for planned in expand(overrides):
        failed(planned.run, "nan", "diverged", epochs=1)
    before = listing(here)
    assert cli.main(["submit", *overrides]) == 1
    assert "not started: 2 nan (--retry nan tries again)" in capsys.readouterr().out
    assert listing(here) == before


# --- to measure anew


def test_a_forgotten_run_is_whole_beside_its_sweep_and_missing_in_it(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from analysis import load

    run, other = (published(config(here, repeat=repeat)) for repeat in (0, 1))
    names = {path.relative_to(run.path): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert cli.main(["forget", str(run.path)]) == 0
    moved = Path(capsys.readouterr().out.strip())
    assert moved == run.path.parent / ".forgotten" / f"{run.path.name}-1"
    assert {path.relative_to(moved): path.read_bytes() for path in moved.rglob("*") if path.is_file()} == names
    for root in (here, run.path.parent):
        assert load(root).run["folder"].to_list() == [str(other.path)]
        assert not load(root).skipped
    published(config(here, repeat=0))
    assert cli.main(["forget", str(run.path)]) == 0
    assert capsys.readouterr().out.strip().endswith("-2"), "what was forgotten before stays"


def test_what_runs_or_is_no_run_is_not_forgotten(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running, _ = begin(config(here, repeat=0), Fake())
    done = published(config(here, repeat=1))
    before = listing(here)
    for wrong, text in ((running.path, "is running: end it first"), (done.path.parent, "is no run's folder")):
        assert cli.main(["forget", str(wrong)]) == 2
        assert text in capsys.readouterr().err
    assert listing(here) == before


@pytest.mark.exhaustive
def test_a_run_that_failed_its_parity_check_is_named_and_tried_again(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from launch.sweep import one_run

    overrides = [*TINY, "results=r", "launcher=inline"]
    folder = published(one_run(overrides, instead="").run, Fake(parity_passed=False))
    before = listing(here)
    assert cli.main(["submit", *overrides]) == 1
    assert "not started: 1 parity_failed (--retry parity_failed tries again)" in capsys.readouterr().out
    assert listing(here) == before
    assert cli.main(["submit", *overrides, "--retry", "parity_failed"]) == 0
    assert f"1 earlier result moved to {folder.path.parent}/.forgotten" in capsys.readouterr().out
    assert folder.state().label == "ok"
    assert RunFolder(folder.path.parent / ".forgotten" / f"{folder.path.name}-1").state().label == "parity_failed"
    assert cli.main(["submit", *overrides, "--retry", "parity_failed"]) == 0, "what is ok is never tried again"
    assert len(list((folder.path.parent / ".forgotten").iterdir())) == 1


@pytest.mark.exhaustive
def test_run_tries_again_what_failed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from launch.sweep import one_run

    overrides = [*TINY, "epochs=1", "results=r", "measure.parity=false"]
    folder = failed(one_run(overrides).run, "error", "a bug that is fixed by now", epochs=0)
    assert cli.main(["run", *overrides]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"r/adhoc/{folder.path.name}"
    assert (folder.state().state, folder.state().attempt) == ("done", 2)


# --- the program as a process


HEAVY = ("torch", "numpy", "polars", "pyarrow", "altair", "sklearn", "torchvision")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "absent"),
    [(["--help"], (*HEAVY, "hydra", "rich", "msgspec")), (["run", "--help"], (*HEAVY, "hydra")), (["show"], HEAVY)],
)
def test_help_and_show_load_nothing_heavy(tmp_path: Path, arguments: list[str], absent: tuple[str, ...]) -> None:
    watch = (
        "import sys, atexit\n"
        f"atexit.register(lambda: print('loaded', [m for m in {absent} if m in sys.modules], file=sys.stderr))\n"
        f"from parallelbench.cli import main; sys.exit(main({arguments}))"
    )
    done = subprocess.run([sys.executable, "-c", watch], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1] == "loaded []"
    assert "--help" in arguments or "run id" in done.stdout
    assert listing(tmp_path) == {}


@pytest.mark.exhaustive
def test_a_reader_that_leaves_early_ends_the_program_as_it_ends_others(tmp_path: Path) -> None:
    command = f"{sys.executable} -m parallelbench.cli show | true"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.exhaustive
@fault(
    "storage and input",
    "PYTHONPATH has a package called launch, analysis or conf",
    injection="packages of these names that can't be imported",
    outcome="the suite's own come first, in the program, in ranks and in Slurm's jobs",
)
def test_others_packages_of_the_suites_names_do_not_come_first(tmp_path: Path) -> None:
    for name in ("launch", "analysis", "conf"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('somebody else's')\n")
    programs: list[list[str | Path]] = [
        [Path(sys.executable).with_name("parallelbench"), "show"],
        [sys.executable, "-m", "parallelbench.cli", "report", "--help"],
        [sys.executable, "-m", "parallelbench.entry", "launch.slurm.start", "nowhere"],
        [sys.executable, "-c", "import parallelbench.training.worker, launch, analysis, conf.model"],
    ]
    for words, code in zip(programs, (0, 0, 1, 0), strict=True):
        variables = os.environ | {"PYTHONPATH": str(tmp_path)}
        done = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert "ImportError" not in done.stderr
    assert done.stderr == ""
