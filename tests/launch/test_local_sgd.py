"""docs/adding-a-strategy.md, done: Local SGD in a user's own folder, proven against its own reference on one device."""

from __future__ import annotations

import functools
import json
import shlex
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import polars as pl
import pytest

from launch.sweep import one_run
from launch.sweep.compose import Extension
from parallelbench.config.run_rules import check_run
from parallelbench.errors import ConfigError
from parallelbench.training.checks.comparability import as_reference, rounding
from parallelbench.training.checks.copies import Copies
from parallelbench.training.checks.parity import as_checked, checks_parity, parity_reference
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.helpers import TINY
from tests.launch.conftest import written_as_in
from tests.launch.programs import program
from tests.ranks import run_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "adding-a-strategy.md").read_text()
SMALL = ["strategy=local_sgd", "devices=2", "strategy.every=2"]


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """The folder that the page describes."""
    return written_as_in(PAGE, tmp_path)


@pytest.fixture
def own(in_it: Path) -> Extension:
    """The same, as this process imports it."""
    return Extension(in_it / "conf", "mystrategies")


def test_it_is_checked_against_its_own_reference_for_a_step_more_than_it_takes_to_average(own: Extension) -> None:
    run = one_run([*TINY, *SMALL, "strategy.every=5"], own).run
    check_run(run, "cpu")
    assert checks_parity(run)
    assert parity_reference(run) == "mystrategies.AllCopies"
    assert rounding(run) is None, "its losses are not those of one device"
    checked = as_checked(run)
    assert checked.measure.parity_steps == 6
    assert as_checked(one_run([*TINY, *SMALL], own).run).measure.parity_steps == 3, "as asked for"
    reference = as_reference(checked)
    assert (reference.devices, reference.strategy.name, reference.batch_size) == (1, "all_copies", checked.batch_size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["devices=1"], "needs two devices"),
        (["batch_size=31"], "can't be divided into 2 equal parts"),
        (["model=cnn", "data.channels=3", "data.image_size=32", "model.norm=batch"], "choose model.norm=group"),
    ],
)
def test_what_can_not_work_is_refused(own: Extension, options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_run(one_run([*TINY, *SMALL, *options], own).run, "cpu")


def test_what_a_copy_says_of_other_ranks_has_the_form_that_the_check_of_copies_wants(own: Extension) -> None:
    run = one_run([*TINY, *SMALL], own).run
    world = World()
    replica = run.strategy.prepare(build_model(run), run, world)
    Copies(replica, run, world)
    assert replica.copied() == {}, "no rank holds what another one does"


# --- the gate on two ranks: the page's code passes, and each mistake in it is found


def later(replica: Any) -> None:
    replica._every += 1


def earlier(replica: Any) -> None:
    replica._every -= 1


def never(replica: Any) -> None:
    replica._take = lambda values: None


def from_rank_0(replica: Any) -> None:
    """All take the first rank's copy: a broadcast."""
    world = replica._world

    def first(tensors: Any) -> Any:
        return {name: world.sum(value.detach() * (world.rank == 0)) for name, value in tensors.items()}

    take = replica._take
    replica._take = lambda _: take(first(dict(replica._module.named_parameters())))


def sum_of_all(replica: Any) -> None:
    mean, size = replica._means, replica._world.size
    replica._means = lambda tensors: {name: size * value for name, value in mean(tensors).items()}


def forgets_the_last(replica: Any) -> None:
    """One parameter is not averaged."""
    take = replica._take

    def most(values: Any) -> None:
        named = dict(replica._module.named_parameters())
        last = list(named)[-1]
        take({**values, last: named[last]})

    replica._take = most


MISTAKES = (later, earlier, never, from_rank_0, sum_of_all, forgets_the_last)


def gates(rank: int, size: int, me: str, *choices: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of the parity check on rank 0, of the page's code and of each mistake."""
    sys.path.insert(0, me)
    import mystrategies.replicas

    from parallelbench.training.checks.before_training import check_parity
    from parallelbench.training.torch_session import build_loader, build_model
    from parallelbench.world.world import World

    extension = Extension(Path(me) / "conf", "mystrategies")
    run = one_run([*TINY, *SMALL, *choices, "strategy.every=2"], extension).run
    checked, world = as_checked(run), World(rank=rank, size=size, local_rank=rank)
    arrays = run.data.load(Path("nowhere"))
    prepare, rows = type(run.strategy).prepare, {}
    for mistake in (None, *MISTAKES):

        def wrong(self: Any, *arguments: Any, mistake: Any = mistake) -> Any:
            replica = prepare(self, *arguments)
            assert isinstance(replica, mystrategies.replicas.OneCopy)
            if mistake is not None:
                mistake(replica)
            return replica

        loader_of = functools.partial(_loader_of, build_loader, arrays, world)
        name = "right" if mistake is None else mistake.__name__
        with patch.object(type(run.strategy), "prepare", wrong):  # the process goes on to the next case
            rows[name] = check_parity(build_model(checked), checked, world, loader_of) or []
    return rows


def _loader_of(build_loader: Any, arrays: Any, world: Any, run: Any, shard: Any) -> Any:
    return build_loader(arrays, run, world, shard)


@pytest.mark.cases("mse")
@pytest.mark.slow
@pytest.mark.parametrize(
    "choices", [("optimizer=sgd",), ("optimizer=adam",), ("optimizer=sgd", "loss=mse")], ids=["sgd", "adam", "mse"]
)
def test_two_ranks_equal_all_copies_on_one_device_and_every_mistake_is_found(
    user: Path, tmp_path: Path, choices: tuple[str, ...]
) -> None:
    rows = run_ranks(gates, 2, tmp_path, str(user), *choices)[0]
    passed = {name: [row["passed"] for row in steps] for name, steps in rows.items()}
    assert passed.pop("right") == [True] * 3
    assert {name: all(steps) for name, steps in passed.items()} == {each.__name__: False for each in MISTAKES}
    assert passed["later"] == [True, True, False], "the step after the one without a mean shows it"
    assert passed["earlier"][:2] == [True, False], "a mean after step 1 shows in step 2"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_pages_commands_train_it_and_say_what_it_was_held_against(user: Path) -> None:
    commands = [shlex.split(line) for line in PAGE.splitlines() if line.startswith("parallelbench ")]
    assert [command[1] for command in commands] == ["show", "submit", "submit", "report"]
    for _, *arguments in commands:
        quick = ["launcher.oversubscribe=true", "epochs=2", "measure.probe=false"]
        more = quick if arguments[0] == "submit" else []
        done = program(user, *arguments, *more)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout
    (manifest,) = (user / "results" / "adhoc").glob("*local_sgd*/result/manifest.json")
    outcome = json.loads(manifest.read_text())["outcome"]
    assert outcome["outcome"] == "ok"
    assert "parity was checked against the strategy's own reference, AllCopies, not one device" in outcome["reason"]
    tables = user / "results" / "report" / "tables"
    (mine,) = pl.read_csv(tables / "configurations.csv").filter(pl.col("strategy") == "local_sgd").to_dicts()
    assert (mine["outcomes"], mine["parity"]) == ("1 ok", "1 of 1, by the author's own reference")
    (run,) = pl.read_csv(tables / "runs.csv").filter(pl.col("strategy") == "local_sgd").to_dicts()
    assert run["parity_reference"] == "mystrategies.AllCopies"
    page = (user / "results" / "report" / "index.html").read_text()
    assert "checked against the strategy&#39;s own reference" in page or "checked against the strategy's own" in page
