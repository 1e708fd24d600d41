"""Variables by which sbatch would be told what the site says already: refused unless both say the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from parallelbench.config.sites import Site

_KEYS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_WCKEY": "wckey",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_COMMENT": "sbatch.comment",
}
"""Variable → the key of the site that says the same."""
_WITHOUT_KEY = ("SBATCH_CLUSTERS",)
"""Variables that would send jobs elsewhere, too, but have no key."""


def refuse_contradictions(site: Site, environment: Mapping[str, str]) -> None:
    """Raise `ConfigError` where jobs would go elsewhere, or be charged to another, than the environment says.

    sbatch itself would prefer the environment to its script. But a sweep is submitted in several sessions, and all of
    its jobs have to go to the same place; so the site decides, and the environment is not passed on.
    """
    for name, key in _KEYS.items():
        of, _, option = key.partition(".")
        asked, own = environment.get(name), (getattr(site, of) or {}).get(option) if option else getattr(site, of)
        if asked and asked != (own if own is None else str(own)):
            says = f"site.{key}={own}" if own is not None else f"site.{key} is not set"
            raise ConfigError(f"{name}={asked!r} in the environment, but {says}: set site.{key}, or unset {name}")
    for name in _WITHOUT_KEY:
        if environment.get(name):
            raise ConfigError(f"{name}={environment[name]!r} in the environment has no effect on these jobs: unset it")
