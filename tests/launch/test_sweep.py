"""From a sweep to its runs: which ones, in which order, and what is refused."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from analysis.comparison.ratio import DECIDING_REPEATS
from launch.sweep.compose import NOTHING, Extension, by_hydra, group_choices, resolve, resolved_by_omegaconf
from launch.sweep.expansion import PlannedRun, Point, _set, expand, one_run, points_of
from parallelbench.config.build import from_mapping
from parallelbench.config.identity import run_id
from parallelbench.config.run import RunConfig, SweepBlock
from parallelbench.config.run_rules import check_run
from parallelbench.errors import ConfigError
from parallelbench.results.folder import RunFolder
from tests.faults import fault
from tests.helpers import plain


def points(
    grid: dict[str, Any] | None = None, *, axes: dict[str, list[Any]] | None = None, **rest: Any
) -> list[dict[str, Any]]:
    return list(points_of(SweepBlock(grid=grid or {}, **rest), axes or {}))


@functools.cache
def planned(*overrides: str) -> list[PlannedRun]:
    return expand(overrides)


def described(*overrides: str) -> list[tuple[Any, ...]]:
    return [
        (p.run.data.name, p.run.model.name, p.run.strategy.name, p.run.devices, p.run.epochs, p.run.repeat)
        for p in planned(*overrides)
    ]


# --- blocks


@pytest.mark.slow
def test_what_suits_no_512_devices_is_left_out_with_the_reason() -> None:
    """`plan sweep=gpt_layouts devices=512` plans what a cluster would run."""
    lines: list[str] = []
    words = ["sweep=gpt_layouts", "devices=512", "nodes=128", "launcher=slurm", "site=asu_sol", "sweep.repeats=2"]
    words.append("batch_size=512")
    runs = [planned.run for planned in expand(words, tell=lines.append)]
    strategies = Counter(run.strategy.name for run in runs)
    assert strategies == {"ddp": 2, "zero1": 2, "fsdp": 2, "hsdp": 4, "fsdp_cp": 4, "dp_tp": 8, "context_parallel": 4}
    for run in runs:
        check_run(run, "cuda")
    assert {run.devices for run in runs} == {512}
    left_out = Counter(line.partition(":")[0] for line in lines)
    assert left_out.keys() == {
        f"left out, {name} × 512"
        for name in ("single", "tensor_parallel", "pipeline", "dp_pp", "dp_pp_tp", "context_parallel")
    }
    assert len(lines) == len(set(lines)), "once each, not for every repeat"


def test_on_the_devices_that_a_file_names_nothing_is_left_out() -> None:
    lines: list[str] = []
    assert len(expand(["sweep=gpt_layouts", "sweep.repeats=1"], tell=lines.append)) == 24
    assert lines == []


def test_one_device_is_left_out_of_what_lies_on_several_nodes() -> None:
    lines: list[str] = []
    words = ["sweep=gpt_layouts", "sweep.repeats=1", "launcher=slurm", "site=asu_sol", "nodes=2"]
    assert len(expand(words, tell=lines.append)) == 23
    (line,) = lines
    assert line.startswith("left out, single × 1: devices=1 can't be spread evenly over nodes=2: choose devices=2")
    assert [planned.run.strategy.name for planned in expand([*words, "devices=1", "nodes=1"])] == ["single"]


def test_nodes_follow_from_devices_on_a_cluster_and_their_number_is_what_a_run_is_told_apart_by(tmp_path: Path) -> None:
    words = ("strategy=ddp", "batch_size=64", f"results={tmp_path}")
    on_slurm = ("launcher=slurm", "site=asu_sol")  # four devices a node
    runs = [each.run for each in expand([*words, *on_slurm, "devices=1,2,4,8,16"])]
    assert {run.devices: run.nodes for run in runs} == {1: 1, 2: 1, 4: 1, 8: 2, 16: 4}
    eight = next(run for run in runs if run.devices == 8)
    (named,) = expand([*words, *on_slurm, "devices=8", "nodes=2"])
    (spread,) = expand([*words, *on_slurm, "devices=8", "nodes=8"])
    (here,) = expand([*words, "devices=8"])
    assert run_id(eight) == run_id(named.run)
    assert here.run.nodes == 1
    assert len({run_id(run) for run in (eight, spread.run, here.run)}) == 3
    folder = RunFolder.of(eight)
    folder.write_intent(eight, [])
    assert folder.config().nodes == 2


def strategies(*overrides: str) -> tuple[list[tuple[str, int]], list[str]]:
    """Strategy and devices of each run, and what was told."""
    lines: list[str] = []
    runs = [planned.run for planned in expand([*overrides, "sweep.order=listed"], tell=lines.append)]
    return [(run.strategy.name, run.devices) for run in runs], lines


def test_on_one_device_the_frameworks_own_strategy_stands_for_those_that_need_several() -> None:
    found, lines = strategies("strategy=ddp,zero1,parameter_server,pipeline,dp_tp,hsdp,data_parallel", "devices=1,4")
    assert found.count(("single", 1)) == 1
    assert [devices for name, devices in found if name != "single"] == [4] * 7
    assert len(lines) == 1
    assert "single" in lines[0]
    assert all(name in lines[0] for name, _ in found)
    words = ["strategy=tf_multi_worker,tf_parameter_server", "strategy.xla=true", "devices=1,3"]
    found, lines = strategies(*words[1:], "strategy=tf_multi_worker")
    assert found == [("tf_single", 1), ("tf_multi_worker", 3)]
    assert len(lines) == 1
    runs = expand(["strategy=tf_multi_worker", "strategy.xla=true", "devices=1,3", "sweep.order=listed"])
    assert [each.run.strategy.xla for each in runs] == [True, True], "what both have stays asked for"  # type: ignore[attr-defined]
    assert strategies("strategy=tf_parameter_server", "devices=1,3")[0][0] == ("tf_single", 1)


@pytest.mark.parametrize("override", ["compile=true", "precision=bf16", "launcher.pack=true"])
def test_a_strategy_that_is_refused_for_something_else_is_refused_on_one_device_too(override: str) -> None:
    blocks = "sweep.blocks=[{grid:{strategy:[single,tf_single],devices:1}}]"
    found, lines = strategies(blocks, override)
    assert (found, lines) == ([("single", 1), ("tf_single", 1)], [])
    found, lines = strategies(blocks, override, "sweep.unfit=left_out")
    assert found == [("single", 1)]
    assert [line.partition(":")[0] for line in lines] == ["left out, tf_single × 1"]


@pytest.mark.parametrize(("least", "names"), [(1, ["mine", "mine"]), (2, ["single", "mine"])])
def test_a_plugins_strategy_for_gpus_is_asked_about_the_device_that_it_will_have(
    in_it: Path, least: int, names: list[str]
) -> None:
    source = in_it / "mystrategies" / "__init__.py"
    source.write_text(f"""{source.read_text()}
    def rules(self, run, device_type):
        if device_type != "cuda":
            yield True, "mine needs GPUs", ("device",)
            return
        yield run.devices < {least}, "mine needs more of them", ("devices",)
""")
    mine, blocks = Extension(in_it / "conf", "mystrategies"), "sweep.blocks=[{grid:{strategy:mine,devices:[1,2]}}]"
    for device in ("device=cuda", "launcher=slurm"):  # whose devices are GPUs by default
        assert [each.run.strategy.name for each in expand([blocks, device, "sweep.order=listed"], mine)] == names
    runs = expand([blocks, "device=cpu"], mine)
    assert [each.run.strategy.name for each in runs] == ["mine", "mine"]
    with pytest.raises(ConfigError, match="mine needs GPUs"):
        check_run(runs[0].run, "cpu")


@pytest.mark.parametrize("strategy", ["context_parallel", "fsdp_cp"])
def test_a_strategy_is_asked_only_about_data_that_its_model_takes(strategy: str) -> None:
    words = ["model=gpt_tiny", "data=synthetic", f"strategy={strategy}", "devices=1,2"]
    assert strategies(*words) == ([(strategy, 1), (strategy, 2)], [])
    with pytest.raises(ConfigError, match=r"left out, .* × 2: model=gpt_tiny takes tokens, but data=synthetic holds"):
        expand([*words, "sweep.unfit=left_out"])


def test_what_another_choice_refuses_is_left_out_like_what_the_strategy_does() -> None:
    found, lines = strategies("model=mlp,gpt_tiny", "sweep.unfit=left_out")
    assert found == [("single", 1)]
    assert len(lines) == 1
    assert lines[0].startswith("left out, single × 1: model=gpt_tiny takes tokens")


def test_set_up_lines_refuse_the_sweep_also_where_what_does_not_fit_is_left_out() -> None:
    with pytest.raises(ConfigError, match=r"^site\.setup=.* is refused"):
        expand(["strategy=ddp", "devices=2", "sweep.unfit=left_out", "site.setup=[touch /tmp/x]"])


def test_where_nothing_suits_the_sweep_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sweep=adhoc has no configuration that fits:\nleft out, single × 2: "):
        expand(["strategy=single", "devices=2", "sweep.unfit=left_out"])


def test_unless_a_sweep_says_so_nothing_is_left_out() -> None:
    lines: list[str] = []
    runs = expand(["strategy=single,ddp", "devices=2"], tell=lines.append)
    assert ([planned.run.strategy.name for planned in runs], lines) == (["single", "ddp"], [])


@pytest.mark.parametrize("zipped", [{"a": [1, 2], "b": [1]}, {"a": [], "b": [1]}])
def test_unequal_zips_are_refused(zipped: dict[str, list[int]]) -> None:
    with pytest.raises(ConfigError, match="equally long"):
        points(zip=zipped)


@settings(deadline=None)
@given(
    grid=st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True)),
    rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3, unique=True),
)
def test_a_block_is_the_product_of_its_grid_and_its_zip(
    grid: dict[str, list[int]], rows: list[tuple[int, int]]
) -> None:
    side = {"x": [row[0] for row in rows], "y": [row[1] for row in rows]}
    expected = {
        tuple(sorted((dict(zip(grid, combination, strict=True)) | {"x": x, "y": y}).items()))
        for combination in itertools.product(*grid.values())
        for x, y in rows
    }
    found = [tuple(sorted(point.items())) for point in points(dict(grid), zip=side)]
    assert set(found) == expected
    assert len(found) == len(expected)


# --- sweeps


def test_a_choice_list_on_the_command_line_is_a_sweep() -> None:
    runs = described("model=cnn_small,mlp", "strategy=ddp", "devices=2,4", "epochs=1")
    assert sorted(runs) == [
        ("digits", model, "ddp", devices, 1, 0) for model in ("cnn_small", "mlp") for devices in (2, 4)
    ]


def test_a_key_on_the_command_line_replaces_the_files_values_and_a_list_adds_an_axis() -> None:
    assert {run[1] for run in described("sweep=demo", "model=mlp")} == {"mlp"}
    assert {run[3] for run in described("sweep=demo", "devices=4")} == {4}
    assert len(described("sweep=demo", "strategy=ddp")) == 16, "ddp with 1 and 2 devices, eight times"
    assert {run[4] for run in described("sweep=demo", "epochs=1,2")} == {1, 2}
    assert len(described("sweep=demo", "epochs=1,2")) == 48
    assert len(described("sweep=demo", "batch_size=64,128,256")) == 72


def test_duplicates_collapse() -> None:
    assert len(described("epochs=1,1,2")) == 2
    assert len(described("sweep=demo", "strategy=single", "devices=1")) == 8


def test_options_of_a_group_file_that_only_the_list_chooses() -> None:
    runs = expand(["model=resnet50,resnet_tiny", "model.norm=sync"])
    assert [each.run.model.norm for each in runs] == ["sync", "sync"]  # type: ignore[attr-defined]


def test_references_follow_the_axis() -> None:
    runs = expand(["devices=1,2,4", "epochs=${devices}", "sweep.order=listed"])
    assert [(p.run.devices, p.run.epochs) for p in runs] == [(1, 1), (2, 2), (4, 4)]


SIMPLE = ["${devices}", "${optimizer.lr}", "a-${model.name}-${devices}", "${devices}${epochs}", "$x/${results}"]
ODD = ["${optimizer}", "${.lr}", "${..epochs}", "${${results}}", "${oc.select:nowhere,3}", "\\${x}", "a\\\\${results}"]
BAD = ["${nowhere}", "${", "???"]
OTHERS = ["{${results}}", "devices", "", 1, 2.5, True, None, [1], {"a": 1}, ["${devices}", 2], {"a": "${epochs}"}]
VALUES = st.sampled_from([*SIMPLE, *ODD, *BAD, *OTHERS])
KEYS = st.sampled_from(
    [
        *("devices", "epochs", "results", "optimizer.lr", "optimizer"),
        *("site", "site.partition", "site.setup", "model.name"),
    ]
)


def outcome_of(resolving: Callable[[], Any]) -> str:
    """What it returns, or the start of the refusal: how deep a recursion went is chance."""
    try:
        return repr(resolving())  # 1 is not True
    except ConfigError as error:
        return str(error)[:40]


@pytest.mark.exhaustive
@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(st.dictionaries(KEYS, VALUES, max_size=3))
def test_references_lead_where_omegaconf_leads_them(point: Point) -> None:
    changed = dict(plain())
    for key, value in point.items():
        with contextlib.suppress(ConfigError):  # one key within another that is no map any more
            _set(changed, key, value)
    assert outcome_of(lambda: resolve(changed)) == outcome_of(lambda: resolved_by_omegaconf(changed))


# --- order


def order_of(repeat: int, *overrides: str) -> list[int]:
    return [
        p.run.epochs for p in planned("epochs=1,2,3,4,5,6,7,8", "sweep.repeats=4", *overrides) if p.run.repeat == repeat
    ]


def test_interleaved_repeats_are_permutations_of_their_own_one_after_the_other() -> None:
    plan = expand(["epochs=1,2,3,4,5,6,7,8", "sweep.repeats=4"])
    assert [p.run.repeat for p in plan] == [repeat for repeat in range(4) for _ in range(8)]
    orders = [order_of(repeat) for repeat in range(4)]
    assert all(sorted(order) == list(range(1, 9)) for order in orders)
    assert (orders[1], orders[3]) == (orders[0][::-1], orders[2][::-1])
    assert orders[2] not in orders[:2]
    assert orders == [order_of(repeat) for repeat in range(4)], "the same every time"
    assert orders != [order_of(repeat, "sweep.name=other") for repeat in range(4)]


def test_every_configuration_comes_before_every_other_as_often_as_after_it() -> None:
    """Anybody's two configurations, too, and repeats that are submitted one by one."""
    asked = ["strategy=fsdp,ddp", "devices=2", "model=mlp", "data=digits"]
    whole = [(p.run.strategy.name, p.run.repeat) for p in expand([*asked, "sweep.repeats=6"])]
    firsts = [name for name, _ in whole[::2]]
    assert firsts.count("ddp") == 3
    one_by_one = [p for repeat in range(6) for p in expand([*asked, f"repeat={repeat}"])]
    assert [(p.run.strategy.name, p.run.repeat) for p in one_by_one] == whole
    by_key = expand([*asked, "repeat=0,1,2,3,4,5"])
    assert [(p.run.strategy.name, p.run.repeat) for p in by_key] == whole


def test_shipped_sweeps_have_repeats_enough_for_a_verdict() -> None:
    """But those that are as a publication did it, once, and the one of a single run."""
    repeats = {name: expand([f"sweep={name}"])[-1].run.repeat + 1 for name in group_choices()["sweep"]}
    once = {name for name, count in repeats.items() if count == 1}
    assert once == {"adhoc", "asu_data_parallel_faithful", "asu_model_parallel_faithful"}
    assert {count % 2 for name, count in repeats.items() if name not in once} == {0}, "rounds come in pairs"
    assert min(count for name, count in repeats.items() if name not in once) >= DECIDING_REPEATS


def test_listed_is_as_written() -> None:
    assert [order_of(repeat, "sweep.order=listed") for repeat in (0, 3)] == [list(range(1, 9))] * 2


def test_repeats_share_their_seed_across_configurations() -> None:
    by_repeat = {(p.run.repeat, p.run.effective_seed) for p in expand(["sweep=demo", "seed=5"])}
    assert by_repeat == {(repeat, repeat + 5) for repeat in range(8)}


def test_repeats_go_on_from_the_one_asked_for() -> None:
    assert sorted(p.run.repeat for p in expand(["repeat=3", "sweep.repeats=2"])) == [3, 4]


# --- the short way equals the long way


def composed_in_full(planned: PlannedRun, extension: Extension = NOTHING) -> RunConfig:
    plain = resolve(by_hydra(planned.overrides, extension.conf))
    sweep = plain.pop("sweep")
    of_sweep = {"sweep_name": sweep["name"], "sweep_baseline": sweep["baseline"]}
    return from_mapping(plain | of_sweep | {"sweep_place": planned.run.sweep_place})


def some_of(key: str, *choices: str) -> st.SearchStrategy[str]:
    chosen = st.lists(st.sampled_from(choices), min_size=1, max_size=2, unique=True)
    return chosen.map(lambda names: f"{key}={','.join(names)}")


def one_of(key: str, *choices: str) -> st.SearchStrategy[str]:
    return st.sampled_from(choices).map(lambda name: f"{key}={name}")


sweeps = st.lists(
    st.one_of(
        some_of("model", "cnn_small", "mlp", "vit_tiny", "resnet_tiny", "logistic_regression"),
        some_of("strategy", "ddp", "fsdp", "pipeline", "dp_pp", "parameter_server", "downpour"),
        some_of("optimizer", "sgd", "adam", "lbfgs"),
        some_of("data", "digits", "mnist", "synthetic"),
        some_of("measure", "default", "debug"),
        one_of("launcher", "local", "slurm"),
        one_of("launcher.timeout_s", "null", "1", "2.5"),
        some_of("optimizer.lr", "0.1", "1e-3", "'0.1'", "range(1,3)", "1"),
        some_of("measure.steps_sampled", "3", "${epochs}"),
        some_of("model.name", "renamed", "'a b'"),
        some_of("channels_last", "true", "false"),
        some_of("++strategy.name", "renamed"),
        some_of("sweep.order", "listed"),
        one_of("results", "'x,y'", "a b"),
    ),
    max_size=6,
    unique_by=lambda text: text.partition("=")[0],
)


@pytest.mark.exhaustive
@pytest.mark.slow
@settings(deadline=None, max_examples=12, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(sweeps, st.randoms(use_true_random=False))
def test_any_run_of_any_sweep_is_what_hydra_composes(overrides: list[str], draw: random.Random) -> None:
    try:
        plan = expand([*overrides, "devices=2"])
    except ConfigError:
        return
    for each in draw.sample(plan, min(3, len(plan))):
        assert composed_in_full(each) == each.run


@pytest.mark.parametrize("by_hydra", [False, True])
def test_a_sweep_file_may_say_no_more_than_its_blocks(tmp_path: Path, *, by_hydra: bool) -> None:
    """`by_hydra`: a file that only Hydra composes."""
    (tmp_path / "sweep").mkdir()
    first = "# @package sweep\n" if by_hydra else ""
    (tmp_path / "sweep" / "mine.yaml").write_text(f"{first}blocks: [{{grid: {{batch_size: [32, 64]}}}}]\n")
    mine = Extension(conf=tmp_path)
    assert [(each.run.sweep_name, each.run.repeat) for each in expand(["sweep=mine"], mine)] == [("mine", 0)] * 2
    given = expand(["sweep=mine", "sweep.repeats=3", "sweep.name=own"], mine)
    assert (len(given), {each.run.sweep_name for each in given}) == (6, {"own"})


def test_a_grid_outside_a_block_is_told_where_it_stands(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "mine.yaml").write_text("grid: {batch_size: [32, 64]}\nexclude: []\n")
    with pytest.raises(ConfigError, match=r"write `blocks: \[{grid: …, exclude: …}\]`"):
        expand(["sweep=mine"], Extension(conf=tmp_path))


def test_runs_share_no_node_that_another_changed() -> None:
    plan = expand(["model=mlp,cnn_small", "optimizer.lr=1,2", "measure.steps_sampled=3,4", "sweep.order=listed"])
    found = [(p.run.model.name, p.run.optimizer.lr, p.run.measure.steps_sampled) for p in plan]
    assert found == list(itertools.product(("mlp", "cnn_small"), (1, 2), (3, 4)))


def test_the_overrides_of_a_run_make_it_again() -> None:
    for each in expand(["epochs=1,2", "strategy=ddp", "devices=2", "sweep.repeats=2"]):
        overrides = [text for text in each.overrides if not text.startswith("sweep.repeats")]
        assert run_id(one_run(overrides).run) == run_id(each.run)


# --- refusals


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        expand(overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@fault(
    "numbers",
    "A sweep over what says where runs take place",
    injection="lists of launchers, sites, folders and names of sweeps, typed or in a sweep's blocks",
    outcome="refused: no result would tell the runs apart; a value with a comma is to be quoted",
)
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        *[
            ([f"{key}={values}"], f"{key}={values} can't be swept")
            for key, values in (
                ("launcher", "inline,local"),
                ("launcher.timeout_s", "1,2"),
                ("site.partition", "1,a b"),
                ("results", "/data/a,b"),
                ("sweep.name", "a,b"),
            )
        ],
        (["results=/data/a,b"], """quote it: 'results="/data/a,b"'"""),
        (["sweep.blocks=[{grid:{launcher:[inline,local]}}]"], "launcher=inline,local can't be swept"),
        (["sweep.blocks=[{zip:{results:[a,b],epochs:[1,2]}}]"], "results=a,b can't be swept"),
        (["sweep.blocks=[{grid:{launcher:inline}},{grid:{epochs:2}}]"], "blocks of the sweep give launcher"),
        (
            ["sweep.blocks=[{grid:{site:a100_80gb}},{grid:{site:h100_80gb,epochs:[5,6]}}]"],
            "blocks of the sweep give site differently",
        ),
        (["sweep.blocks=[{grid:{launcher.timeout_s:5}},{grid:{epochs:[5,6]}}]"], "blocks of the sweep give launcher"),
        (["sweep.blocks=[{grid:{measure.probe:[true,false]}}]"], "blocks of the sweep give measure"),
    ],
)
def test_places_are_not_swept(overrides: list[str], words: str) -> None:
    assert words in refusal(*overrides)


@pytest.mark.parametrize(
    ("overrides", "beginnings"),
    [
        (
            ["epohcs=1", "optimizer.lrr=1,2", "sitee=default", "seed=1"],
            ["epohcs is not a key: did you mean epochs?", "sitee is not a key", "optimizer.lrr is not a key"],
        ),
        (
            ["model=cnn_smal", "data=mnits", "epochs", "~seed", "strategy=ddp"],
            ["model=cnn_smal is no", "data=mnits is no", "can't read the override 'epochs'", "~seed would delete"],
        ),
        (
            ["model=gpt_tiny", "model.width=63", "strategy=ddp", "strategy.bucket_mib=0", "epochs=many", "nodes=0"],
            ["model.width=63", "strategy.bucket_mib=0", "nodes=0", "epochs='many'"],
        ),
        (
            ["optimizer.lr=-1,0.1,x", "epochs=1,y", "sweep.order=listed"],
            ["optimizer.lr=-1", "epochs='y'", "optimizer.lr='x'"],
        ),
        (
            ["strategy=ddp,fsdp", "strategy.bucket_mib=1,0", "sweep.order=listed"],
            ["strategy.bucket_mib=0", "strategy.bucket_mib is not a key of strategy=fsdp"],
        ),
    ],
)
def test_all_that_is_certain_is_refused_at_once(overrides: list[str], beginnings: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        expand(overrides)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(beginnings)
    for line, beginning in zip(lines, beginnings, strict=True):
        assert line.startswith(beginning)


def test_blocks_may_limit_their_own_runs() -> None:
    blocks = "sweep.blocks=[{grid:{launcher.timeout_s:5}},{grid:{epochs:[6,7]}}]"
    assert [each.run.launcher.timeout_s for each in expand([blocks, "sweep.order=listed"])] == [5, None, None]


KEYS_TYPED = ["epochs", "model", "model.norm", "sweep", "optimizer.lr", "results", "a", "a/b", "m@y"]
VALUES_TYPED = ["1", "cnn_small", "[1,2]", "{a:1}", "null", "1,2", "range(1,3)", "${epochs}", "nan", "x y", ""]
keys = st.sampled_from([*KEYS_TYPED, "~model", "+x", "++epochs"])
values = st.sampled_from([*VALUES_TYPED, "${", "{", "'", "\\"])


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.builds("{}{}{}".format, keys, st.sampled_from(["=", "", "=="]), values) | st.text(max_size=6), max_size=2
    )
)
def test_whatever_is_typed_is_expanded_or_refused_with_a_config_error(overrides: list[str]) -> None:
    plan, refused = [], ""
    try:
        plan = expand(overrides)
    except ConfigError as error:
        refused = str(error)
    least, most = (0, 0) if plan else (1, max(1, len(overrides)))
    assert least <= len(refused.splitlines()) <= most
    assert len({run_id(planned.run) for planned in plan}) == len(plan)


# --- what a sweep's file excludes is there


def excluding(folder: Path, exclude: str) -> Path:
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


def of_first_block(conf: Path, *words: str) -> list[str]:
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
        expand(["sweep=mine"], Extension(excluding(tmp_path, exclude)))
    message = str(refusal.value)
    assert message.count("sweep=mine: exclude: ") == (2 if "}, {" in exclude else 1)
    assert all(text in message for text in said), message


def test_what_is_there_is_left_out(tmp_path: Path) -> None:
    conf = excluding(tmp_path, "[{strategy: ddp, batch_size: 64}, {devices: 1}, {strategy: single, devices: 2}, {}]")
    assert of_first_block(conf) == ["fsdp", "ddp", "fsdp"]


def test_what_only_the_command_line_narrowed_is_no_error(tmp_path: Path) -> None:
    conf = excluding(tmp_path, "[{strategy: ddp}, {batch_size: 64}]")
    assert of_first_block(conf, "strategy=single", "devices=1") == ["single"]
    assert of_first_block(conf, "strategy=single,fsdp", "devices=2", "batch_size=64,128") == ["single", "fsdp"]


def test_a_key_of_the_command_line_may_have_any_value_that_can_be(tmp_path: Path) -> None:
    conf = excluding(tmp_path, "[{epochs: 3, strategy: ddp}, {optimizer: sdg}]")
    with pytest.raises(ConfigError, match="exclude: epochs=3: no configuration of its block sets epochs") as refusal:
        expand(["sweep=mine", "optimizer=adam"], Extension(conf))
    assert "exclude: optimizer=sdg is no choice: did you mean sgd? valid: sgd, " in str(refusal.value)
