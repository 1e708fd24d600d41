"""What `make` installs is whole or not there, and what is missing is said in a line."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch import installation


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> str:
    """The line of an installation that fails, and leaves nothing that looks whole."""
    assert installation.main([str(folder), "--takes-gb", "7", *options]) == 1
    assert not (folder / ".installed").exists()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Not installed: ")]
    return line


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1e12))


def test_an_old_python_is_told_which_one_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    assert "Python 3.11 or newer is needed, and" in refused(capsys, tmp_path / "env")


def test_a_python_without_environments_is_told_debians_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    assert refused(capsys, tmp_path / "env").endswith("apt install python3-venv.")


def test_a_foreign_folder_is_refused(
    tmp_path: Path, lock: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "theirs").mkdir()
    lock(tmp_path / "theirs")
    (tmp_path / "theirs").chmod(0o555)  # as others see a folder
    assert f"you may not write to {tmp_path}/theirs" in refused(capsys, tmp_path / "theirs" / "env")


def test_a_full_disk_is_told_in_gb_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2e9))
    assert "2.0 GB are free" in refused(capsys, tmp_path / "env")
    assert not (tmp_path / "env").exists()


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
