"""Fixtures of the tests of launch."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.slurm import scheduler
from parallelbench.config.build import component_class
from tests.launch.fake_slurm import FakeSlurm, of_sbatch


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    monkeypatch.setattr(scheduler, "ask", fake.ask)
    return fake


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that change something, sbatch's with the options in its script; it gives the job 99."""
    commands: list[list[str]] = []

    def tell(words: list[str], *, script: str = "", patient: bool = False) -> str:
        commands.append([*words, *of_sbatch(script)])
        return "99\n"

    monkeypatch.setattr(scheduler, "tell", tell)
    return commands


# --- a user's own folder

CODE = '''
"""A strategy of the user's own."""
from parallelbench.config.components import Shard
from parallelbench.config.components import Strategy


class Mine(Strategy, frozen=True, kw_only=True):
    """Data parallel training: one sum over the ranks for all gradients."""

    mark: int
    """An option that is stored; 13 brings bad luck."""

    def processes(self, run, device_type):
        return run.devices

    def data_parallel_degree(self, run):
        return run.devices

    def prepare(self, model, run, world):
        from torch.nn.utils import parameters_to_vector, vector_to_parameters
        from parallelbench.strategies.replica import ModuleReplica, to_device

        assert self.mark != 13, "bad luck"

        class Averaging(ModuleReplica):
            def _forward_backward(self, batch):
                result = super()._forward_backward(batch)
                gradients = [parameter.grad for parameter in self._module.parameters()]
                vector = world.sum(parameters_to_vector(gradients))
                vector_to_parameters(vector / world.size, gradients)
                self.traffic.all_reduce("gradient", vector.nbytes, world.size)
                return result

        module = to_device(model, run, world.device)
        return Averaging(module, run=run, world=world, data_shard=Shard(world.rank, world.size))
'''
YAML = "_target_: mystrategies.Mine\nname: mine\nmark: 2\n"


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A user's folder: own YAML, own package."""
    (tmp_path / "conf" / "strategy").mkdir(parents=True)
    (tmp_path / "conf" / "strategy" / "mine.yaml").write_text(YAML)
    (tmp_path / "mystrategies").mkdir()
    (tmp_path / "mystrategies" / "__init__.py").write_text(CODE)
    return tmp_path


@pytest.fixture
def in_it(user: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same folder, as this process works in it."""
    monkeypatch.chdir(user)
    monkeypatch.syspath_prepend(user)
    forget_the_import()
    yield user
    forget_the_import()


def forget_the_import() -> None:
    """As in a program of its own."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mine", "mystrategies")]:
        del sys.modules[name]
    component_class.cache_clear()
    importlib.invalidate_caches()


def written_as_in(page: str, folder: Path) -> Path:
    """The folder with the files that a page describes, some of them piece by piece."""
    for path, code in re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", page, flags=re.DOTALL):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        with (folder / path).open("a") as file:
            file.write(code)
    return folder
