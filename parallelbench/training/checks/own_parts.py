"""Whether models and data of a user's own fit together: asked in a process of its own, before anything is queued."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

import msgspec

from parallelbench.config.build import from_mapping, packages_of
from parallelbench.config.dataset_check import checked
from parallelbench.config.identity import canonical_json
from parallelbench.data.torch_dataset import READ_TO_PLAN_BYTES
from parallelbench.errors import ConfigError, Refusals, ends_the_program, own_place
from parallelbench.processes import leave, noticing_exits, withstand_sigterm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parallelbench.config.run import RunConfig
    from parallelbench.config.structure import Component


def is_own(component: Component) -> bool:
    """Whether any class of a component is not the suite's."""
    return packages_of(component) != {"parallelbench"}


def main(arguments: Sequence[str]) -> int:
    """Print a line for each reason that refuses the runs whose mappings are on standard input; 2: there are some.

    `arguments`: `data` where data are read, too, else `models`; a plugin, and the folder that it is in.
    """
    what, plugin, *folders = arguments
    sys.path.extend(folders)  # last, so that they shadow nothing
    refused, told, held = Refusals(), sys.stdout, set[str]()
    with contextlib.redirect_stdout(sys.stderr), noticing_exits():  # what a user's code prints is no answer
        for plain in msgspec.json.decode(sys.stdin.buffer.read()):
            run, data = from_mapping(plain, plugin), canonical_json(plain["data"])
            if what == "data" and is_own(run.data) and data not in held:
                held.add(data)
                with refused:
                    _told_with_place(_check_arrays, run)
            if is_own(run.model) and run.epochs:
                with refused:
                    _told_with_place(_check_model, run)
    try:
        refused.raise_any()
    except ConfigError as error:
        print(error, file=told)
        return 2
    return 0


def _check_arrays(run: RunConfig) -> None:
    """Of data that are read item by item, those that are read to plan: ranks check others, once they have read them."""
    if (run.data.loaded_bytes or 0) > READ_TO_PLAN_BYTES:
        return
    checked(run.data, run.data.load(run.site.data_folder))


def _check_model(run: RunConfig) -> None:
    from parallelbench.training.checks.components import check_logits

    check_logits(run)


def _told_with_place(check: Callable[[RunConfig], None], run: RunConfig) -> None:
    """What a check refuses, with the place in a user's code. Whatever else happens may be this machine's alone."""
    try:
        check(run)
    except ConfigError as error:
        raise ConfigError(f"{own_place(error)}{error}") from None
    except SystemExit as error:
        raise ConfigError(ends_the_program(error)) from None


if __name__ == "__main__":
    withstand_sigterm()
    sys.exit(leave(main(sys.argv[1:])))
