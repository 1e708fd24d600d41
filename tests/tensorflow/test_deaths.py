"""Any of TensorFlow's processes may end or stop at any of these moments: no finished epoch is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelbench.results.attempt import OutcomeName
from tests.faults import fault
from tests.helpers import TINY
from tests.launch.programs import completed, finished_epochs, the_run
from tests.tensorflow.test_contract import rows

pytestmark = [pytest.mark.slow, pytest.mark.tensorflow]

CODE = '''
"""Parameter servers, one of whose ranks sends itself a signal in a call of its replica: "rank method call signal"."""
import os
import signal
from pathlib import Path

from parallelbench.frameworks.tensorflow import TfParameterServer


class Mortal(TfParameterServer, frozen=True, kw_only=True):
    def prepare(self, model, run, world):
        replica = super().prepare(model, run, world)
        rank, method, number, name = Path(__file__).with_name("fate.txt").read_text().split()
        if world.rank == int(rank):
            genuine, calls = getattr(replica, method), []

            def fatal(*arguments):
                calls.append(method)
                if len(calls) == int(number):
                    os.kill(os.getpid(), getattr(signal, name))
                return genuine(*arguments)

            setattr(replica, method, fatal)
        return replica
'''
YAML = "_target_: mortals.Mortal\nname: mortal\nmode: sync\nservers: 1\n"
EPOCHS = 5
RUN = ("run", *TINY, "model=mlp", "model.hidden=[16]", "device=cpu", f"epochs={EPOCHS}", "measure.parity=false")
SAVING = ("launcher.checkpoint=always", "launcher.checkpoint_every_s=0.001", "launcher.oversubscribe=true")
FATES: tuple[tuple[str, OutcomeName, str, int], ...] = (
    # Of three ranks two are workers, the first of which coordinates; the last holds the parameters.
    ("2 local_state 2 SIGSTOP", "timeout", "rank 2 hangs: ", 2),  # while the checkpoint after epoch 2 is written
    ("1 step 3 SIGSTOP", "timeout", "rank 1 hangs: ", 2),  # after epoch 1, which was saved, and epoch 2
    ("0 evaluate 2 SIGKILL", "killed", "rank 0 was killed by SIGKILL", 3),
)


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
@fault(
    "workers",
    "A process of TensorFlow's is killed or stops",
    injection="a parameter server stops while a checkpoint is written; then, one start after the other, a worker stops "
    "in training, and SIGKILL to the coordinator in evaluation",
    outcome="the outcome names the rank, in bounded time; no process is left; finished epochs are kept, and the next "
    "start goes on after the last one that was saved",
)
def test_no_finished_epoch_is_lost(tmp_path: Path) -> None:
    (tmp_path / "conf" / "strategy").mkdir(parents=True)
    (tmp_path / "conf" / "strategy" / "mortal.yaml").write_text(YAML)
    (tmp_path / "mortals").mkdir()
    (tmp_path / "mortals" / "__init__.py").write_text(CODE)
    fate, results = tmp_path / "mortals" / "fate.txt", tmp_path / "results"
    own = ("--conf", str(tmp_path / "conf"), "--plugin", str(tmp_path / "mortals"))
    run = (*RUN, *own, *SAVING, "strategy=mortal", "devices=3")
    for number, (words, label, reason, finished) in enumerate(FATES, start=1):
        fate.write_text(words)
        # No part of the experiment: the run goes on under another limit.
        limit = ["launcher.collective_timeout_s=20"] if "SIGSTOP" in words else []
        code, text = completed(*run, *limit, results=results)
        assert code == 1, text
        state, attempt = the_run(results).state(), the_run(results).attempts()[-1]
        assert state.outcome is not None
        assert (attempt.number, state.outcome.outcome) == (number, label), text
        assert state.outcome.reason is not None
        assert state.outcome.reason.startswith(reason)
        assert finished_epochs(attempt) == [*range(1, finished + 1)]
    fate.write_text("0 evaluate 999 SIGKILL")
    code, text = completed(*run, results=results)
    assert code == 0, text
    # Epoch 2 was finished, but could not be saved: it was trained once more.
    of_attempts = [(row["epoch"], row["attempt"]) for row in rows(the_run(results))["epochs"]]
    assert of_attempts == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 4)]
