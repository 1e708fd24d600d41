"""Whether measured figures can be those of the site that is asked about: nothing is predicted of one by the other."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from parallelbench.errors import ConfigError, count_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from analysis.advisor.machine_figures import MachineFigures
    from parallelbench.config.sites import Site

UNLIKE_MEMORY = 0.15
"""Share by which a device's memory may differ from the site file's: drivers take some."""


def require_site(figures: MachineFigures, site: Site, device: str, *, whole_nodes: bool) -> None:
    """Raise `ConfigError` where device type, name, memory or devices per node contradict the site.

    `device` is the run's. `whole_nodes`: all devices of a node were measured; runs may have taken fewer. The site
    "default" is whatever machine was measured.
    """
    if site.name == "default":
        return
    for why in _contradictions(figures, site, device, whole_nodes=whole_nodes):
        raise ConfigError(
            f"--from was measured on {figures.accelerator} ({figures.device_type}), but site={site.name} {why}: "
            "calibrate that site, or leave --from or site=… out"
        )


def devices_of_node(site: Site) -> int:
    """By the hardware where it is described."""
    return site.devices_per_node if site.hardware is None else site.hardware.devices_per_node


def _contradictions(figures: MachineFigures, site: Site, device: str, *, whole_nodes: bool) -> Iterator[str]:
    kind = "cuda" if site.hardware is not None else site.device if device == "auto" else device
    if figures.device_type != kind:
        yield f"has {kind} devices"
    named = (site.gpu_type or "") if site.hardware is None else site.hardware.accelerator
    family = re.search(r"[a-z]+\d+", re.sub(r"[^a-z0-9]", " ", named.lower()))
    if kind == "cuda" and family is not None and family[0] not in re.sub(r"[^a-z0-9]", "", figures.accelerator.lower()):
        yield f"has {named}"
    if site.hardware is not None and figures.memory_bytes is not None:
        expected, found = site.hardware.memory_gib, figures.memory_bytes.value / 2**30
        if abs(found / expected - 1.0) > UNLIKE_MEMORY:
            yield f"has {expected:g} GiB on each device, not {found:.3g}"
    node = devices_of_node(site)
    if figures.devices_per_node > node or (whole_nodes and figures.devices_per_node != node):
        yield f"has {count_of(node, 'device')} per node, not {figures.devices_per_node}"
