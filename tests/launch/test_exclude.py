"""What a sweep's file excludes is there: a typo would plan the runs that were to be left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from launch.sweep.compose import Extension
from launch.sweep.expansion import expand
from parallelbench.errors import ConfigError
from tests.test_cli import here

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["here"]


def sweep(folder: Path, exclude: str) -> Path:
    """A configuration folder whose sweep has a grid, a list side by side, and a block without strategies."""
    (folder / "conf" / "sweep").mkdir(parents=True)
    (folder / "conf" / "sweep" / "mine.yaml").write_text(
        "name: mine\nrepeats: 1\norder: listed\nblocks:\n"
        "  - grid: {data: digits, model: mlp, launcher.oversubscribe: true, batch_size: [64, 128]}\n"
        "    zip: {strategy: [single, ddp, fsdp], devices: [1, 2, 2]}\n"
        f"    exclude: {exclude}\n"
        "  - grid: {data: digits, model: mlp, seed: [7, 8]}\n"
    )
    return folder / "conf"


def strategies(conf: Path, *words: str) -> list[str]:
    """Those of the first block's runs."""
    runs = [planned.run for planned in expand(["sweep=mine", *words], Extension(conf))]
    return [run.strategy.name for run in runs if run.seed not in (7, 8)]


@pytest.mark.parametrize(
    ("exclude", "said"),
    [
        ("[{strategy: dpd}]", ["exclude: strategy=dpd: no configuration", "did you mean ddp? valid: ddp, "]),
        ("[{strategyy: ddp}]", ["exclude: strategyy=ddp", "sets strategyy: did you mean strategy? valid: strategy"]),
        ("[{batch_size: 12}]", ["exclude: batch_size=12: ", "did you mean 128? valid: 128, 64"]),
        (
            '[{batch_size: "64"}, {devices: 3}]',
            ['batch_size="64": ', "mean 64? valid: 64, 128", "devices=3: no configuration", "valid: 1, 2"],
        ),
        ("[{seed: 7}]", ["exclude: seed=7: no configuration of its block sets seed"]),
        ("[{strategy: ddp, batch_size: 64, model: mpl}]", ["model=mpl: ", "did you mean mlp? valid: mlp"]),
    ],
)
def test_what_no_configuration_has_is_refused(tmp_path: Path, exclude: str, said: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        expand(["sweep=mine"], Extension(sweep(tmp_path, exclude)))
    message = str(refusal.value)
    assert message.count("sweep=mine: exclude: ") == (2 if "}, {" in exclude else 1)
    assert all(text in message for text in said), message


def test_what_is_there_is_left_out(tmp_path: Path) -> None:
    conf = sweep(tmp_path, "[{strategy: ddp, batch_size: 64}, {devices: 1}, {strategy: single, devices: 2}, {}]")
    assert strategies(conf) == ["fsdp", "ddp", "fsdp"]


def test_what_only_the_command_line_narrowed_is_no_error(tmp_path: Path) -> None:
    conf = sweep(tmp_path, "[{strategy: ddp}, {batch_size: 64}]")
    assert strategies(conf, "strategy=single", "devices=1") == ["single"]
    assert strategies(conf, "strategy=single,fsdp", "devices=2", "batch_size=64,128") == ["single", "fsdp"]


def test_a_key_of_the_command_line_may_have_any_value_that_can_be(tmp_path: Path) -> None:
    conf = sweep(tmp_path, "[{epochs: 3, strategy: ddp}, {optimizer: sdg}]")
    with pytest.raises(ConfigError, match="exclude: epochs=3: no configuration of its block sets epochs") as refusal:
        expand(["sweep=mine", "optimizer=adam"], Extension(conf))
    assert "exclude: optimizer=sdg is no choice: did you mean sgd? valid: sgd, " in str(refusal.value)
