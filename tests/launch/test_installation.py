"""What `make` installs is whole or not there, and what is missing is said in a line."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch import installation
from tests.telemetry.playback import environment, library


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> str:
    """The line of an installation that fails, and leaves nothing that looks whole."""
    assert installation.main([str(folder), "--takes-gb", "7", *options]) == 1
    assert not (folder / ".installed").exists()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Not installed: ")]
    return line


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1e12))


LACKING: dict[str, tuple[tuple[object, str, object], str]] = {
    "an old Python": ((sys, "version_info", (3, 10, 4)), "Python 3.11 or newer is needed, and"),
    "no environments": ((sys.modules, "ensurepip", None), "apt install python3-venv."),
    "no room": ((shutil, "disk_usage", lambda _: SimpleNamespace(free=2e9)), "2.0 GB are free"),
}
"""What is wrong → what stands where, and what is said before anything is fetched."""


@pytest.mark.parametrize("case", LACKING)
def test_what_is_lacking_is_told_before_anything_is_fetched(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place, name, value), said = LACKING[case]
    (monkeypatch.setitem if place is sys.modules else monkeypatch.setattr)(place, name, value)  # type: ignore[operator]
    assert said in refused(capsys, tmp_path / "env")
    assert not (tmp_path / "env").exists()


def test_a_foreign_folder_is_refused(
    tmp_path: Path, lock: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "theirs").mkdir()
    lock(tmp_path / "theirs")
    (tmp_path / "theirs").chmod(0o555)  # as others see a folder
    assert f"you may not write to {tmp_path}/theirs" in refused(capsys, tmp_path / "theirs" / "env")


@pytest.mark.slow
def test_a_driver_too_old_for_the_wheel_is_told_which_one_fits_before_anything_is_fetched(tmp_path: Path) -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    (cuda,) = re.findall(r"--cuda (\d+)", makefile)
    assert any(f"-cu{cuda}=" in each for each in metadata.requires("torch") or ()), "what the pinned wheel brings"
    (profile := tmp_path / "profile.txt").touch()

    def said(driver: str) -> str:
        code = f"from launch import installation; print(installation._too_old_a_driver({cuda}))"
        variables = environment(profile, library()) | {"FAKE_CUDA": driver}
        return subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True).stdout

    assert said("12040").startswith("the driver here supports CUDA 12.4, and torch's wheel is built for CUDA 13, so")
    assert said("12040").endswith("make install TORCH_INDEX=URL\n")
    assert said("13000") == "\n"


def test_an_index_of_ones_own_is_not_asked_about_the_driver(
    tmp_path: Path, room: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed: list[list[str]] = []
    monkeypatch.setattr(installation, "_too_old_a_driver", lambda cuda: f"too old for {cuda}")
    monkeypatch.setattr(installation, "_install", lambda _folder, pip, **_: installed.append(pip) or "")
    assert "too old for 13" in refused(capsys, tmp_path / "env", "--cuda", "13", "torch")
    own = ["--extra-index-url", "https://example.org/cu12", "torch"]
    assert installation.main([str(tmp_path / "env"), "--takes-gb", "7", "--cuda", "13", *own]) == 0
    assert installed == [own]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_what_failed_or_was_interrupted_is_removed_and_begun_again(
    tmp_path: Path, room: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The room that the half takes is room for the whole."""
    env = tmp_path / "umlauts ä and spaces"
    line = refused(capsys, env, "--no-index", "parallelbench-that-is-nowhere")
    assert "no package index answers, or none has the package" in line
    (env / "half").touch()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1e12 if not env.exists() else 0))
    (tmp_path / "seen").mkdir()
    (tmp_path / "seen" / "own_module.py").touch()
    whole = [str(env), "--takes-gb", "7", "--sees", str(tmp_path / "seen"), "--no-index", "pip"]
    assert installation.main(whole) == 0
    assert (env / ".installed").exists()
    assert not (env / "half").exists()
    subprocess.run([env / "bin" / "python", "-c", "import own_module"], check=True)


@pytest.mark.slow
def test_an_interrupt_is_a_line(
    tmp_path: Path, room: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", interrupted)
    assert "interrupted" in refused(capsys, tmp_path / "env")
