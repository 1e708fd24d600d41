"""docs/adding-a-model.md, done: a user's own model and data set, from the user's own folder."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from launch.checks import check_data
from launch.sweep import expand, one_run
from launch.sweep.compose import Extension
from launch.verbs import run as verb
from parallelbench.cli import main
from parallelbench.config.dataset_check import checked
from parallelbench.config.run_rules import check_run
from parallelbench.errors import ConfigError
from parallelbench.results.folder import RunFolder
from parallelbench.training.checks.components import check_scores
from tests.launch.conftest import written_as_in
from tests.launch.programs import program

PAGE = (Path(__file__).parents[2] / "docs" / "adding-a-model.md").read_text()
OWN = ["model=wide", "data=shapes", "site.data_dir=data"]
TWO = ["strategy=ddp", "devices=2", "launcher.oversubscribe=true", "measure.probe=false", "measure.telemetry_hz=0"]
"""Two ranks, whose machine nobody asks for."""


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """The folder that the page describes, and the arrays."""
    (tmp_path / "data").mkdir()
    draw = np.random.default_rng(0)
    parts = {"train": 96, "test": 32}
    np.savez(
        tmp_path / "data" / "shapes.npz",
        **{f"{part}_images": draw.integers(0, 256, (n, 1, 8, 8), dtype=np.uint8) for part, n in parts.items()},
        **{f"{part}_labels": draw.integers(0, 4, n) for part, n in parts.items()},
    )
    return written_as_in(PAGE, tmp_path)


@pytest.mark.parametrize("verb", ["plan", "prepare"])
def test_a_missing_file_that_prepare_does_not_make_is_named_with_its_place(
    verb: str, in_it: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (in_it / "data" / "shapes.npz").unlink()
    assert main([verb, "--conf", "conf", "--plugin", "mine", *OWN, "batch_size=32"]) == 2
    said = "".join("".join(capsys.readouterr()).split())  # a plan is folded at the width of the terminal
    message = (
        f"data=shapes: shapes.npz missing in {in_it / 'data'}; `parallelbench prepare` does not make it: "
        "write it there, or choose the folder that has it with site.data_dir=DIR"
    )
    assert message.replace(" ", "") in said


def test_data_of_ones_own_that_prepare_makes_needs_the_options_of_the_command(
    user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(user)
    text = resources.files("conf").joinpath("data", "mnist.yaml").read_text().replace("name: mnist", "name: mine_too")
    (user / "conf" / "data" / "mine_too.yaml").write_text(text)
    for name, advice in (("mine_too", "with the --conf and --plugin of this command"), ("mnist", "")):
        run = one_run([f"data={name}", "site.data_dir=data"], Extension(user / "conf")).run
        with pytest.raises(ConfigError, match=rf"`parallelbench prepare data={name} site.data_dir=\S+`\s?{advice}$"):
            check_data(run)


@pytest.mark.slow
def test_data_of_runs_on_other_machines_are_not_read_beforehand(in_it: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = in_it / "mine" / "__init__.py"
    code.write_text(code.read_text().replace("return 1, 8, 8", "return 1, 9, 9"))
    (planned,) = expand([*OWN, "batch_size=32"], Extension(in_it / "conf", "mine"))
    prepared: Any = SimpleNamespace(planned=planned, folder=RunFolder(in_it / "results" / "one"))
    for here in (False, True):
        monkeypatch.setattr(verb, "launcher_of", lambda _, here=here: SimpleNamespace(trains_here=here))
        with pytest.raises(ConfigError, match="not \\(96, 1, 9, 9\\)") if here else nullcontext():
            verb._check_own_parts([prepared], frozenset())


@pytest.mark.slow
def test_the_pages_model_and_data_are_a_run(in_it: Path) -> None:
    own = Extension(in_it / "conf", "mine")
    run = one_run([*OWN, "batch_size=32", "strategy=tensor_parallel", "devices=2"], own).run
    check_run(run, "cpu")
    assert run.data.missing_files(run.site.data_folder) == []
    arrays = checked(run.data, run.data.load(run.site.data_folder))
    assert arrays.train_images.shape == (96, *run.data.shape)
    model = run.model.build(in_channels=1, image_size=8, num_classes=run.data.num_classes)
    assert tuple(name for name, _ in model.named_children()) == run.model.layer_names
    own_loss = one_run([*OWN, "loss=hinge", "lr_schedule=halves", "batch_size=32", "epochs=2"], own).run
    check_run(own_loss, "cpu")
    assert [own_loss.rate_factor(step) for step in range(1, 8)] == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 1.0]
    near = one_run([*OWN, "metric=near", "batch_size=32"], own).run
    check_scores(near, "cpu")
    assert near.metric.value(near.metric.build()(torch.eye(4), torch.tensor([1, 3, 2, 0])).tolist()) == 0.5
    logits, labels = torch.tensor([[2.0, 0.0, 0.5], [0.0, 0.5, 0.0]]), torch.tensor([0, 2])
    assert own_loss.loss.build()(logits, labels).item() == pytest.approx(((0 + 0) / 3 + (1 + 1.5) / 3) / 2)
    for key, found in (("train_samples", 96), ("test_samples", 32)):
        other = one_run([*OWN, f"data.{key}=192"], own).run
        with pytest.raises(ConfigError, match=rf"images have shape \({found}, 1, 8, 8\), not .* by {key}=192"):
            checked(other.data, other.data.load(Path("data")))


@pytest.mark.slow
def test_the_pages_commands_train_it_on_two_ranks_like_one_device(
    in_it: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [shlex.split(line) for line in PAGE.splitlines() if line.startswith("parallelbench ")]
    assert [command[1] for command in commands] == ["init", "show", "submit", "report", "run"]
    for _, *arguments in commands[:4]:
        more = ["launcher.oversubscribe=true", "measure.probe=false"] if arguments[0] == "submit" else []
        assert main([*arguments, *more]) == 0
        printed = capsys.readouterr()
        assert printed.err == ""
    assert "ddp × 2" in printed.out


RUN = next(shlex.split(line)[1:] for line in PAGE.splitlines() if line.startswith("parallelbench run"))
"""The page's torch data set, in one line."""
LIKE_ONE_DEVICE = {
    "loss": ["submit", "--conf", "conf", "--plugin", "mine", *OWN, "batch_size=32", "loss=hinge", "lr_schedule=halves"],
    "torch_dataset": [*RUN, "model=mlp"],
    "tokens": ["submit", "--conf", "conf", "--plugin", "mine", "model=table", "data=counting", "batch_size=20"],
}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", LIKE_ONE_DEVICE)
def test_what_is_ones_own_trains_on_two_ranks_like_one_device(name: str, in_it: Path) -> None:
    assert main([*LIKE_ONE_DEVICE[name], *TWO, "epochs=2"]) == 0
    (manifest,) = (in_it / "results").rglob("result/manifest.json")
    row = pl.read_parquet(manifest.with_name("run.parquet")).row(0, named=True)
    assert (row["outcome"], row["parity_passed"]) == ("ok", True)
    if name == "torch_dataset":
        assert (row["data"], row["train_samples"], len(row["data_sha256"])) == (name, 96, 64)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_metric_of_ones_own_is_in_tables_and_report(in_it: Path) -> None:
    own = ["--conf", "conf", "--plugin", "mine", *OWN, "batch_size=32", "epochs=2"]
    assert main(["submit", *own, "metric=near", *TWO, "devices=1,2"]) == 0
    columns = [pl.read_parquet(path)["test_metric"] for path in (in_it / "results").rglob("epochs.parquet")]
    assert len(columns) == 2
    assert all(0 < value <= 1 and 32 * value == round(32 * value) for column in columns for value in column)
    assert columns[0].to_list() == columns[1].to_list()
    assert main(["report", "results/adhoc", "--out", "page"]) == 0
    assert "Test metric" in (in_it / "page" / "index.html").read_text()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_metric_that_fails_ends_the_run_with_its_place(user: Path) -> None:
    (user / "mine" / "__init__.py").open("a").write("\n\nNear.value = lambda self, sums: 1 // 0\n")
    done = program(user, "run", "--conf", "conf", "--plugin", "mine", *OWN, "batch_size=32", "metric=near")
    assert done.returncode == 1, "it began, and ended with an error"
    assert "Traceback" not in done.stdout + done.stderr
    (outcome,) = (user / "results").rglob("outcome.json")
    assert '"outcome":"error"' in outcome.read_text()
    assert "mine/__init__.py:" in outcome.read_text()
    assert "ZeroDivisionError" in outcome.read_text()
    assert not list((user / "results").rglob("epochs.parquet"))


@pytest.mark.slow
def test_what_does_not_fit_is_told_with_its_place_before_anything_starts(
    in_it: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = in_it / "mine" / "__init__.py"
    text = code.read_text().replace("Dense(self.width, num_classes", "Dense(self.width + 1, num_classes")
    code.write_text(text.replace("return 1, 8, 8", "return 1, 9, 9") + "\n\nprint('hello')\n")
    assert main(["submit", "--conf", "conf", "--plugin", "mine", *OWN, "batch_size=32", *TWO, "devices=1,2"]) == 2
    lines = capsys.readouterr().err.splitlines()
    places = [f"({code}:{text[: text.index(each)].count(chr(10)) + 1})" for each in ("def load", "def build")]
    assert [line.endswith(place) for line, place in zip(lines, places, strict=True)] == [True, True]
    assert "train_images have shape (96, 1, 8, 8), not (96, 1, 9, 9)" in lines[0]
    assert "layer out can't take (4, 64), which layer wide gives it: Linear(in_features=65" in lines[1]
    assert not (in_it / "results").exists()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_on_arrays_of_another_size_ends_with_an_error_that_is_not_tried_again(
    in_it: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--conf", "conf", "--plugin", "mine", *OWN, "batch_size=32", "data.test_samples=64", "launcher=inline"]
    for expected in ("error", "not started: 1 error (--retry error tries again)"):
        assert main(["submit", *words]) == 1
        assert expected in " ".join(capsys.readouterr().out.split())
    (outcome,) = (in_it / "results").rglob("outcome.json")
    assert (
        "data=shapes: test_images have shape (32, 1, 8, 8), not (64, 1, 8, 8) by test_samples=64" in outcome.read_text()
    )
    assert '"outcome":"error"' in outcome.read_text()
