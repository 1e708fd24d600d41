"""A program that is forked is what exec would have made of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm import cold
from tests.warm.says import DEEDS, ignore

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]


def says(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the program that tells what it is."""
    variables = os.environ | {"WARM_PARENT": str(os.getpid())} | environment
    command = [sys.executable, "-m", "tests.warm.says", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, preexec_fn=ignore)
    return done.returncode, done.stdout, re.sub(r"(?s)Traceback.*\n(?=\w+(: .*)?\n\Z)", "", done.stderr)


@pytest.mark.cases("0-kill")
@pytest.mark.parametrize(("depth", "deed"), [("2", "return"), *(("0", deed) for deed in DEEDS if deed != "return")])
def test_a_fork_is_what_exec_makes(depth: str, deed: str) -> None:
    """How a program ends has nothing to do with what it started."""
    with cold():
        expected = says(depth, deed)
    assert says(depth, deed) == expected


@pytest.mark.exhaustive
def test_variables_that_a_library_reads_when_it_is_loaded_need_a_program_of_its_own() -> None:
    with cold():
        expected = says("1", "return", MKL_VERBOSE="0")
    assert says("1", "return", MKL_VERBOSE="0") == expected
