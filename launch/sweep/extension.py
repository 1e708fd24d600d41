"""A user's own configuration files and classes, as the command line names them."""

from __future__ import annotations

import importlib.util
import re
import sys
from contextlib import suppress
from importlib import resources
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launch.sweep.compose import EXPERIMENT, Extension, group_choices
from parallelbench.config.build import load_yaml, told_in_words
from parallelbench.errors import ConfigError, did_you_mean

_OURS = ("parallelbench", "launch", "analysis", "conf")
"""The suite's own packages."""


def extension(conf: str | None, plugin: str | None) -> Extension:
    """Check what `--conf` and `--plugin` name; a package that is named by its path becomes importable."""
    folder = Path(conf).expanduser().absolute() if conf else None
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--conf {conf} is no folder: name one that holds, e.g., strategy/mine.yaml")
    if folder is not None:
        valid = (*group_choices(), EXPERIMENT)
        if foreign := sorted(set(group_choices(folder)) - set(valid)):
            raise ConfigError(
                f"--conf {conf} holds {', '.join(foreign)}, which are no groups; valid: {', '.join(valid)}"
            )
        _require_own_names(folder, conf)
        _require_readable(folder)
    return Extension(folder, _package(plugin) if plugin else None)


def _require_own_names(folder: Path, conf: str | None) -> None:
    """Refuse files that would be ignored: where both have a name, the suite's file is read. Exact copies may stay."""
    groups = [
        path for path in folder.glob("*/*") if path.suffix in (".yaml", ".yml") and path.parent.name[0] not in "_."
    ]
    for path in sorted([folder / "config.yaml", *groups]):
        shipped = resources.files("conf").joinpath(*path.relative_to(folder).parts)
        if path.suffix == ".yml":
            fix = "only .yaml is read: rename it"
        elif not path.is_file() or not shipped.is_file() or shipped.read_bytes() == path.read_bytes():
            continue
        elif path.parent == folder:
            fix = "the suite's is read: give its keys on the command line, or in a sweep's grid"
        else:
            name = f"my_{path.stem}"
            fix = f"the suite has a file of that name: rename it, e.g. to {name}.yaml, choose {path.parent.name}={name}"
            fix += f", and write `name: {name}` into it"
        raise ConfigError(f"--conf {conf}: {path.relative_to(folder)} would be ignored: {fix}")


def _require_readable(folder: Path) -> None:
    """Refuse files that Hydra would read without end, or not at all. They are few, and each takes a millisecond."""
    for group in group_choices(folder):
        for file in sorted((folder / group).glob("*.yaml")):
            try:
                content = file.read_bytes()
                load_yaml(content)
                with told_in_words(), suppress(OmegaConfBaseException):  # that error comes when it is composed
                    OmegaConf.create(content.decode())
            except OSError as error:
                raise ConfigError(f"{file} can't be read: {error.strerror}") from None
            except ValueError as error:
                raise ConfigError(f"{file} is no YAML that can be read: {error}") from None


def _package(plugin: str) -> str:
    path = Path(plugin).expanduser().absolute()
    name = path.stem if path.exists() else plugin
    is_name = re.fullmatch(r"[A-Za-z_]\w*", name) is not None
    if not path.exists() and ("/" in plugin or (is_name and importlib.util.find_spec(name) is None)):
        hint = did_you_mean(path.stem, _modules(path.parent))
        where = f"in {path.parent}{'' if '/' in plugin else ', and none is installed'}"
        raise ConfigError(f"--plugin {plugin}: there is no package {path.stem} {where}{hint and f': {hint}'}")
    if not is_name:
        raise ConfigError(f"--plugin {plugin} is neither a package's name nor its path")
    if name in _OURS:
        raise ConfigError(f"--plugin {plugin}: {name} is a package of the suite itself; give yours another name")
    if path.exists():
        sys.path.append(str(path.parent))  # last, so that nothing there shadows anything
    spec = importlib.util.find_spec(name)
    if spec is None or (path.exists() and not _is_at(spec.origin, path)):
        if path.is_dir() and not (path / "__init__.py").is_file():
            raise ConfigError(f"--plugin {plugin}: {path} is no package: it lacks an `__init__.py`, which may be empty")
        raise ConfigError(f"--plugin {plugin}: no package {name} can be imported from there; give it a name of its own")
    return name


def _modules(folder: Path) -> list[str]:
    """The names of the packages and modules in a folder; none where it can't be read."""
    with suppress(OSError):
        return [each.stem for each in folder.iterdir() if each.suffix == ".py" or (each / "__init__.py").is_file()]
    return []


def _is_at(origin: str | None, path: Path) -> bool:
    return origin is not None and Path(origin).resolve() in (path.resolve(), (path / "__init__.py").resolve())
