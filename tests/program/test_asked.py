"""What a user writes to have a program measured: overrides, names in braces, amounts, sources, identity."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from launch.sweep.expansion import Extension, expand
from launch.verbs.run import notes_on_sources
from parallelbench.config.build import from_mapping, to_mapping
from parallelbench.config.identity import run_id
from parallelbench.config.run_rules import check_run
from parallelbench.errors import ConfigError
from parallelbench.frameworks.program import Program, amount, filled
from parallelbench.frameworks.program.child import Place, environment, script
from parallelbench.frameworks.program.sources import changed_files, sources_of, written_since
from parallelbench.results.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from parallelbench.config.run import RunConfig

TORCHRUN = "program=torchrun --nproc-per-node={devices_per_node} train.py --batch-size={batch_size_per_device}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("print('training')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def runs(*overrides: str) -> list[RunConfig]:
    return [planned.run for planned in expand([*overrides, "results=out"])]


def program(run: RunConfig) -> Program:
    assert isinstance(run.strategy, Program)
    return run.strategy


def test_a_sweep_has_the_program_at_every_device_count_and_nothing_else_of_a_model() -> None:
    first, *others = runs(TORCHRUN, "devices=1,2", "sweep.repeats=2", "batch_size=256")
    assert {(run.devices, run.repeat) for run in (first, *others)} == {(1, 0), (2, 0), (1, 1), (2, 1)}
    assert len({run_id(run) for run in (first, *others)}) == 4
    mapping = to_mapping(first)
    keys = {"devices", "nodes", "device", "cores_per_device", "batch_size", "scaling", "seed", "repeat", "results"}
    assert mapping.keys() - {"sweep_place"} == keys | {"measure", "site", "launcher", "sweep_name", "model", "strategy"}
    assert mapping["model"]["name"] == "train"
    assert from_mapping(mapping) == first


def test_names_in_braces_are_those_of_the_run(folder: Path) -> None:
    words = "{devices} {nodes} {devices_per_node} {batch_size_per_device} {global_batch_size} {seed} {node_rank} {head}"
    (run,) = runs(f"program=echo {words}:{{port}} {{attempt}} {{{{x}}}}", "devices=4", "nodes=2", "batch_size=256",
        "seed=7", "repeat=2", "launcher=slurm", "scaling=weak")  # fmt: skip
    text = script(run, Place(1, "n1", 4711, folder / "own"))
    assert text.splitlines()[-1] == f"echo 4 2 2 256 1024 9 1 n1:4711 {folder}/own {{x}}"


def test_hydras_plus_changes_nothing() -> None:
    assert runs("+program=python train.py") == runs("program=python train.py")


def test_values_with_an_equals_sign_need_no_quotes() -> None:
    found = runs("program=python train.py {flags}", "flags=--dropout=0.0,--dropout=0.2")
    assert {program(run).axes["flags"] for run in found} == {"--dropout=0.0", "--dropout=0.2"}


def test_own_names_are_axes_of_words() -> None:
    found = runs("program=python train.py {flags} --lr={lr}", 'flags=[--ddp,"--wrap=a b"],--fsdp', "lr=0.1,1e-3")
    commands = {script(run, Place(0, "h", 1, run.sweep_folder)).splitlines()[-1] for run in found}
    assert commands == {
        "python train.py --ddp '--wrap=a b' --lr=0.1",
        "python train.py --ddp '--wrap=a b' --lr=0.001",
        "python train.py --fsdp --lr=0.1",
        "python train.py --fsdp --lr=0.001",
    }


def test_a_file_of_ones_own_names_the_program(tmp_path: Path) -> None:
    own = tmp_path / "conf" / "program"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text(
        "defaults: [command, _self_]\nname: mine\ncommand: python train.py {flags}\naxes: {flags: []}\n"
        "setup: [source venv/bin/activate]\nsamples_per_step: '{batch_size} * 4'\n"
    )
    plan = expand(["program=mine", "flags=[],[--fast]", "results=out"], Extension(conf=tmp_path / "conf"))
    assert [planned.run.model.name for planned in plan] == ["mine"] * 2
    lines = script(plan[1].run, Place(0, "h", 1, tmp_path)).splitlines()
    assert (lines[0], lines[-1]) == ("source venv/bin/activate", "python train.py --fast")
    assert plan[0].run.strategy.own_columns(plan[0].run)["global_batch_size"] == 4 * 128


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["program=python train.py {foo}"], "program.command: {foo} names nothing: give it words, foo=WORD"),
        (["program="], "program= is empty"),
        (["program=python 'train.py"], "a quote is not closed"),
        (["program=python ${HOME}/train.py"], "write $NAME"),
        (["program=python train.py", "program=python b.py"], "program= is given 2 times"),
        (["program=python train.py", "precision=bf16"], "precision=bf16 means nothing to a program"),
        (["program=python train.py", "model=mlp"], "model=mlp means nothing to a program"),
        (["program=python train.py", "measure.parity=false"], "measure.parity=false means nothing to a program"),
        (["program=python train.py", "program.steps=50"], "choose program.steps=48, or program.windows=1"),
        (["program=python train.py", "program.samples_per_step=many"], "program.samples_per_step=many is no number"),
        (
            ["program=python train.py", "program.samples_per_step=0"],
            "program.samples_per_step=0 is no number of 1 or more",
        ),
        (["program=python train.py", "program.samples_per_step='{batch}'"], "{batch} names nothing"),
        (["program=python train.py", "program.steps_by=pattern"], "program.steps_by=pattern and program.step_pattern"),
        (["program=python train.py", "program.loss_pattern='loss .*'"], "has no group"),
        (["program=python train.py", "program.loss_pattern='loss ('"], "is no regular expression"),
        (["program=python train.py", "program.folder=/nowhere"], "program.folder=/nowhere is no folder"),
        (["program=python train.py", "+program.axes.flags=[--x]"], "program.axes.flags stands nowhere"),
        (["program=python train.py", "program.warmup_steps=1"], "program.warmup_steps"),
    ],
)
def test_what_is_wrong_is_named_with_its_fix(overrides: Sequence[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        runs(*overrides)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([TORCHRUN, "devices=3"], "batch_size=128 can't be divided by devices=3"),
        ([TORCHRUN, "launcher.pack=true"], "launcher.pack=true is refused with a program"),
        ([TORCHRUN, "launcher=inline"], "launcher=inline is refused with a program"),
        (
            [
                "program=x",
                "program.steps_by=pattern",
                "program.step_pattern=x",
                "devices=2",
                "nodes=2",
                "launcher=slurm",
            ],
            "program.steps_by=pattern with nodes=2 is refused: .* mark .* and command count on each node",
        ),
    ],
)
def test_a_run_that_can_not_be_is_refused_before_it_starts(overrides: Sequence[str], said: str) -> None:
    (run,) = runs(*overrides)
    with pytest.raises(ConfigError, match=said):
        check_run(run, "cpu")


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        ("torchrunn train.py", [], "begins with torchrunn, which is not on PATH"),
        ("A=1 ./venv/bin/python train.py", [], "begins with ./venv/bin/python, which is no program in "),
        ("/nowhere/python train.py", [], "begins with /nowhere/python, which is no program"),
        ("PYTHON -u tain.py", [], "starts tain.py, which is no file in "),
        ("PYTHON -m torch.distributed.run --nproc-per-node={devices} sub/train.py", [], "starts sub/train.py"),
        ("bash /nowhere/train.sh", ["program.setup=[source venv/bin/activate]"], "starts /nowhere/train.sh"),
        ("PYTHON tain.py", ["launcher=slurm"], "starts tain.py"),
    ],
)
def test_a_command_that_must_fail_is_refused_before_it_starts(command: str, options: list[str], said: str) -> None:
    (run,) = runs(f"program={command.replace('PYTHON', sys.executable)}", *options)
    with pytest.raises(ConfigError, match=said):
        check_run(run, "cpu")


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("PYTHON train.py --out new.py", []),
        ("PYTHON -m package.train other.py", []),
        ("PYTHON -c 'print(1)' other.py", []),
        ("cd sub && PYTHON other.py", []),
        ("for i in 1 2; do echo it $i; done", []),
        ("PYTHON $HOME/other.py", []),
        ("PYTHON 'cat > x.py'", []),
        ("torchrun other.py", ["program.setup=[git clone somewhere .]"]),
        ("mine train.py", ["program.setup=[module load mine]"]),
        ("mine train.py", ["launcher=slurm"]),
        ("./mine.sh", ["program.setup=[cd sub]"]),
        ("apptainer exec image.sif python other.py", ["launcher=slurm"]),
    ],
)
def test_what_only_a_shell_can_tell_is_not_refused(command: str, options: list[str]) -> None:
    (run,) = runs(f"program={command.replace('PYTHON', sys.executable)}", *options)
    check_run(run, "cpu")


def test_amounts_are_whole_numbers_of_names() -> None:
    values = {"batch_size": "32", "devices": "4"}
    assert amount("{batch_size} * {devices} + 1", values, key="k") == 129
    assert amount("{batch_size} // {devices}", values, key="k") == 8
    assert amount(None, values, key="k") is None
    for text in ("{batch_size} / 3", "__import__('os')", "2 ** 3", "{batch_size} - 32", "1.5", ""):
        with pytest.raises(ConfigError, match="is no number of 1 or more"):
            amount(text, values, key="k")


def test_braces_of_the_shell_stay() -> None:
    assert filled("echo {{a,b}} ${{X}} {n}", {"n": "1"}, key="k") == "echo {a,b} ${X} 1"


# --- sources and identity


def test_an_edited_program_is_another_run_and_its_output_is_not(folder: Path) -> None:
    (before,) = runs("program=python train.py")
    (folder / "out").mkdir()
    (folder / "out" / "loss.json").write_text("{}")
    (folder / "checkpoint.pt").write_bytes(b"weights")
    assert sources_of(folder).identity == program(before).sources
    (folder / "train.py").write_text("print('training otherwise')\n")
    assert sources_of(folder).identity != program(before).sources
    with pytest.raises(ConfigError, match=r"^train.py in .* changed since this run was asked for"):
        before.strategy.require_sources()


def test_a_plan_names_the_files_that_make_its_runs_new(folder: Path) -> None:
    (folder / "loader.py").write_text("batch = 1\n")
    (folder / "old.py").write_text("gone = 1\n")
    plan = expand(["program=python train.py", "sweep.repeats=2", "results=out"])
    for planned in plan:
        RunFolder.of(planned.run).write_intent(planned.run, [])
    assert not [*notes_on_sources(plan)]
    (folder / "loader.py").write_text("batch = 2\n")
    (folder / "old.py").unlink()
    with pytest.raises(ConfigError, match=r"^loader.py, old.py in "):
        plan[0].run.strategy.require_sources()
    edited = expand(["program=python train.py", "sweep.repeats=2", "results=out"])
    (told,) = notes_on_sources(edited)
    assert told.startswith("2 runs are new: loader.py, old.py changed since ")


def test_files_that_a_program_wrote_into_its_folder_are_found(folder: Path) -> None:
    moment = (folder / "train.py").stat().st_mtime
    os.utime(folder / "train.py", (moment - 100, moment - 100))
    for name in ("checkpoint.pt", "__pycache__/train.pyc", ".cache/x", "results/mine/r0/config.yaml", "logs/a.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("sweep_name: x\n")
    assert written_since(folder, moment - 50) == ["checkpoint.pt", "logs/a.txt"]


def test_under_git_it_is_the_commit_and_what_differs_from_it(folder: Path) -> None:
    def git(*words: str) -> str:
        named = ("-c", "user.name=me", "-c", "user.email=me@example.org")
        return subprocess.run(["git", *named, *words], cwd=folder, check=True, capture_output=True, text=True).stdout

    git("init", "--quiet")
    (folder / "settings.yaml").write_text("lr: 1\n")
    git("add", "train.py", "settings.yaml")
    git("commit", "--quiet", "-m", "first")
    commit = git("rev-parse", "HEAD").strip()
    assert sources_of(folder).identity == commit[:16]
    (folder / "log.txt").write_text("what it printed")
    assert sources_of(folder).identity == commit[:16], "new files that are no code are data or output"
    (folder / "settings.yaml").write_text("lr: 2\n")
    changed = sources_of(folder).identity
    assert changed.startswith(f"{commit[:12]}@")
    (folder / "new.py").write_text("import os\n")
    before = sources_of(folder)
    assert before.identity not in (changed, commit[:16])
    git("add", "--all")
    git("commit", "--quiet", "-m", "second")
    (folder / "train.py").write_text("print('training otherwise')\n")
    now = sources_of(folder)
    assert changed_files(folder, before, now) == ["log.txt", "new.py", "settings.yaml", "train.py"]
    assert changed_files(folder, now, now) == []


def test_places_are_no_part_of_its_identity() -> None:
    (run,) = runs("program=python train.py")

    def changed(**options: Any) -> str:
        return run_id(msgspec.structs.replace(run, strategy=msgspec.structs.replace(program(run), **options)))

    assert changed(folder="/elsewhere", start_timeout_s=5.0) == run_id(run)
    for options in ({"command": "python b.py"}, {"setup": ["module load x"]}, {"sources": "x"}, {"steps": 200}):
        assert changed(**options) != run_id(run)


# --- environment


def test_one_device_is_started_like_several() -> None:
    """Not by what torchrun does: OMP_NUM_THREADS=1 where it starts more than one process, nothing for one."""
    shell = {"HOME": "/me", "OMP_NUM_THREADS": "64", "SLURM_NTASKS": "8", "RANK": "3", "PYTHONSAFEPATH": "1"}
    for devices in (1, 2):
        (run,) = runs(TORCHRUN, f"devices={devices}", "cores_per_device=3")
        found = environment(run, shell, cuda=False, threads=3)
        assert (found["OMP_NUM_THREADS"], found["CUDA_VISIBLE_DEVICES"], found["HOME"]) == ("3", "", "/me")
        assert not found.keys() & {"SLURM_NTASKS", "RANK", "PYTHONSAFEPATH"}
        of_some = environment(run, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, cuda=True, threads=3)
        assert of_some["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, range(4, 4 + devices)))
        assert environment(run, {}, cuda=True, threads=3)["CUDA_VISIBLE_DEVICES"] == ",".join("01"[:devices])


def test_srun_as_launcher_keeps_the_job_s_variables() -> None:
    (run,) = runs("program=srun --ntasks={devices} python train.py")
    assert environment(run, {"SLURM_JOB_ID": "7"}, cuda=False, threads=1)["SLURM_JOB_ID"] == "7"
