"""A user's own strategy that changes while its run waits in the queue of a real Slurm."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import polars as pl

from tests.faults import fault
from tests.slurm.cluster import Cluster
from tests.slurm.runs import LIGHT, QUICK, Sweep, times_finished
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
    outcome="the job trains nothing: error, with both sources; submit --same-plugin --retry error trains the same run; "
    "after that it starts nothing, and without the option there is a new run",
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
    changed = re.search(r"edited_strategy has changed since .* \((\S+) then, (\S+) now\)", reason)
    assert changed, reason
    then, now = changed.groups()
    sweep.over()
    said = " ".join(sweep.submit("--same-plugin", "--retry", "error").split())
    assert f"--same-plugin: 1 run counts as one of {then}, though the sources are {now} now" in said
    run = sweep.done()
    assert (len(run.attempts()), times_finished(run)) == (2, 1)
    (environment,) = pl.read_parquet(run.result / "run.parquet")["environment_json"]
    assert json.loads(environment)["plugin"]["sources"] == now
    sweep.over()
    assert "not submitted: 1 done; 0 runs to submit" in sweep.submit("--same-plugin")
    with closed(accounting):
        assert "1 run is new, since edited_strategy has changed" in " ".join(sweep.submit().split())
        assert len(sweep.runs) == 2
