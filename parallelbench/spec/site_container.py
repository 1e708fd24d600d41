"""A container that a site's jobs run in."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from parallelbench.spec.structure import Node

Image = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9/][A-Za-z0-9_.:/@#+-]{0,511}\Z",
        description="a file such as /images/bench.sif, or an address such as docker://lab/bench:1.0",
    ),
]
Mount = Annotated[
    str,
    Meta(
        pattern=r"^/[A-Za-z0-9_./-]{0,255}:/[A-Za-z0-9_./-]{0,255}(:(ro|rw))?\Z",
        description="FOLDER:FOLDER or FOLDER:FOLDER:ro, outside and inside, both from / on",
    ),
]
Interpreter = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9/][A-Za-z0-9_./-]{0,255}\Z", description="a program such as /opt/venv/bin/python")
]


class Container(Node, frozen=True, kw_only=True):
    """What starts it, and what is in it."""

    runtime: Literal["apptainer", "singularity", "pyxis"]
    """`apptainer exec` before the job's program; or `srun --container-image`, which Slurm's plugin Pyxis takes."""
    image: Image
    """The image, with this suite installed in the version that submits."""
    python: Interpreter = "python"
    """The interpreter inside, which has the suite."""
    mounts: list[Mount] = field(default_factory=list)
    """Further folders for it. It sees results, data and a user's package under their own names anyway."""
