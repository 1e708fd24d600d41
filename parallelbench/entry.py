"""Executes a module of the suite: `python -m parallelbench.entry MODULE ARGUMENT …`.

`python -m launch.…` could execute somebody else's package of that name, which is on PYTHONPATH.
"""

from __future__ import annotations

import runpy
import sys

from parallelbench.processes import print_any_character

ENTRY = "parallelbench.entry"

if __name__ == "__main__":
    print_any_character()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
