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
from importlib.resources import files
from pathlib import Path

import pytest

from launch.sweep.compose import compose_plain, group_choices
from launch.verbs.completion import candidates, read_line, written_in_bash
from tests.surroundings import program
from tests.warm import cold

BREAKS = "\"'><=;|&(:"
"""bash's COMP_WORDBREAKS, but for white space."""


def after(line: str) -> list[str]:
    """The candidates for the last word of a line."""
    *words, current = line.split(" ")
    return candidates(words, current)


def test_keys_come_level_by_level_and_those_of_the_chosen_file_only() -> None:
    assert {"optimizer=", "optimizer.", "epochs="} <= {*after("run ")}
    assert after("run optimizer.l") == ["optimizer.lr=", "optimizer.lr_rule="], "those of the default, adam"
    assert "optimizer.history_size=" in after("run optimizer=lbfgs optimizer.")
    assert "optimizer.beta1=" not in after("run optimizer=lbfgs optimizer.")
    assert {"optimizer.beta1=", "optimizer.history_size="} <= {*after("run optimizer=lbfgs,adam optimizer.")}
    assert {"optimizer.beta1=", "optimizer.history_size="} <= {*after("submit sweep=demo optimizer.")}, "any of them"
    assert after("run site.hardware.net") == ["site.hardware.network_gbit_per_s="]


@pytest.mark.parametrize("group", sorted({*group_choices()} - {"sweep", "site"}))
def test_keys_that_are_offered_are_keys(group: str) -> None:
    """Hydra refuses a key that the chosen file does not have; options that are null or absent by default are added."""
    for name in group_choices()[group]:
        node = compose_plain([f"{group}={name}"])[group]
        offered = {key.removeprefix(f"{group}.").rstrip("=") for key in after(f"run {group}={name} {group}.")}
        assert offered >= {key for key in node if key not in ("_target_", "name")}, name
        assert offered <= {*node}, name


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("run precision=b", ["precision=bf16 "]),
        ("run compile=", ["compile=true ", "compile=false "]),
        ("submit precision=fp32,b", ["precision=fp32,bf16 "]),  # the next value of a list
        ("run epochs=", []),
        ("submit --retry oom,par", ["oom,parity_failed "]),
        ("advise --objective g", ["gpu_hours "]),
        ("claims results scaling_st", ["scaling_steady "]),
        ("report results --figure scaling_st", []),  # a claim is no figure
        ("compare results --by strategy=ddp,hs", ["strategy=ddp,hsdp "]),
        ("help optimizer.lr_", ["optimizer.lr_rule "]),
        ("subm", ["submit "]),
        ("plan --js", ["--json "]),
        ("plan --json --js", []),  # once is enough
        ("nonsense ", []),
        ("status ", ["results/"]),
        ("compare results/", ["results/demo/"]),
        ("compare results ", ["results/"]),  # B after A
        ("status results ", []),  # one folder only
        ("run results=r", ["results=results/"]),
        ("advise --check s", ["steps.csv "]),
        ("report results --out=re", ["--out=results/"]),
        ("status .h", [".hidden/"]),
        ("status ~/re", ["~/results/"]),
        ("status nowhere/", []),
    ],
)
def test_what_may_follow_is_offered(
    line: str, offered: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("results/demo", ".hidden"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "steps.csv").touch()
    assert after(line) == offered


def test_ones_own_files_are_offered_too(tmp_path: Path) -> None:
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "my_ring.yaml").write_text("_target_: mine.Ring\nname: my_ring\nhops: 3\n")
    (tmp_path / "strategy" / "my_torn.yaml").write_text("hops: [\n")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "quick.yaml").write_text("# @package _global_\nepochs: 1\n")
    line = f"submit --conf {tmp_path} "
    assert after(f"{line}strategy=my_r") == ["strategy=my_ring "]
    assert after(f"{line}strategy=my_ring strategy.") == ["strategy.hops="]
    assert after(f"{line}strategy=my_torn strategy.") == []
    assert after(f"{line}experiment=") == ["experiment=quick "]


@pytest.mark.parametrize(
    ("line", "words", "current", "reply"),
    [
        ("p run strategy=dd", ["p", "run"], "strategy=dd", "ddp "),
        ("p run 'strategy=dd", ["p", "run"], "strategy=dd", "strategy=ddp"),
        ('p run strategy="dd', ["p", "run"], "strategy=dd", "ddp"),
        (r"p run strategy\=dd", ["p", "run"], "strategy=dd", "strategy=ddp "),
        (r"p 'a b' c\ d strategy=dd", ["p", "a b", "c d"], "strategy=dd", "ddp "),
        ("p run '' strategy=", ["p", "run", ""], "strategy=", "ddp "),
        (r'p "a\"b\c" strat"egy"=d', ["p", r"a\"b\c".replace('\\"', '"')], "strategy=d", "ddp "),
    ],
)
def test_a_line_of_bash_is_read_as_bash_reads_it(line: str, words: list[str], current: str, reply: str) -> None:
    read = read_line(line, BREAKS)
    assert (read.words, read.current) == (words, current)
    assert written_in_bash("strategy=ddp ", read) == reply


def test_a_tab_loads_nothing_that_takes_long() -> None:
    code = """
import sys
from parallelbench.cli import main
assert main(["completion", "zsh", "--words", "submit", "strategy=dd"]) == 0
heavy = ("torch", "hydra", "omegaconf", "msgspec", "numpy", "polars", "yaml", "rich", "submitit")
print([name for name in heavy if name in sys.modules])
"""
    with cold():
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.splitlines() == ["strategy=ddp ", "[]"]


# --- the shells themselves

SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'PS1="ready> "; eval "$(parallelbench completion bash)"'),
    "zsh": (
        ["zsh", "-f", "-i"],
        'PS1="ready> "; autoload -Uz compinit; compinit -u -D; eval "$(parallelbench completion zsh)"',
    ),
    "fish": (
        ["fish", "--no-config", "--interactive"],
        "function fish_prompt; echo 'ready> '; end; set -g fish_autosuggestion_enabled 0; "
        "parallelbench completion fish | source",
    ),
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
    "report 'my": ["report", "my runs/"],
    "report ~/my": ["report", "HOME/my runs/"],
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with results in it, and with the program, as a shell would find it."""
    (tmp_path / "my runs" / "demo").mkdir(parents=True)
    program = tmp_path / "bin" / "parallelbench"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m parallelbench.cli "$@"\n')
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
        assert printed == "".join(f"<{word.replace('HOME', str(place))}>" for word in ["parallelbench", *words]), typed


def test_candidates_of_bash_are_no_patterns(tmp_path: Path) -> None:
    """In an open quote they come unquoted, and bash may not replace them by files that they match."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho 'a*'\necho 'two words '\n")
    program.chmod(0o755)
    (tmp_path / "a1").touch()
    (tmp_path / "a2").touch()
    script = files("launch.verbs.completion").joinpath("scripts", "bash").read_text()
    press = f"{script}\n_parallelbench ./program\nprintf '[%s]' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", press], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "[a*][two words ]"
