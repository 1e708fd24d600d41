"""Which sources of a plugin a sweep's runs are of: today's, or with `--same-plugin` those of the runs that exist."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec

from parallelbench.config.build import COMPONENTS, PLUGIN_SOURCES, load_yaml
from parallelbench.config.plugin import imported_sources, training_plugin
from parallelbench.results.files import read_record
from parallelbench.results.folder import find_runs

if TYPE_CHECKING:
    from pathlib import Path

    from launch.sweep.compose import Extension
    from parallelbench.config.run import RunConfig


class Sources:
    """Gives runs the identity of the package that their classes come from; looks once into each sweep's folder."""

    def __init__(self, extension: Extension) -> None:
        self._same = extension.same_plugin
        self._former: dict[Path, str | None] = {}

    def given_to(self, run: RunConfig) -> RunConfig:
        """The run with its `plugin_sources`; one of the suite's own classes as it is."""
        package = training_plugin(run)
        if package is None:
            return run
        now, sweep = imported_sources(package), run.sweep_folder
        if self._same and sweep not in self._former:
            self._former[sweep] = recorded(sweep, package)
        former = self._former.get(sweep)
        if former is None or former == now:
            return msgspec.structs.replace(run, plugin_sources=now, same_plugin="")
        return msgspec.structs.replace(run, plugin_sources=former, same_plugin=now)


def recorded(sweep: Path, package: str) -> str | None:
    """The sources that the latest run of a package in a sweep is of; empty: an older release's, None: no such run."""
    configs = [folder.path / "config.yaml" for folder in find_runs(sweep)]
    for path in sorted(filter(os.path.exists, configs), key=os.path.getmtime, reverse=True):
        nodes = [node for node in _components(path) if _is_of(node, package)]
        if nodes:
            return str(nodes[0].get(PLUGIN_SOURCES, ""))
    return None


def _is_of(node: dict[str, Any], package: str) -> bool:
    """Whether a component's class is the package's, or the suite's with a class of the package among its options."""
    target, sources = str(node.get("_target_")), str(node.get(PLUGIN_SOURCES, ""))
    return target.startswith(f"{package}.") or sources.startswith(f"{package}@")


def _components(path: Path) -> list[dict[str, Any]]:
    """The components that a run's configuration names; none where it can't be read."""
    try:
        plain = load_yaml(read_record(path))
    except (OSError, ValueError):
        return []
    nodes = [plain.get(key) for key in COMPONENTS] if isinstance(plain, dict) else []
    return [node for node in nodes if isinstance(node, dict)]
