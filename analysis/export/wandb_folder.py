"""Runs as offline folders of Weights & Biases: one project per sweep. Nothing leaves the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from analysis.export.exported_run import ExportedRun

_LONGEST = 64
"""Characters of a tag."""


def write_wandb(runs: Sequence[ExportedRun], folder: Path) -> None:
    """Write a folder `wandb/offline-run-…` per run, which `wandb sync` uploads when its owner wants that."""
    import wandb

    settings = wandb.Settings(
        console="off",
        silent=True,
        x_disable_stats=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        disable_git=True,
        disable_code=True,
        save_code=False,
    )
    for run in runs:
        with wandb.init(
            mode="offline",
            dir=str(folder),
            project=run.sweep,
            name=run.name,
            id=run.run_id[:32],
            group=run.tags.get("configuration"),
            job_type=run.tags.get("strategy"),
            config={**run.parameters, "tags": dict(run.tags)},
            tags=[text[:_LONGEST] for text in _tags(run)],
            settings=settings,
        ) as written:
            for epoch in run.epochs:
                written.log({f"epoch/{name}": value for name, value in epoch.numbers.items()}, step=epoch.epoch)
            written.summary.update({f"run/{name}": value for name, value in run.numbers.items()})


def _tags(run: ExportedRun) -> list[str]:
    """Those that one filters by; all are in the run's configuration, below `tags`."""
    known = [f"{name}: {run.tags[name]}" for name in ("outcome", "parity_passed", "counts") if name in run.tags]
    return [*known, *([f"exclusion: {run.tags['exclusion']}"] if "exclusion" in run.tags else [])]
