"""Steps that the shim counts, of programs that train in many ways; all expected numbers are counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallelbench.frameworks.program.journals import Journal
from tests.program import shimmed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def journals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Journal]:
    """Case of `counting.py` → its journal. One process runs all: loading torch takes longer than they do."""
    folder = tmp_path_factory.mktemp("steps")
    done = shimmed.run(Path(__file__).parent / "counting.py", folder=folder)
    assert done.returncode == 0, done.stderr
    found = {name: Journal(folder / file) for name, file in json.loads(done.stdout.splitlines()[-1]).items()}
    for name, journal in found.items():
        journal.read()
        assert (journal.ended, journal.unreadable) == (True, 0), name
        assert journal.state is not None
        assert journal.state.faults == 0, journal.state.fault
    return found


COUNTS = {
    "plain": (4, [("SGD", 4)]),
    "accumulation": (4, [("SGD", 4)]),
    "lr_schedule": (4, [("SGD", 4)]),
    "lbfgs": (4, [("LBFGS", 4)]),
    "closure_with_all": (4, [("SGD", 4)]),
    "step_of_the_parent": (4, [("Child", 8)]),
    "wrapper": (4, [("SGD", 4), ("Sharpness", 4)]),
    "duck": (4, [("SGD", 4)]),
    "zero_redundancy": (4, [("SGD", 4), ("ZeroRedundancyOptimizer", 4)]),
    "post_local_sgd": (4, [("SGD", 4)]),
    "optimizer_in_backward": (4, [("SGD", 4), ("SGD", 4)]),
    "nested_backward": (4, [("SGD", 4), ("SGD", 4)]),
    "sub_groups": (4, [("SGD", 25)]),
    "skipped_by_scaler": (4, [("SGD", 4)]),
    "compiled_step": (4, [("SGD", 4)]),
    "compiled_whole_step": (0, []),
    "hand_written": (0, []),
    "no_backward": (4, [("SGD", 4)]),
    "gan": (8, [("Adam", 4), ("SGD", 4)]),
    "gan_steps_of_0": (4, [("Adam", 4), ("SGD", 4)]),
    "gan_steps_of_1": (4, [("Adam", 4), ("SGD", 12)]),
    "two_optimizers": (4, [("AdamW", 4), ("SGD", 4)]),
    "two_optimizers_steps_of_1": (4, [("AdamW", 4), ("SGD", 4)]),
    "by_grad": (4, [("SGD", 4)]),
    "gradient_penalty": (4, [("SGD", 4)]),
    "step_raises": (4, [("Failing", 8)]),
    "closure_raises": (4, [("Child", 8)]),
    "inner_step_raises": (4, [("Failing", 4), ("Forgiving", 4)]),
    "backward_raises": (4, [("SGD", 4)]),
    "optimizer_per_epoch": (4, [("SGD", 2), ("SGD", 2)]),
    "in_a_thread": (4, [("SGD", 4)]),
    "loaders": (8, [("SGD", 8)]),
    "odd_batches": (6, [("SGD", 6)]),
    "idle_step": (4, [("Idle", 4)]),
    "rate_of_0": (4, [("AdamW", 4)]),
    "detached_loss": (4, [("SGD", 4)]),
    "gradients_of_another": (4, [("SGD", 4)]),
    "gradients_that_are_cleared": (4, [("SGD", 4)]),
    "frozen_layers": (4, [("SGD", 4)]),
    "fused_step": (4, [("SGD", 4)]),
    "update_by_data": (4, [("ByData", 4)]),
    "rows_of_a_large_table": (4, [("SGD", 4)]),
    "odd_tensors": (4, [("SGD", 4)]),
    "averages": (4, [("Averaging", 8)]),
}
"""Case → steps, and (class, calls that have ended) of each optimizer."""


@pytest.mark.parametrize("case", COUNTS)
def test_steps_are_counted_once(journals: dict[str, Journal], case: str) -> None:
    journal, (steps, optimizers) = journals[case], COUNTS[case]
    assert journal.state is not None
    assert [step.number for step in journal.steps] == list(range(1, steps + 1))
    assert journal.state.steps == sum(optimizer.counted for optimizer in journal.state.optimizers) == steps
    assert sorted((optimizer.name, optimizer.raw) for optimizer in journal.state.optimizers) == optimizers


def test_every_case_has_an_expectation(journals: dict[str, Journal]) -> None:
    assert journals.keys() == COUNTS.keys()


NOTHING = {"idle_step", "rate_of_0", "detached_loss", "gradients_of_another", "gradients_that_are_cleared"}
"""Cases whose steps are counted, and change no parameter."""
CHANGED = {
    "plain": (2, 2),
    "accumulation": (2, 2),
    "lbfgs": (2, 2),
    "skipped_by_scaler": (2, 2),
    "zero_redundancy": (2, 2),
    "optimizer_in_backward": (2, 2),
    "two_optimizers": (2, 4),  # the second one's turn comes after the first one's, whose calls are the steps
    "frozen_layers": (2, 4),
    "fused_step": (2, 2),
    "update_by_data": (2, 2),
    "rows_of_a_large_table": (1, 1),
    "odd_tensors": (4, 4),
    "averages": (2, 2),
    **dict.fromkeys(NOTHING, (0, 2)),
}
"""Case → parameters that a step after the first one changed, of how many; looked at after 2 and 4 steps."""


@pytest.mark.parametrize("case", sorted(CHANGED))
def test_steps_that_change_no_parameter_are_told_from_all_others(journals: dict[str, Journal], case: str) -> None:
    changed = journals[case].changed
    assert changed is not None
    assert (changed.first, changed.last) == (1, 4 if case in NOTHING else 2)
    assert (changed.changed, changed.seen) == CHANGED[case]


def test_no_case_that_trains_changes_nothing(journals: dict[str, Journal]) -> None:
    still = {name for name, journal in journals.items() if journal.changed and not journal.changed.changed}
    assert still == NOTHING


BACKWARDS = {
    "plain": [1, 1, 1, 1],
    "accumulation": [3, 3, 3, 3],
    "closure_with_all": [1, 1, 1, 1],
    "wrapper": [2, 2, 2, 2],
    "nested_backward": [1, 1, 1, 1],
    "sub_groups": [1, 1, 1, 1],
    "skipped_by_scaler": [1, 2, 1, 1],
    "no_backward": [0, 0, 0, 0],
    "gan_steps_of_1": [4, 4, 4, 4],
    "by_grad": [0, 0, 0, 0],
    "gradient_penalty": [1, 1, 1, 1],
    "step_raises": [2, 1, 2, 1],
    "closure_raises": [2, 1, 2, 1],
    "backward_raises": [1, 1, 1, 1],
}


@pytest.mark.parametrize("case", BACKWARDS)
def test_backwards_of_each_step(journals: dict[str, Journal], case: str) -> None:
    assert [step.backwards for step in journals[case].steps] == BACKWARDS[case]
    grads = 1 if case in ("by_grad", "gradient_penalty") else 0
    assert [step.grads for step in journals[case].steps] == [grads] * len(BACKWARDS[case])


def test_calls_before_the_first_backward_are_no_steps_after_it(journals: dict[str, Journal]) -> None:
    assert journals["sub_groups"].voided == 5
    assert journals["sub_groups"].saw_backwards


def test_without_any_backward_that_is_said(journals: dict[str, Journal]) -> None:
    assert not journals["no_backward"].saw_backwards


def test_a_hand_written_update_is_told_by_its_backwards(journals: dict[str, Journal]) -> None:
    state = journals["hand_written"].state
    assert state is not None
    assert (state.steps, state.backwards) == (0, 4)


def test_a_step_in_one_graph_is_let_through_and_said(journals: dict[str, Journal]) -> None:
    told = {name for name, journal in journals.items() if journal.state is not None and journal.state.whole_graph}
    assert told == {"compiled_whole_step"}


def test_each_optimizer_says_how_many_steps_it_would_mark(journals: dict[str, Journal]) -> None:
    state = journals["gan_steps_of_1"].state
    assert state is not None
    rows = [(row.number, row.name, row.marks, row.counted) for row in state.optimizers]
    assert rows == [(0, "SGD", 12, 0), (1, "Adam", 4, 4)]


def test_loaders_tell_batches_that_trained_from_others(journals: dict[str, Journal]) -> None:
    state = journals["loaders"].state
    assert state is not None
    training, evaluation = state.loaders
    assert (training.length, training.batch_size, training.largest_batch) == (14, 4, 4)
    assert (training.batches, training.batches_without_grad) == (8, 0)
    assert training.backwards == 8
    assert (evaluation.batches, evaluation.batches_without_grad, evaluation.largest_batch) == (0, 4, 3)
    assert evaluation.backwards == 1  # the first epoch's; none came after the last


def test_samples_of_batches_of_any_kind(journals: dict[str, Journal]) -> None:
    state = journals["odd_batches"].state
    assert state is not None
    assert [(loader.batches, loader.largest_batch) for loader in state.loaders] == [(2, 4), (2, 4), (2, None)]
