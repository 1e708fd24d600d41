"""The schema of a run: what it accepts, what it refuses and how it says so, and which run is which."""

from __future__ import annotations

import contextlib
import copy
import types
import typing
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.sweep import one_run
from launch.sweep.compose import compose_plain, group_choices, resolve
from parallelbench.config import sites
from parallelbench.config.build import COMPONENTS, LATER_OPTIONS, from_mapping, to_mapping
from parallelbench.config.identity import canonical_json, run_id, slug
from parallelbench.config.run import RunConfig
from parallelbench.config.sites import LocalLauncher, SlurmLauncher
from parallelbench.config.structure import Component, Name, Node, structure
from parallelbench.errors import ConfigError, one_line
from tests.helpers import configured, plain

BASE = plain() | {"sweep_place": 0, "sweep_baseline": None}
OUTSIDE_IDENTITY = ("results", "launcher", "site", "sweep_name", "sweep_place", "sweep_baseline")

_NEED_NOT_BE_THERE = ("_target_", "sweep_name", "sweep_place", "sweep_baseline")

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
junk = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3),
)


def leaves(node: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if isinstance(node, dict) and node:
        return [leaf for key, value in node.items() for leaf in leaves(value, (*path, key))]
    return [path]


def changed(node: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    result = copy.deepcopy(node)
    here = result
    for part in path[:-1]:
        here = here[part]
    here[path[-1]] = value
    return result


def shuffled(node: Any) -> Any:
    return {key: shuffled(node[key]) for key in reversed(node)} if isinstance(node, dict) else node


# --- round trip and identity


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_every_choice_survives_the_way_to_plain_data_and_back(data: st.DataObject) -> None:
    groups = {group: data.draw(st.sampled_from(group_choices()[group]), group) for group in COMPONENTS}
    run = configured(*(f"{group}={name}" for group, name in groups.items()))
    number = data.draw(st.integers(1, 1_000_000), "number")
    run = from_mapping(to_mapping(run) | {"epochs": number, "seed": number, "batch_size": number})
    again = from_mapping(to_mapping(run))
    assert again == run
    assert run_id(again) == run_id(run)
    assert from_mapping(msgspec.json.decode(canonical_json(to_mapping(run)))) == run
    assert from_mapping(shuffled(to_mapping(run))) == run


def other_values(kind: Any, value: Any) -> list[Any]:
    """Valid values of a field's type that differ from `value`; found from the type alone."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return [option for option in arguments if option != value]
    if origin is typing.Annotated:
        return other_values(arguments[0], value)
    if origin in (typing.Union, types.UnionType):
        return [other for member in arguments for other in other_values(member, value)]
    if kind is bool:
        return [not value]
    if kind in (int, float):
        numbers = [0, 1, 2, 0.25, 3, 100] if kind is float else [0, 1, 2, 3, 4, 8, 100]
        double = 2 * value if value and isinstance(value, int | float) else 8  # "auto" is no number
        return [kind(n) for n in (*numbers, double) if n != value]
    if kind is str:
        return [f"{value or ''}x"]
    if origin in (list, tuple):
        return [*([other] for other in other_values(arguments[0], None)), []]
    if origin is dict:
        return [{"fc1": other} for other in other_values(arguments[1], None)]
    if isinstance(kind, type) and issubclass(kind, Node):
        hints = typing.get_type_hints(kind, include_extras=True)
        each = {name: other_values(hints[name], None) for name in kind.__struct_fields__}
        return [{name: others[min(k, len(others) - 1)] for name, others in each.items()} for k in range(3)]
    return []


def fields(struct: type, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    names = ("Model", "Data", "Strategy", "Optimizer", "LrSchedule", "Loss", "Metric", "Loader")
    hints = typing.get_type_hints(struct, localns=dict.fromkeys(names, Component), include_extras=True)
    found = []
    for name in struct.__struct_fields__:  # type: ignore[attr-defined]
        kind = hints[name]
        if name == "plugin_sources":
            continue  # of a plugin's runs only: tests/launch/test_plugin_sources.py
        if name == "launcher":
            kind = LocalLauncher
        if isinstance(kind, type) and issubclass(kind, Node):
            found += fields(kind, (*path, name)) if not issubclass(kind, Component) else []
        else:
            found.append(((*path, name), kind))
    return found


def accepted(node: dict[str, Any], path: tuple[str, ...], kind: Any) -> RunConfig:
    """The run with another valid value at `path`."""
    here: Any = node
    for part in path:
        here = here[part]
    for value in other_values(kind, here):
        try:
            return from_mapping(changed(node, path, value))
        except ConfigError:
            continue
    raise AssertionError(f"no other valid value of {path} was found: extend other_values")


@pytest.mark.parametrize(
    ("path", "kind"), fields(RunConfig), ids=lambda value: ".".join(value) if isinstance(value, tuple) else ""
)
def test_a_field_changes_the_run_id_unless_it_is_no_part_of_the_experiment(path: tuple[str, ...], kind: Any) -> None:
    base = BASE | {"devices": 8, "nodes": 1}
    other = accepted(base, path, kind)
    outside = path[0] in OUTSIDE_IDENTITY and path not in (("launcher", "oversubscribe"), ("launcher", "pack"))
    outside |= path == ("measure", "probe")
    assert (run_id(other) == run_id(from_mapping(base))) == outside


@pytest.mark.parametrize(
    ("path", "kind"),
    fields(SlurmLauncher, ("launcher",)),
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else "",
)
def test_how_slurm_is_asked_is_no_part_of_the_experiment(path: tuple[str, ...], kind: Any) -> None:
    base = plain("launcher=slurm")
    other = accepted(base, path, kind)
    assert other.launcher != from_mapping(base).launcher
    assert (run_id(other) == run_id(from_mapping(base))) == (path[-1] not in ("oversubscribe", "pack"))


def test_a_run_in_the_calling_process_does_not_pass_for_one_in_processes_of_its_own() -> None:
    inline, local, slurm = (run_id(from_mapping(plain(f"launcher={name}"))) for name in ("inline", "local", "slurm"))
    assert inline != local == slurm


def shipped(*groups: str) -> list[tuple[str, str]]:
    return [(group, name) for group in groups for name in group_choices()[group]]


@pytest.mark.parametrize(("group", "name"), shipped(*COMPONENTS))
def test_every_option_of_a_component_changes_the_run_id(group: str, name: str) -> None:
    node = plain(f"{group}={name}")
    before = run_id(from_mapping(node))
    cls = type(getattr(from_mapping(node), group))
    for (option,), kind in fields(cls):
        if option in cls.names_classes:
            continue  # a class of a user's package: tests/data/test_torch_dataset.py
        assert run_id(accepted(node, (group, option), kind)) != before, option


def test_defaults_said_aloud_are_the_same_run() -> None:
    assert run_id(configured()) == run_id(configured("epochs=5", "data=digits", "results=elsewhere"))
    assert slug(configured()).endswith(run_id(configured())[:8])


def test_whole_numbers_and_decimals_of_one_value_are_one_run() -> None:
    assert run_id(configured("optimizer.lr=1")) == run_id(configured("optimizer.lr=1.0"))


def test_repeats_differ_in_seed_and_identity() -> None:
    first, second = configured("seed=7"), configured("seed=7", "repeat=1")
    assert (first.effective_seed, second.effective_seed) == (7, 8)
    assert run_id(second) != run_id(first) != run_id(configured("seed=8"))


@pytest.mark.parametrize(
    ("scaling", "devices", "batch", "per_step"), [("strong", 4, 128, 128), ("weak", 4, 128, 512), ("weak", 1, 10, 10)]
)
def test_the_global_batch_follows_the_scaling(scaling: str, devices: int, batch: int, per_step: int) -> None:
    run = configured(f"scaling={scaling}", f"devices={devices}", f"batch_size={batch}", "data.name=digits")
    assert run.global_batch_size == per_step
    assert run.steps_per_epoch == run.data.train_samples // per_step
    assert configured("measure.steps_per_epoch=2").steps_per_epoch == 2
    assert configured("measure.steps_per_epoch=1000000").steps_per_epoch == configured().steps_per_epoch


# --- shipped files


# The command of conf/program/command.yaml is the user's: tests/program.
@pytest.mark.parametrize(("group", "name"), shipped(*(group for group in group_choices() if group != "program")))
def test_every_shipped_file_composes_builds_and_bears_its_name(group: str, name: str) -> None:
    node = plain(f"{group}={name}")
    run = from_mapping(node)
    if group == "sweep":
        assert run.sweep_name == name
    elif group != "measure":
        assert getattr(run, group).name == name
        # What reads the files without Hydra finds the same.
        assert sites.shipped(group, name) == resolve(compose_plain([f"{group}={name}"]))[group]


# --- refusals


def refusal(node: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        from_mapping(node)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "parallelbench.errors.ConfigError",
        "parallelbench.config.structure.structure",
        "parallelbench.results.folder.os.system",
        "parallelbench.config.components.Model",
        "parallelbench.models.nothing.Here",
        "parallelbench.models.cnn.Nothing",
        "parallelbench",
        "parallelbenchx.models.cnn.CnnSmall",
        "parallelbench.models.cnn.CnnSmall\n",
        "",
        None,
        ["parallelbench.models.cnn.CnnSmall"],
        {"_target_": "parallelbench.models.cnn.CnnSmall"},
    ],
)
def test_only_components_of_the_suite_are_built(target: Any) -> None:
    message = refusal(changed(BASE, ("model", "_target_"), target))
    assert message.startswith("model._target_=")


@pytest.mark.parametrize("group", COMPONENTS)
def test_a_component_of_another_kind_is_refused(group: str) -> None:
    other = next(key for key in COMPONENTS if key != group)
    assert f"is no {group}" in refusal(BASE | {group: BASE[other]})


@pytest.mark.parametrize("node", [None, 3, "cnn_small", [], {}, {"name": "cnn_small"}])
def test_what_is_no_component_at_all_is_refused(node: Any) -> None:
    assert "choose a file of conf/model/" in refusal(BASE | {"model": node})


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("epochs", True, ["epochs=True", "`int`"]),
        ("epochs", None, ["epochs=None", "`int`"]),
        ("epochs", 10**30, ["epochs=1000000000000000000000000000000"]),
        ("seed", 2**31, ["seed=2147483648"]),
        ("optimizer.lr", 0, ["optimizer.lr=0", "> 0"]),
        ("optimizer.lr", float("inf"), ["optimizer.lr=inf", "finite"]),
        ("optimizer.beta1", 1, ["optimizer.beta1=1", "< 1"]),
        ("sweep_name", "a\n", ["sweep_name='a\\n'"]),
        ("site.name", "a\nb", ["site.name="]),
    ],
)
def test_an_error_names_the_key_the_value_and_the_constraint(path: str, value: Any, words: list[str]) -> None:
    message = refusal(changed(BASE, tuple(path.split(".")), value))
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    "path",
    [p for p in leaves(BASE) if p[-1] not in _NEED_NOT_BE_THERE and ".".join(p) not in LATER_OPTIONS],
    ids=".".join,
)
def test_a_missing_key_is_named(path: tuple[str, ...]) -> None:
    node = copy.deepcopy(BASE)
    here = node
    for part in path[:-1]:
        here = here[part]
    del here[path[-1]]
    assert refusal(node).partition(": add")[0] == f"{'.'.join(path)} is missing"


def test_values_in_lists_and_maps_are_named_by_their_place() -> None:
    mlp = plain("model=mlp", "strategy=model_parallel")
    assert "model.hidden" in refusal(changed(mlp, ("model", "hidden"), [512, "wide"]))
    assert "'wide'" in refusal(changed(mlp, ("model", "hidden"), [512, "wide"]))
    assert "strategy.device_map" in refusal(changed(mlp, ("strategy", "device_map"), {"fc1": -1}))


@pytest.mark.parametrize("name", ["a", "A1", "cnn_small-2.0", "x" * 64])
def test_names_that_are_safe_in_paths_are_accepted(name: str) -> None:
    assert structure(name, Name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-rf", "a b", "a\n", "ä", "x" * 65, "$(id)", "a\x00"])
def test_names_that_are_not_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        structure(name, Name, "name")


@pytest.mark.exhaustive
@settings(deadline=None, max_examples=300)
@given(path=st.sampled_from(leaves(BASE)), depth=st.integers(0, 3), value=junk)
def test_junk_values_are_refused_with_a_config_error_or_accepted(path: tuple[str, ...], depth: int, value: Any) -> None:
    node = changed(BASE, path[: max(1, len(path) - depth)], value)
    with contextlib.suppress(ConfigError):
        run = from_mapping(node)
        assert from_mapping(to_mapping(run)) == run


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(
    path=st.sampled_from([(), ("model",), ("measure",), ("launcher",)]),
    key=st.text(max_size=10) | st.integers(),
    value=junk,
)
def test_junk_keys_are_refused_with_a_config_error(path: tuple[str, ...], key: Any, value: Any) -> None:
    node = changed(BASE, (*path, key), value)
    try:
        from_mapping(node)
    except ConfigError:
        return
    here: Any = BASE
    for part in path:
        here = here[part]
    assert key in here


# --- errors


@given(st.text(), st.integers(2, 50))
def test_one_line_is_one_line_of_limited_length(text: str, limit: int) -> None:
    line = one_line(text, limit)
    assert len(line) <= limit
    assert len(line.splitlines()) <= 1


def test_what_the_environment_holds_is_never_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    with pytest.raises(ConfigError, match=r"oc\.env.* is refused: write the value"):
        one_run(["results=${oc.env:SECRET}"])
    with pytest.raises(ConfigError, match=r"oc\.env"):
        one_run(["site.data_dir=env", "results='${oc.${site.data_dir}:SECRET}'"])
    run = one_run(["results='~/$SECRET'", "site.data_dir=$SECRET/data"]).run
    assert "hunter2" not in str(to_mapping(run))
    assert run.sweep_folder == Path.home() / "hunter2" / "adhoc"
    assert run.site.data_folder == Path("hunter2/data")
