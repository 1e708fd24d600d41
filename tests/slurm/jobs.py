"""Jobs on a throwaway cluster, as a test asks for them and looks at them."""

from __future__ import annotations

from tests.slurm.cluster import Cluster
from tests.slurm.daemons import DaemonError, until


def submit(cluster: Cluster, script: str, *options: str) -> str:
    """Submit a line of shell; returns the job id. Its output is dropped unless the options say where to."""
    return cluster.run("sbatch", "--parsable", "--output=/dev/null", *options, "--wrap", script).strip()


def show(cluster: Cluster, job: str) -> dict[str, str]:
    """What the controller says of a job, e.g. `JobState`, `Reason`, `Restarts`, `NodeList`; {} if it knows none."""
    said = cluster.run("scontrol", "--oneliner", "show", "job", job, check=False)
    return dict(word.split("=", 1) for word in said.split() if "=" in word)


def wait(cluster: Cluster, job: str, *, timeout_s: float = 30.0, **wanted: str) -> dict[str, str]:
    """Wait until the controller says all of this of a job, e.g. `JobState="RUNNING", Restarts="1"`.

    Raises:
        DaemonError: it has not in time; with what it said instead.
    """
    try:
        until(lambda: wanted.items() <= show(cluster, job).items(), what=f"{wanted}", timeout_s=timeout_s)
    except DaemonError as error:
        said = show(cluster, job)
        raise DaemonError(
            f"job {job}: {error}, but { ({key: said.get(key) for key in ('Reason', *wanted)}) }"
        ) from None
    return show(cluster, job)
