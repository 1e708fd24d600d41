"""Jobs inside a container: Apptainer in front of the program, or flags of srun that its plugin Pyxis takes."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from launch.slurm.shape import END_TOGETHER, as_words, setup_lines, site_flags, typed_gpus
from parallelbench.entry import ENTRY
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from launch.slurm.shape import Shape
    from parallelbench.config.run import RunConfig
    from parallelbench.config.sites import Site

_PYXIS = "pyxis"


def command(site: Site, program: Sequence[str], *, gpus: bool, folders: Sequence[Path]) -> list[str]:
    """A Python program's command, in the site's container if it has one. The container sees these folders."""
    container = site.container
    if container is None:
        return [sys.executable, *program]
    if container.runtime == _PYXIS:
        return [container.python, *program]
    binds = [word for mount in _mounts(site, folders) for word in ("--bind", mount)]
    nvidia = ["--nv"] if gpus else []
    return [container.runtime, "exec", *nvidia, *binds, container.image, container.python, *program]


def srun_flags(site: Site, folders: Sequence[Path]) -> list[str]:
    """What Pyxis needs to be told; empty without it."""
    container = site.container
    if container is None or container.runtime != _PYXIS:
        return []
    return [f"--container-image={container.image}", f"--container-mounts={','.join(_mounts(site, folders))}"]


def srun_command(
    site: Site,
    shape: Shape,
    program: Sequence[str],
    *,
    options: Mapping[str, str | int | bool],
    folders: Sequence[Path],
) -> list[str]:
    """What runs a module with its arguments once on each of a job's nodes, and waits for all.

    For jobs that are no runs'; with some options of its own. The first node that fails ends the others, which may be
    waiting for it.
    """
    flags = {
        **options,
        "nodes": shape.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": shape.cpus_per_node,
        "mem": f"{shape.memory_mib_per_node}M",
        **site_flags(site),
        "gpus-per-node": typed_gpus(shape, site) if shape.gpus_per_node else None,
        **END_TOGETHER,
    }
    script = _srun_script(site, ["-m", ENTRY, *program], gpus=bool(shape.gpus_per_node), folders=folders)
    return ["srun", *as_words(flags), *srun_flags(site, folders), "bash", "-c", script]


def _srun_script(site: Site, program: Sequence[str], *, gpus: bool, folders: Sequence[Path]) -> str:
    """What bash executes under srun: the site's set-up, then the program. With Pyxis all of it is in the container."""
    inside = site.container is not None and site.container.runtime == _PYXIS
    own = msgspec.structs.replace(site, modules=[], setup=[]) if inside else site
    return "\n".join([*setup_lines(own), f"exec {shlex.join(command(site, program, gpus=gpus, folders=folders))}"])


def needed_folders(site: Site, results: Path, plugin: Sequence[str]) -> list[Path]:
    """What a job reads and writes: its sweep's folder, or that of the results; the data; a user's package."""
    data = site.data_folder.absolute()
    return [results.absolute(), *([data] if data.is_dir() else []), *map(Path, plugin[1:])]


def outside(site: Site, folder: Path) -> list[str]:
    """Lines of the batch script after its program: no scontrol is in a container, so the job is queued again here."""
    if site.container is None:
        return []
    marker = f"{shlex.quote(str(folder))}/requeue-$SLURM_JOB_ID"
    return [
        "code=$?",
        f'if [ -e {marker} ]; then rm {marker}; scontrol requeue "$SLURM_JOB_ID"; fi',
        'exit "$code"',
    ]


def ask_outside(site: Site, folder: Path, job: str) -> bool:
    """Ask the batch script for what `outside` does; false without a container, whose script would not."""
    if site.container is not None:
        (folder / f"requeue-{job}").touch()
    return site.container is not None


def check_container(run: RunConfig) -> None:
    """Refuse folders that the container could not be given."""
    site = run.site
    if site.container is None:
        return
    for folder in needed_folders(site, run.sweep_folder, []):
        if odd := next((character for character in str(folder) if character in ",:"), None):
            raise ConfigError(f"{folder} has {odd!r}, which no folder of a container may have: choose another")
    if site.container.runtime == _PYXIS and site.data_dir.startswith("~"):
        raise ConfigError(
            f"site.data_dir={site.data_dir} with a container of Pyxis, where the home folder may be another: write "
            f"the path out, e.g. {os.path.expanduser(site.data_dir)}"
        )


def _mounts(site: Site, folders: Sequence[Path]) -> list[str]:
    assert site.container is not None
    return list(dict.fromkeys([*(f"{folder}:{folder}" for folder in folders), *site.container.mounts]))
