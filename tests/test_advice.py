"""What a refusal proposes is taken: each `key=value` that it says to choose composes, and is not refused in turn."""

from __future__ import annotations

import re

import msgspec
import pytest

from launch.sweep import one_run
from launch.sweep.compose import group_choices
from parallelbench.config.check import check_run
from parallelbench.errors import ConfigError
from tests.docs import OPTIMIZERS, model_and_devices

PLAIN = ("data=synthetic", "data.channels=1", "data.train_samples=96", "batch_size=96", "epochs=2", "model=mlp")
TOKENS = ("data=tokens", *PLAIN[2:-1])
REFUSED_BY_SOME = (
    *([f"lr_schedule={name}"] for name in group_choices()["lr_schedule"]),
    *([f"metric={name}"] for name in group_choices()["metric"]),
    *([f"loss={name}"] for name in group_choices()["loss"]),
    *([f"optimizer={name}"] for name in group_choices()["optimizer"]),
    *([f"precision={name}"] for name in ("fp16", "bf16", "fp64")),
    ["clip_norm=1.0"],
    ["batch_size=94"],
    ["batch_size=1"],
    ["compile=true"],
    ["compile=true", "compile_scope=step"],
    ["compile_scope=step"],
    ["graph=true"],
    ["cudnn_benchmark=true"],
    ["optimizer.momentum=0.9", "optimizer=sgd"],
    ["model=cnn", "model.norm=sync", "data.channels=3"],
    ["model=logistic_regression"],
    ["devices=3"],
    ["devices=8"],
)


def alternatives(message: str) -> list[dict[str, str]]:
    """What a refusal proposes: key → value, one mapping for each thing that it says to choose."""
    found = []
    for advice in re.findall(r"choose (.*?)(?=;|\.? ?$|: )", message):
        for each in re.split(r",? or (?=[a-z_.]+=)|, (?=[a-z_.]+=)", advice):
            pairs = dict(re.findall(r"([a-z_]+(?:\.[a-z_]+)*)=([\w.]+\w|\w)", each))
            found += [pairs] if pairs else []
    return found


def refusal(overrides: list[str], devices: int, device_type: str) -> str:
    run = one_run(overrides).run
    if not any(text.startswith("devices=") for text in overrides):
        run = msgspec.structs.replace(run, devices=devices)
    try:
        check_run(run, device_type)
    except ConfigError as error:
        return str(error)
    return ""


def with_choices(overrides: list[str], chosen: dict[str, str]) -> list[str]:
    """The overrides with what is chosen in place of what they say of the same key."""
    groups = tuple(f"{group}." for group in chosen)
    kept = [text for text in overrides if text.partition("=")[0] not in chosen and not text.startswith(groups)]
    return [*kept, *(f"{key}={value}" for key, value in chosen.items())]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", group_choices()["strategy"])
def test_what_a_refusal_proposes_is_taken(strategy: str) -> None:
    device_type = "cuda" if strategy == "data_parallel" else "cpu"
    model, devices = model_and_devices(strategy)
    balance = ["model.balance=0"] if model == "gpt_moe_tiny" else []
    work = PLAIN if model == "mlp" else (*TOKENS, f"model={model}", *balance)
    common = (*work, f"optimizer={OPTIMIZERS.get(strategy, 'adam')}")
    refused = []
    for options in REFUSED_BY_SOME:
        keys = {text.partition("=")[0] for text in options}
        if model != "mlp" and "model" in keys:
            continue  # these are models of images
        plain = [text for text in common if text.partition("=")[0] not in keys]
        overrides = [*plain, f"strategy={strategy}", *options]
        message = refusal(overrides, devices, device_type)
        for chosen in alternatives(message):
            where = chosen.pop("device", device_type)
            if again := refusal(with_choices(overrides, chosen), devices, where):
                refused.append(f"{message!r}, but {chosen} gives {again!r}")
    assert refused == []


def test_proposals_are_found_in_messages() -> None:
    text = "batch_size=1 with x=2 is refused: choose batch_size=91 or 98, or strategy=single devices=1; or see b=3"
    assert alternatives(text) == [{"batch_size": "91"}, {"strategy": "single", "devices": "1"}]
    assert alternatives("clip_norm=1 is refused, or lr=2") == []


def test_some_of_it_is_refused() -> None:
    """Else nothing is proposed, and the test above can't fail."""
    messages = [
        refusal([*PLAIN, "strategy=ddp", *options], 2, "cpu") for options in (["batch_size=95"], ["graph=true"])
    ]
    assert all(alternatives(message) for message in messages), messages
