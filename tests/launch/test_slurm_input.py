"""Whatever is asked of `plan` and `submit`: a clear refusal, or a batch script whose every line is harmless."""

from __future__ import annotations

import io
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.slurm import scheduler
from launch.slurm.sbatch import FIND_MODULE, STOP_AT_FAILURE, Job, job_groups
from launch.slurm.submit import prepare_for_site
from launch.sweep import PlannedRun
from parallelbench.cli import main
from parallelbench.config.build import from_mapping
from parallelbench.config.sites import expanded
from parallelbench.errors import ConfigError
from tests.faults import fault
from tests.helpers import TINY, plain, quoted

SLURM = (*TINY, "launcher=slurm", "site=local_cluster")
HARMLESS = re.compile(r"[\w@%+=:,./ -]*", re.ASCII)
"""What a shell takes as it stands."""
OURS = ["umask 077", "export PYTHONSAFEPATH=1", "export SUBMITIT_EXECUTOR=slurm"]
END = re.compile(r'export SLURM_JOB_END_TIME="\$\{SLURM_JOB_END_TIME:-\$\(\(\$\(date \+%s\) \+ \d+\)\)\}"')
SHELL = [*OURS, *FIND_MODULE, *STOP_AT_FAILURE, "trap - ERR"]


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The batch scripts that `plan` shows, on a machine without Slurm."""
    shown: list[str] = []

    script = Job.script

    def spy(job: Job, count: int = 1) -> str:
        shown.append(script(job, count))
        return shown[-1]

    monkeypatch.setattr(Job, "script", spy)
    monkeypatch.setattr(scheduler, "available", lambda: False)
    return shown


def program(*arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors):
        code = main(arguments)
    return code, out.getvalue(), errors.getvalue()


def check(script: str, results: str) -> None:
    """Every line is one that we know, with values that neither sbatch nor a shell takes for anything else."""
    lines = script.split("\n")
    assert lines[:3] == ["#!/bin/bash", "", "# Parameters"]
    for line in lines[3:]:
        if line in SHELL or END.fullmatch(line):
            continue
        bare = re.sub(r"'[^']*'|\"'\"", "", line)
        assert bare.startswith("#") or HARMLESS.fullmatch(bare), line
        if line.startswith("#SBATCH "):
            (word,) = shlex.split(line.removeprefix("#SBATCH "))
            assert re.match(r"--[a-z-]+(=|\Z)", word), line
        else:
            words = shlex.split(line, comments=True)
            assert not words or words[0] == "exec" or re.fullmatch(r"module load [\w./+-]+", line), line
    for path in re.findall(r"--output[= ](.*?)(?= --|$)", script, flags=re.MULTILINE):
        (word,) = shlex.split(path)
        assert word.startswith(f"{expanded(results, 'results').absolute()}/"), word
        assert word.rpartition("/")[2] == "%j_0_log.out"
        assert "%" not in word.rpartition("/")[0]


SHELLS = ("\n", "$(touch x)", "${HOME}", "; rm x", "| x", *"'\"`&#\\ ~*<>()")
OTHERS = ("%j", "%", "..", "/", "\r", "\u2028", "\u00a0", "é", "日本", "[", "]", "{", "}", "=", ",", ":", "--", "a")
NASTY = st.sampled_from(SHELLS + OTHERS)
TEXT = st.one_of(
    st.lists(NASTY, min_size=1, max_size=6).map("".join),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=20),
    st.from_regex(r"[A-Za-z0-9_.-]{1,12}", fullmatch=True),
).map(lambda text: text.replace("\x00", ""))  # no program can be given that
SITE = (
    *("partition", "account", "qos", "constraint", "gpu_type", "name", "network_interface", "data_dir", "x"),
    *("reservation", "nodelist", "exclude"),
)
REST = ("sweep.name", "model.name", "data.name", "launcher.time_limit_min", "launcher.pack")
KEYS = st.sampled_from([*(f"site.{key}" for key in SITE), *REST])
PLAIN = st.sampled_from(["{}={}", "{}=[{}]", "{}={},x", "+{}={}", "{}"])


@st.composite
def overrides(draw: st.DrawFn) -> list[str]:
    """One or two keys with values that were meant for a shell, quoted for Hydra or not."""
    found = []
    for _ in range(draw(st.integers(1, 2))):
        kind, text = draw(st.sampled_from(["quoted", "quoted", "modules", "plain", "anything"])), draw(TEXT)
        if kind == "quoted":
            found.append(f"{draw(KEYS)}={quoted(text)}")
        elif kind == "modules":
            found.append(f"site.modules=[{quoted(text)}]")
        elif kind == "plain":
            found.append(draw(PLAIN).format(draw(KEYS), text))
        else:
            found.append(text or "x")
    return [text for text in found if not text.startswith("-")]


def generated(count: int) -> settings:
    """So many cases, always the same ones."""
    return settings(
        max_examples=count, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )


@pytest.mark.exhaustive
@fault(
    "storage and input",
    "hostile overrides",
    injection="100 generated command lines of names, partitions, modules, paths and fragments, full of shell",
    outcome="plan refuses in one clear line, or its batch script has only known lines with quoted values",
)
@pytest.mark.slow
@generated(100)
@given(given=overrides(), folder=st.one_of(st.just("results"), TEXT))
def test_hostile_overrides(given: list[str], folder: str, scripts: list[str], tmp_path: Path) -> None:
    scripts.clear()
    results = f"{tmp_path}/{folder}"
    code, out, errors = program("plan", *SLURM, f"results={quoted(results)}", *given)
    assert (code, bool(errors) or "refused" in out) in ((0, False), (2, True)), errors
    if errors:
        lines = errors.splitlines()
        assert all(line.startswith("parallelbench: ") for line in lines), errors
        assert len(lines) <= max(1, len(given)), "a line for each value at most"
    for script in scripts:
        check(script, results)
    assert not list(tmp_path.iterdir()), "planning writes nothing"


@pytest.mark.exhaustive
@pytest.mark.slow
@fault(
    "storage and input",
    "hostile configurations",
    injection="300 generated partitions, accounts, constraints, types of GPUs, modules, names and paths, full of shell",
    outcome="refused in one clear line, or the batch script has only known lines with quoted values",
)
@generated(300)
@given(
    site=st.dictionaries(st.sampled_from(SITE), TEXT, max_size=2),
    rest=st.tuples(TEXT, TEXT, TEXT),
    which=st.integers(0, 7),
)
def test_hostile_configurations(site: dict[str, str], rest: tuple[str, str, str], which: int, tmp_path: Path) -> None:
    module, sweep, folder = (text if which >> bit & 1 else "fine" for bit, text in enumerate(rest))
    node = plain(*SLURM) | {"sweep_name": sweep, "results": f"{tmp_path}/{folder}"}
    node["site"] = node["site"] | site | {"modules": [module]}
    refusal, script = "", ""
    try:
        (group,) = job_groups([prepare_for_site(PlannedRun(from_mapping(node), []))])
        script = group.job.script()
    except ConfigError as error:
        refusal = str(error)
    assert bool(refusal) != bool(script)
    assert len(refusal.splitlines()) <= len(site) + len(rest), "a line for each value at most"
    if script:
        check(script, node["results"])
    assert not list(tmp_path.iterdir()), "planning writes nothing"


@fault(
    "storage and input",
    "shell lines in overrides",
    injection="site.setup on the command line: as a list, added, as one of several, in a sweep's block, deleted",
    outcome="exit 2 and one line; only a site's file may have them",
)
@pytest.mark.parametrize(
    "override",
    [
        "site.setup=[touch pwned]",
        "+site.setup=[touch pwned]",
        "++site.setup=[touch pwned]",
        "site.setup=[touch pwned],[]",
        "sweep.blocks=[{grid:{site.setup:[[touch pwned]]}}]",
        "site={setup:[touch pwned]}",
        "~site.setup",
    ],
)
def test_shell_lines_come_from_files_only(override: str, tmp_path: Path) -> None:
    code, _, errors = program("submit", *SLURM, f"results={tmp_path}", override)
    assert (code, errors.count("\n")) == (2, 1), errors
    assert not list(tmp_path.iterdir())


def own_site(folder: Path, *lines: str) -> tuple[str, ...]:
    """The overrides and the option that choose a site of the user's own."""
    (folder / "site").mkdir(parents=True)
    text = "defaults: [local_cluster, _self_]\nname: mine\nsetup:\n" + "".join(f"- {line}\n" for line in lines)
    (folder / "site" / "mine.yaml").write_text(text)
    return "site=mine", "--conf", str(folder)


@pytest.mark.exhaustive
def test_a_sites_file_may_have_shell_lines(tmp_path: Path, scripts: list[str]) -> None:
    own = own_site(tmp_path / "conf", "source ~/env.sh", "ulimit -n 4096")
    code, _, errors = program("plan", *SLURM, f"results={tmp_path}/results", *own)
    assert (code, errors) == (0, "")
    assert "\nsource ~/env.sh\nulimit -n 4096\n" in scripts[0]
    assert program("plan", *SLURM, f"results={tmp_path}", "site.setup=[x]", *own)[0] == 2
    assert program("plan", *SLURM, f"results={tmp_path}", "site.name=default", *own)[0] == 2


@pytest.mark.slow
def test_a_reference_in_a_sites_file_leads_to_no_override(tmp_path: Path) -> None:
    own = own_site(tmp_path / "conf", "cd ${results}")
    code, _, errors = program("plan", *SLURM, "results='/tmp; touch pwned'", *own)
    assert code == 2
    assert "only the site's file may have them" in errors


@pytest.mark.parametrize("bad", ["line\nbreak", "tab\there", "100%", "%j", "back\\slash"])
def test_paths_that_slurm_reads_otherwise_are_refused(bad: str, tmp_path: Path) -> None:
    code, _, errors = program("submit", *SLURM, f"results={quoted(f'{tmp_path}/{bad}')}")
    assert (code, errors.count("\n")) == (2, 1)
    assert "which no path of a Slurm job may have" in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("names", ["oomm", "ok", "oom,,error"])
def test_unknown_outcomes_to_retry(names: str, tmp_path: Path) -> None:
    code, _, errors = program("submit", *SLURM, f"results={tmp_path}", "--retry", names)
    assert (code, errors.count("\n")) == (2, 1)
    assert "is no outcome to try again" in errors
    assert "oom" in errors


def test_other_jobs_of_the_user_have_odd_names(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "7|N/A|7|PENDING|None|N/A|a\nb|c\n8|3|9|RUNNING|None|N/A|x|y\n"
    monkeypatch.setattr(scheduler, "ask", lambda *_, **__: lines)
    assert {job.job: job.name for job in scheduler.queue().values()} == {"7": "a", "8_3": "x|y"}


def test_accounting_is_believed_about_jobs_of_the_same_name_and_that_are_over_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = (
        "7|NODE_FAIL|mine\n7|RUNNING|mine\n8|COMPLETED|other\n9_1|CANCELLED by 0|mine|too\n9_[2-5]|PENDING|mine|too\n"
    )
    monkeypatch.setattr(scheduler, "ask", lambda *_, **__: said)
    told = scheduler.accounted(["mine", "mine|too"], since=0.0)
    assert {job.job: job.ended for job in told} == {"7": "", "9_1": "CANCELLED"} | {f"9_{n}": "" for n in range(2, 6)}
