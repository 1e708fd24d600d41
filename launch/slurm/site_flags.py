"""What a site asks of every job, as options of sbatch and srun."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from parallelbench.spec.launchers import Site

_KEYS = (
    *("partition", "qos", "account", "wckey", "constraint"),
    *("reservation", "nice", "nodelist", "exclude"),
)
"""Keys of a site that are options of Slurm's by the same name."""


def site_flags(site: Site) -> dict[str, str | int | bool]:
    """Option → its value; True: it has none. Options that the site does not set are left out."""
    flags = {key: value for key in _KEYS if (value := getattr(site, key)) is not None}
    return flags | ({"exclusive": True} if site.exclusive else {})


def as_words(flags: Mapping[str, str | int | bool | None]) -> list[str]:
    """Options as a command has them; those that are None are left out."""
    return [f"--{key}" if value is True else f"--{key}={value}" for key, value in flags.items() if value is not None]
