"""A user's own strategy that changes while its run waits in the queue of a real Slurm."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.faults import fault
from tests.slurm.cluster import Cluster
from tests.slurm.runs import LIGHT, QUICK, Sweep
from tests.slurm.sweeps import closed


def own_strategy(folder: Path) -> tuple[Path, tuple[str, ...]]:
    """A copy of the light strategy under a name of its own, and the arguments that choose it."""
    shutil.copytree(LIGHT, folder)
    code = (folder / "light_strategy.py").rename(folder / "edited_strategy.py")
    choice = folder / "conf" / "strategy" / "light.yaml"
    choice.write_text(choice.read_text().replace("light_strategy", "edited_strategy"))
    return code, ("--conf", str(folder / "conf"), "--plugin", str(code), "strategy=light")


@fault(
    "storage and input",
    "a plugin edited while its run is queued",
    injection="a comment is added to a user's strategy between submit and the start of the job",
    outcome="the job trains nothing: error, with both sources; submitting again makes a new run",
)
def test_a_plugin_is_edited_while_its_run_is_queued(accounting: Cluster, tmp_path: Path) -> None:
    accounting.restore()
    code, own = own_strategy(tmp_path / "own")
    sweep = Sweep(accounting, tmp_path / "results", (*own, *QUICK, "epochs=2"))
    with closed(accounting):
        sweep.submit()
        code.write_text(code.read_text() + "# changes no number\n")
    outcome, reason = sweep.outcome(sweep.attempt())
    assert outcome == "error"
    assert re.search(r"edited_strategy has changed since .* \(\S+ then, \S+ now\)", reason), reason
    sweep.over()
    with closed(accounting):
        assert "1 run is new, since edited_strategy has changed" in " ".join(sweep.submit().split())
        assert len(sweep.runs) == 2
