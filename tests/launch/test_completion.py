"""What shells offer at TAB: held against what the command line takes, and pressed in the shells themselves."""

from __future__ import annotations

import fcntl
import os
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.completion import keys
from launch.sweep.compose import compose_plain, group_choices
from tests.surroundings import program
from tests.warm import cold


def after(line: str, folder: Path | None = None) -> list[str]:
    """What the program offers bash for the last word of a line; of a word with `=` what follows it, as bash asks."""
    asked = {
        "COMP_LINE": f"parallelbench {line}",
        "COMP_POINT": str(len(f"parallelbench {line}")),
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_SHELL": "bash",
        "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n\"'><=;|&(:",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",  # bash adds it
        "_ARGCOMPLETE_IFS": "\v",
    }
    with cold():
        done = subprocess.run(
            ["bash", "-c", '"$0" -m parallelbench.cli 8>&1 9>&2 1>/dev/null', sys.executable],
            env=os.environ | asked | {"PYTHONPATH": os.pathsep.join(sys.path)},
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    assert not done.stderr
    return done.stdout.split("\v") if done.stdout else []


def test_keys_come_level_by_level_and_those_of_the_chosen_file_only() -> None:
    assert {"optimizer=", "optimizer.", "epochs="} <= {*after("run ")}
    assert after("run optimizer.l") == ["optimizer.lr=", "optimizer.lr_rule="], "those of the default, adam"
    assert {"optimizer.beta1=", "optimizer.history_size="} <= {*after("run optimizer=lbfgs,adam optimizer.")}
    lbfgs = after("run optimizer=lbfgs optimizer.")
    assert "optimizer.history_size=" in lbfgs
    assert "optimizer.beta1=" not in lbfgs
    assert {"optimizer.beta1=", "optimizer.history_size="} <= {*after("submit sweep=demo optimizer.")}, "any of them"


def test_a_level_that_is_the_only_one_is_entered_as_shells_put_a_space_after_single_words() -> None:
    assert after("run site.hardware.net") == ["site.hardware.network_gbit_per_s="]
    assert "site.hardware.accelerator=" in after("run site.hard")


@pytest.mark.parametrize("group", sorted({*group_choices()} - {"sweep", "site"}))
def test_keys_that_are_offered_are_keys(group: str) -> None:
    """Hydra refuses a key that the chosen file does not have; options that are null or absent by default are added."""
    for name in group_choices()[group]:
        node = compose_plain([f"{group}={name}"])[group]
        below = [key.removeprefix(f"{group}.") for key in keys(group, [name], None) if key.startswith(f"{group}.")]
        offered = {key.partition(".")[0] for key in below}
        assert offered >= {key for key in node if key not in ("_target_", "name")}, name
        assert offered <= {*node}, name


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("run precision=b", ["bf16"]),
        ("run compile=", ["true", "false"]),
        ("submit strategy=dd", ["ddp"]),
        ("submit precision=fp32,b", ["fp32,bf16"]),  # the next value of a list
        ("run epochs=", []),
        ("submit sweep=demo --then report prec", ["precision="]),  # overrides may follow an option
        ("submit --retry oom,par", ["oom,parity_failed"]),
        ("advise --objective g", ["gpu_hours"]),
        ("claims results scaling_st", ["scaling_steady"]),
        ("report results --figure scaling_st", []),  # a claim is no figure
        ("compare results --by strategy=ddp,hs", ["ddp,hsdp"]),
        ("help optimizer.lr_", ["optimizer.lr_rule"]),
        ("subm", ["submit"]),
        ("plan --js", ["--json"]),
        ("plan --json --js", []),  # once is enough
        ("status ", ["my\\ runs/", "results/"]),
        ("status my", ["my\\ runs/"]),
        ("status my\\ runs/", ["my\\ runs/demo/"]),
        ("status 'my runs/", ["my runs/demo/"]),  # within quotes nothing is escaped
        ("compare results/", ["results/demo/"]),
        ("compare results res", ["results/"]),  # B after A
        ("status results ", []),  # one folder only
        ("run results=r", ["results/"]),
        ("run results=m", ["my\\ runs/"]),
        ("advise --check s", ["steps.csv"]),
        ("report results --out=re", ["results/"]),
        ("status .h", [".hidden/"]),
        ("status ~/re", ["~/results/"]),
        ("status nowhere/", []),
    ],
)
def test_what_may_follow_is_offered(
    line: str, offered: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("results/demo", "my runs/demo", ".hidden"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "steps.csv").touch()
    assert after(line, tmp_path) == offered


def test_ones_own_files_are_offered_too(tmp_path: Path) -> None:
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "my_ring.yaml").write_text("_target_: mine.Ring\nname: my_ring\nhops: 3\n")
    (tmp_path / "strategy" / "my_torn.yaml").write_text("hops: [\n")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "quick.yaml").write_text("# @package _global_\nepochs: 1\n")
    line = f"submit --conf {tmp_path} "
    assert after(f"{line}strategy=my_r") == ["my_ring"]
    assert after(f"{line}strategy=my_ring strategy.") == ["strategy.hops="]
    assert after(f"{line}strategy=my_torn strategy.") == []
    assert after(f"{line}experiment=") == ["quick"]


def test_a_tab_loads_nothing_that_takes_long_and_other_calls_do_not_load_argcomplete(tmp_path: Path) -> None:
    code = """
import os, sys
from parallelbench.cli import main

def loaded(*names):
    return [name for name in names if name in sys.modules]

def end(status):
    print(loaded("torch", "hydra", "omegaconf", "msgspec", "numpy", "polars", "yaml", "rich", "submitit"))
    raise SystemExit(status)

try:
    main(["--version"])
except SystemExit:
    print(loaded("argcomplete"))
os._exit = end
line = "parallelbench submit strategy=dd"
os.environ |= {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
os.environ["_ARGCOMPLETE_STDOUT_FILENAME"] = "answer"
main()
"""
    with cold():
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    assert done.stdout.splitlines()[1:] == ["[]", "[]"]
    assert (tmp_path / "answer").read_text() == "strategy=ddp "


# --- the shells themselves

SHELLS = {
    "bash": (
        ["bash", "--norc", "--noprofile", "-i"],
        'PS1="ready> "; eval "$(register-python-argcomplete parallelbench)"',
    ),
    "zsh": (
        ["zsh", "-f", "-i"],
        'PS1="ready> "; autoload -Uz compinit; compinit -u -D; eval "$(register-python-argcomplete parallelbench)"',
    ),
    "fish": (
        ["fish", "--no-config", "--interactive"],
        "function fish_prompt; echo 'ready> '; end; set -g fish_autosuggestion_enabled 0; "
        "register-python-argcomplete --shell fish parallelbench | source",
    ),
}
PROGRAMS = {
    "parallelbench": "parallelbench.cli",
    "register-python-argcomplete": "argcomplete.scripts.register_python_argcomplete",
}
PRESSED = {
    "subm": ["submit"],
    "submit strategy=dd": ["submit", "strategy=ddp"],
    "submit strategy=ddp,pipe": ["submit", "strategy=ddp,pipeline"],
    "submit optimizer.lr_": ["submit", "optimizer.lr_rule="],
    "submit sweep=dem": ["submit", "sweep=demo"],
    "report my": ["report", "my runs/"],
    "report my\\ runs/d": ["report", "my runs/demo/"],
    "submit results=my": ["submit", "results=my runs/"],
    "submit --then report results=my": ["submit", "--then", "report", "results=my runs/"],
    "report 'my": ["report", "my runs/"],
    "report ~/my": ["report", "HOME/my runs/"],
}
QUOTES_HOME = ("zsh",)
"""Shells in which argcomplete's candidates quote a first ~, so that it stays a ~ until the program reads it."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with results in it, and with the program, as a shell would find it."""
    (tmp_path / "my runs" / "demo").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    for name, module in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        program.chmod(0o755)
    return tmp_path


@pytest.fixture(params=SHELLS)
def terminal(request: pytest.FixtureRequest, place: Path) -> Iterator[tuple[str, int]]:
    """A shell that waits at its prompt; its name, and the terminal's other end."""
    shell = request.param
    command, setup = SHELLS[shell]
    command = [program(shell), *command[1:]]
    ours, theirs = os.openpty()
    path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TERM": "dumb", "HOME": str(place), "XDG_CONFIG_HOME": str(place)}
    with cold():
        process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=place,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
    os.close(theirs)
    os.write(ours, f"{setup}; printf '%s%s\\n' set up\r".encode())
    until(ours, r"(setup)[\s\S]*ready> ")
    yield shell, ours
    process.kill()
    process.wait()
    os.close(ours)


def until(terminal: int, pattern: str, limit_s: float = 60.0) -> str:
    """Read what the terminal shows, up to a pattern; returns its group."""
    shown, ends = "", time.monotonic() + limit_s
    while not (found := re.search(pattern, shown)):
        ready, _, _ = select.select([terminal], [], [], max(0.0, ends - time.monotonic()))
        assert ready, shown
        shown += os.read(terminal, 4096).decode(errors="replace")
    return found.group(1)


@pytest.mark.cases("bash")
@pytest.mark.slow
def test_tabs_complete_in_the_shell_itself(terminal: tuple[str, int], place: Path) -> None:
    """Each line is finished by TAB, and then printed word by word instead of being run."""
    shell, ours = terminal
    to_start = "\x01"
    for typed, words in PRESSED.items():
        closing = "'" * (typed.count("'") % 2) if shell != "bash" else ""  # bash closes the quote itself
        os.write(ours, f"parallelbench {typed}\t{closing}{to_start}printf '<%s>' \r".encode())
        printed = until(ours, r"(<parallelbench>(?:<[^<>]*>)*)[\s\S]*ready> ")
        home = "~" if shell in QUOTES_HOME else str(place)
        assert printed == "".join(f"<{word.replace('HOME', home)}>" for word in ["parallelbench", *words]), typed
