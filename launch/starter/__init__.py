"""The verb `init`: a folder of one's own that runs as it stands: parts for the suite, or a program to be measured.

NAME in the files of the first is the package's name.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.sweep.compose import group_choices
from launch.verbs.console import say
from parallelbench.errors import ConfigError
from parallelbench.results.files import storage_errors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


FILES = {
    "README.md": "README.md",
    ".gitignore": "gitignore",
    "notebook.ipynb": "notebook.ipynb",
    "NAME/__init__.py": "package.py.txt",
    "NAME/model.py": "model.py.txt",
    "NAME/data.py": "data.py.txt",
    "NAME/strategy.py": "strategy.py.txt",
    "conf/model/NAME_model.yaml": "model.yaml",
    "conf/data/NAME_data.yaml": "data.yaml",
    "conf/strategy/NAME_strategy.yaml": "strategy.yaml",
    "conf/sweep/NAME.yaml": "sweep.yaml",
    "tests/test_NAME.py": "test.py.txt",
}
"""Where each file of `files/` goes."""
PROGRAM_FILES = {
    "README.md": "program/README.md",
    ".gitignore": "program/gitignore",
    "train.py": "program/train.py.txt",
    "conf/program/mine.yaml": "program/mine.yaml",
}
"""Likewise, of a program."""
PROGRAM_SWEEP = "devices=1,2 batch_size=256 sweep.name=mine sweep.repeats=6"
"""What is asked of the program first."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_SAMPLES = {"train": 512, "test": 128}


def init(folder: str, *, program: bool = False) -> int:
    """Write the files into a new or empty folder; print what to do next. Of a package, the folder's name is its."""
    root = Path(folder).expanduser()
    name = root.absolute().name
    if not program:
        _require_name(name, root)
    _require_empty(root)
    with storage_errors(root, option="DIR"):
        for target, source in (PROGRAM_FILES if program else FILES).items():
            path = root / target.replace("NAME", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            text = resources.files("launch.starter").joinpath("files", source).read_text(encoding="utf-8")
            path.write_text(text if program else text.replace("NAME", name), encoding="utf-8")
        if not program:
            (root / "data").mkdir()
            _write_stripes(root / "data" / f"{name}.npz")
    if program:
        say(f"{root} holds a program that trains, and conf/program/mine.yaml, which says how it is measured. Next:")
        say(f"  cd {root} && parallelbench submit --conf conf program=mine {PROGRAM_SWEEP}")
    else:
        say(f"{root} holds a model, a data set, a strategy, a sweep, a notebook and a test. Next:")
        say(f"  cd {root} && parallelbench submit --conf conf --plugin {name} sweep={name}")
    return 0


def _require_name(name: str, root: Path) -> None:
    """Refuse names that Python or the suite has already."""
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(
            f"init {root}: {name!r} can't be a package's name: choose a folder of small letters, digits and _"
        )
    if importlib.util.find_spec(name) is not None or name in group_choices()["sweep"]:
        raise ConfigError(f"init {root}: {name} is the name of an installed package or a shipped sweep: choose another")


def _require_empty(root: Path) -> None:
    """Refuse folders that hold anything."""
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise ConfigError(f"init {root}: it is there already, and not empty: choose a new folder")


def _write_stripes(path: Path) -> None:
    """Images of noisy stripes along four directions, the same each time."""
    import numpy as np

    draw = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part, count in _SAMPLES.items():
        labels = draw.integers(0, 4, count)
        arrays |= {f"{part}_images": _stripes(labels, draw), f"{part}_labels": labels}
    np.savez(path, **arrays)


def _stripes(labels: NDArray[np.int64], draw: np.random.Generator) -> NDArray[np.uint8]:
    """uint8 of (n, 1, 8, 8): a wave of period 4 with a phase of its own, along 0, 45, 90 or 135 degrees."""
    import numpy as np

    rows, columns = np.mgrid[0:8, 0:8]
    along = np.stack([rows, columns, rows + columns, rows - columns])[labels]
    waves = np.cos(np.pi / 2 * (along + draw.uniform(0, 4, (len(labels), 1, 1))))
    noisy = 127.5 + 90 * waves + draw.normal(0, 30, waves.shape)
    images: NDArray[np.uint8] = noisy.clip(0, 255).astype(np.uint8)[:, np.newaxis]
    return images
