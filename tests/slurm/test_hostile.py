"""What was meant for a shell, through plan, sbatch, srun and the job: taken as it is written, or refused."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from parallelbench.results.folder import find_runs
from tests.faults import fault
from tests.helpers import quoted
from tests.launch.test_slurm_input import TEXT, generated
from tests.slurm.daemons import until
from tests.slurm.sweeps import PATIENCE_S, SMALL, Sweeps, closed

JOBS = 20
PAYLOAD = st.sampled_from(
    ["$(touch pwned)", "`touch pwned`", "'; touch pwned; '", '"; touch pwned; "', "; touch pwned #", "&& touch pwned"]
)


def hostile() -> list[str]:
    """Names of folders, always the same ones; none that leads elsewhere by itself."""
    found: list[str] = []

    @generated(8 * JOBS)
    @given(TEXT, PAYLOAD, TEXT)
    def collect(before: str, payload: str, after: str) -> None:
        found.append(f"{before}{payload}{after}")

    collect()
    return [text for text in dict.fromkeys(found) if ".." not in text]


@fault(
    "storage and input",
    "hostile paths, as jobs",
    injection="20 generated folders of results and of data, full of shell, go through sbatch",
    outcome="refused in one line, or the job finds its run in its folder; nothing was executed, and there is no file "
    "outside of the folders",
)
def test_hostile_paths_on_the_cluster(sweeps: Sweeps, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "x").write_text("rm x is a part of some")
    sweeps.monkeypatch.chdir(here)
    taken: list[Path] = []
    with closed(sweeps.cluster):
        for number, text in enumerate(hostile()):
            results = tmp_path / f"results-{number}"
            wanted = (f"results={quoted(f'{results}/{text}')}", f"site.data_dir={quoted(f'{results}/{text}')}")
            code, said = sweeps.run("submit", *SMALL, *wanted)
            if code:
                assert (code, said.count("\n")) == (2, 1), said
                assert not results.exists()
                continue
            (submitted,) = results.rglob("adhoc")
            for run in find_runs(submitted):
                (run.path / "config.yaml").unlink()  # the job will say so, and end without training
            taken.append(submitted)
            if len(taken) == JOBS:
                break
        assert len(sweeps.queue()) == JOBS
    until(lambda: not sweeps.cluster.run("squeue", "-h"), what="the end of all jobs", timeout_s=PATIENCE_S)
    for submitted in taken:
        (log,) = submitted.glob("submissions/*/*_log.out")
        assert "config.yaml is no run's configuration" in log.read_text()
    assert [path.name for path in here.iterdir()] == ["x"]
    assert not list(tmp_path.rglob("pwned"))
    strays = {path for path in tmp_path.rglob("*") if path.is_file() and not path.is_relative_to(here)}
    assert {path for path in strays if not any(path.is_relative_to(folder) for folder in taken)} == set()


@fault(
    "submission",
    "Another job of the user has a name and a comment that are no UTF-8",
    injection="sbatch gets the bytes of a Latin-1 terminal",
    outcome="status, submit and cancel see their own jobs as before",
)
def test_another_job_may_be_called_anything(sweeps: Sweeps) -> None:
    name = b"caf\xe9 \xff".decode(errors="surrogateescape")
    odd = sweeps.cluster.run("sbatch", "--parsable", "--hold", f"--job-name={name}", f"--comment={name}", "--wrap=true")
    with closed(sweeps.cluster):
        assert sweeps.submit()[0] == 0
        assert "1 queued" in sweeps.run("status", str(sweeps.results))[1]
        assert "0 runs to submit" in sweeps.submit()[1]
        assert "1 job cancelled" in sweeps.run("cancel", str(sweeps.results))[1]
    sweeps.cluster.run("scancel", odd.strip())
