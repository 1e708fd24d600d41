"""The next runs to measure, as a sweep file that `parallelbench submit` takes as it stands."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelbench.config.plugin import package_path
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.advisor.advice import Objective, Row
    from launch.verbs.asking import Question
    from parallelbench.config.run import RunConfig


def proposal_of(question: Question, rows: Sequence[Row], objective: Objective, budget_h: float) -> dict[str, Any]:
    """Write the sweep file of the next runs; its path, the command that submits it, and its cost."""
    from analysis.advisor.next_runs import proposed, sweep_of

    if question.gpt is not None:
        raise ConfigError(
            "model=gpt is predicted by formula, so no runs can be proposed: leave out --budget, or choose "
            "model=gpt_tiny, whose layers are counted"
        )
    run = question.bases[0]
    found = proposed(rows, objective, budget_s=3600.0 * budget_h, most_devices=_most_devices(run))
    common = [(text.partition("=")[0], text.partition("=")[2]) for text in question.overrides]
    folder = Path(run.results).expanduser() / "advice"
    place = folder / "sweep" / "next_runs.yaml"
    if found.rows:
        import yaml

        _copy_conf(question.extension.conf, folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(yaml.safe_dump(sweep_of(found, _plain(common), name="next_runs"), sort_keys=False))
    return {
        "file": str(place) if found.rows else None,
        "command": shlex.join(_submit(folder, question.extension.plugin)) if found.rows else None,
        "runs": [
            {"strategy": row.strategy, "options": list(row.options), "devices": row.devices} for row in found.rows
        ],
        "device_hours": found.device_s / 3600.0,
        "left_out": found.left_out,
    }


def _copy_conf(conf: Path | None, folder: Path) -> None:
    """Put a user's own configuration files beside the sweep's: `submit` takes one folder of them."""
    for file in sorted(conf.glob("*/*.yaml")) if conf else ():
        content, copy = file.read_bytes(), folder / file.parent.name / file.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)


def _submit(folder: Path, plugin: str | None) -> list[str]:
    """The command, which finds the user's package from any folder."""
    own = ["--plugin", str(package_path(plugin))] if plugin else []
    return ["parallelbench", "submit", "--conf", str(folder), *own, "sweep=next_runs"]


def _plain(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, Any]]:
    """Values as YAML reads them."""
    import yaml

    return [(key, yaml.safe_load(text)) for key, text in pairs]


def _most_devices(run: RunConfig) -> int | None:
    """Devices that runs can be measured on: this machine's, or a site's."""
    if run.site.name != "default":
        return None if run.site.max_nodes is None else run.site.max_nodes * run.site.devices_per_node
    from parallelbench.world.machine import this_machine

    machine = this_machine()
    return len(machine.gpus) or max(1, machine.usable_cores // run.cores_per_device)
