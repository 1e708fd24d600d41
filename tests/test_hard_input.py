"""Input that nobody types by accident: each ends in one line and exit code 2, soon, and nothing is written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from parallelbench import cli
from parallelbench.errors import tellable
from parallelbench.processes import noticing_exits
from tests.analysis.factory import config, published
from tests.faults import fault
from tests.helpers import TINY
from tests.test_cli import here, listing, refused

__all__ = ["here"]

FILES = {
    "deep": ("model", f"a: {'[' * 5000}{']' * 5000}", "more than 50 levels of nesting"),
    "nul": ("model", "name: a\0b\n", "control characters are not allowed"),
    "no_yaml": ("model", "name: [a\nb: c: d\n", "line 2: "),
    "second": ("model", "name: second\n---\nname: other\n", "line 2: "),
    "tag": ("model", "name: tag\na: !!python/name:os.system\n", "line 2: could not determine"),
    "tag_of_sweep": ("sweep", "name: [!!python/object/apply:os.system [ls]]\n", "line 1: could not determine"),
    "no_bool": ("strategy", "name: no_bool\na: !!bool x\n", "a value is not what its tag says"),
    "base_sixty": ("launcher", "defaults: [slurm]\ntime_limit_min: 1:30:00\n", "line 2: 1:30:00 is"),
    "base_sixty_of_sweep": (
        "sweep",
        "blocks:\n- grid: {launcher.time_limit_min: [60, 16:00]}\n",
        "as a time it is 16 in minutes, 960 in seconds",
    ),
    "latin": ("model", b"name: caf\xe9\n", "UTF-8"),
}


def own(folder: Path, group: str, name: str, content: str | bytes) -> str:
    (folder / group).mkdir(parents=True)
    content = content.encode() if isinstance(content, str) else content
    (folder / group / f"{name}.yaml").write_bytes(content)
    return str(folder)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_yaml_is_named_with_its_line(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    group, content, words = FILES[name]
    message = refused(capsys, "plan", "--conf", own(tmp_path / "mine", group, name, content), f"{group}={name}")
    assert f"{group}/{name}.yaml is no YAML that can be read: " in message
    assert words in message
    assert listing(here) == {}


@pytest.mark.parametrize("name", ["tag", "latin"])
def test_claims_of_ones_own_that_are_no_yaml_are_refused(
    here: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    _, content, words = FILES[name]
    Path("mine.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    published(config(here))
    assert words in refused(capsys, "claims", str(here), "--file", "mine.yaml")


def test_a_key_that_a_file_of_ones_own_has_twice_is_named_with_its_line(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = own(tmp_path / "mine", "model", "twice", "defaults: [mlp, _self_]\nname: twice\nname: other\n")
    assert (
        "model/twice.yaml is no YAML that can be read: line 3: while constructing a mapping, found duplicate"
        in refused(capsys, "plan", "--conf", mine, "model=twice")
    )


@pytest.mark.cases("lists1")
@pytest.mark.parametrize("lists", [{"a": "[a, _self_]"}, {"a": "[b, _self_]", "b": "[a, _self_]"}])
def test_defaults_that_include_each_other_are_refused(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], lists: dict[str, str]
) -> None:
    folder = tmp_path / "mine" / "strategy"
    folder.mkdir(parents=True)
    for name, defaults in lists.items():
        (folder / f"{name}.yaml").write_text(f"defaults: {defaults}\nname: {name}\n")
    assert "include each other" in refused(capsys, "plan", "--conf", str(tmp_path / "mine"), "strategy=a")


def test_references_that_lead_to_themselves_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "results" in refused(capsys, "plan", "results=${results}")
    assert "seed" in refused(capsys, "plan", "seed=${repeat}", "repeat=${seed}")


def test_a_key_that_is_longer_than_any_is_not_told_whole(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(refused(capsys, "plan", f"{'k' * 3000}=1")) < 200


def test_json_that_is_nested_without_end_is_a_damaged_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = published(config(here))
    (run.result / "manifest.json").write_text("[" * 100_000)
    (run.path / "attempts" / "1" / "outcome.json").write_text('{"outcome":' + "[" * 100_000)
    assert cli.main(["status", str(here)]) == 0
    capsys.readouterr()
    assert "no readable run" in refused(capsys, "report", str(here))


# --- what is echoed

ESCAPE = "\x1b[31mred\x07"


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", f"epochs={'[' * 3000}"],
        ["plan", f"epochs={'[' * 500}{']' * 500}"],
        *([verb, ESCAPE] for verb in ("plan", "status", "logs")),
        ["plan", f"results={ESCAPE}"],
        ["plan", "results=a\udcff"],
        ["plan", "results=a\0b"],
        ["plan", "results=a\u202eb"],
        ["plan", "--conf", ESCAPE],
        ["plan", "--plugin", ESCAPE],
        ["status", "a\0b"],
        ["status", "a\udcffb"],
        ["status", "a\nb"],
        ["report", ".", "--out", "a\0b"],
        ["claims", ".", "--file", "a\0b"],
        ["plan", "--conf", "a\0b"],
        ["plan", "--plugin", "a\0b"],
        ["calibrate", "--out", "/dev/null/x"],
        [ESCAPE],
        ["status", f"--{ESCAPE}", "."],
    ],
    ids=lambda arguments: " ".join(arguments)[:40].encode("unicode_escape").decode(),
)
def test_what_was_typed_is_told_escaped(here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    try:
        code = cli.main(arguments)
    except SystemExit as ended:  # argparse's way
        code = ended.code if isinstance(ended.code, int) else 1
    printed = capsys.readouterr()
    assert code == 2
    *usage, message = printed.err.rstrip("\n").split("\n")
    assert not usage or usage[0].startswith("usage: ")
    assert message.startswith("parallelbench")
    assert message.isprintable()
    assert listing(here) == {}


def test_what_would_steer_a_terminal_is_escaped() -> None:
    assert tellable("ü × – … 71.6\u202f% \u202e\x1b\xa0\nend") == "ü × – … 71.6\u202f% \\u202e\\x1b\\xa0\nend"


# --- code that ends the process, or keeps it alive

LEAVING = {
    "reads": """
import os


class Images:
    def __init__(self, train): pass
    def __len__(self): return 64
    def __getitem__(self, index): os._exit(0)
""",
    "is_imported": """
from os import _exit
_exit(0)
""",
}


@pytest.mark.slow
@fault(
    "storage and input",
    "A user's code that ends the process",
    injection="`os._exit(0)` in a data set that is read, and in a module that is imported, while a sweep is planned",
    outcome="exit code 2, and file and line of the call: it would look like success",
)
@pytest.mark.parametrize(("name", "verb"), [("reads", "plan"), ("reads", "submit"), ("is_imported", "plan")])
def test_code_that_ends_the_process_is_no_success(here: Path, name: str, verb: str) -> None:
    (here / "mine.py").write_text(LEAVING[name])
    words = [verb, "--plugin", "./mine.py", "data=torch_dataset", "data.dataset=mine.Images", "model=mlp", "epochs=1"]
    command = [sys.executable, "-m", "parallelbench.cli", *words]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 2, said
    line = next(number for number, text in enumerate(LEAVING[name].splitlines(), 1) if "_exit(0)" in text)
    assert f"mine.py:{line}: this code ended the program (SystemExit: os._exit(0))" in said
    assert not (here / "results").exists()


def test_forks_end_by_os_exit_as_ever() -> None:
    with noticing_exits():
        if not (pid := os.fork()):
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        with pytest.raises(SystemExit, match=r"os\._exit\(3\)"):
            os._exit(3)


@pytest.mark.slow
def test_a_thread_that_never_ends_keeps_nobody_alive() -> None:
    code = (
        "import threading\nfrom parallelbench import processes\nprocesses._LEAVING_S = 0.1\n"
        "threading.Thread(target=threading.Event().wait).start()\nprint('done')\n"
        "raise SystemExit(processes.leave(3))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stdout) == (3, "done\n")


# --- folders


def test_a_plan_of_results_that_may_not_be_written_shows_what_is_there(
    here: Path, lock: Callable[[Path], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    published(config(here / "theirs", epochs=1))
    (here / "theirs" / "demo").rename(here / "theirs" / "adhoc")
    kept = listing(here)
    monkeypatch.setattr("launch.checks._read_only", lambda path: "theirs" in str(path))
    words = [*TINY, "results=theirs"]
    assert cli.main(["plan", *words]) == 2
    printed = capsys.readouterr().out
    assert "missing" in printed
    assert "refused: results=theirs can't be written" in " ".join(printed.split())
    assert printed.rstrip().endswith("not known yet: plan again after the first")
    assert "can't be written" in refused(capsys, "submit", *words)
    assert listing(here) == kept


def test_a_package_named_like_the_suites_own_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("analysis", "launch", "conf", "parallelbench"):
        (here / name).mkdir()
        (here / name / "__init__.py").write_text("raise SystemExit('imported')\n")
        for plugin in (name, f"./{name}", str(here / name)):
            message = refused(capsys, "plan", "--plugin", plugin)
            assert f"{name} is a package of the suite itself; give yours another name" in message
    assert str(here) not in sys.path


@pytest.mark.exhaustive
def test_a_report_goes_into_a_folder_among_its_results(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published(config(here / "results"))
    assert cli.main(["report", "results", "--out", "results/out"]) == 0
    assert Path("results/out/index.html").is_file()
    assert cli.main(["status", "results"]) == 0
    assert "1 ok" in capsys.readouterr().out
    for taken in ("results", "results/demo", str(next(Path("results/demo").iterdir()))):
        assert "is not a report and would be replaced" in refused(capsys, "report", "results", "--out", taken)
    shutil.rmtree("results/out")
