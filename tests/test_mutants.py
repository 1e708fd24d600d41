"""The program that changes the source to try the tests."""

from __future__ import annotations

import ast

import pytest

from tests.mutants import AREAS, OF_EACH, ROOT, drawn, near


@pytest.mark.exhaustive
@pytest.mark.slow
def test_each_mutant_is_another_program_that_some_test_is_near() -> None:
    mutants = drawn()
    assert len(mutants) == OF_EACH * len(AREAS)
    for mutant in mutants:
        before = (ROOT / mutant.file).read_bytes()
        assert before[mutant.begin : mutant.end].decode() == mutant.old
        assert ast.dump(ast.parse(mutant.text())) != ast.dump(ast.parse(before)), mutant
        assert near(mutant.file), mutant
