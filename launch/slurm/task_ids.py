"""Tasks of an array as accounting writes them."""

from __future__ import annotations

import re


def tasks_of(job: str) -> list[str]:
    """`30_[6-7,9%8]`, as sacct shows the tasks that never began, one by one; any other job as it is.

    A list that Slurm has cut off ("...", SLURM_BITSTR_LEN) gives the tasks that are named whole.
    """
    array, bracket, rest = job.partition("_[")
    if not bracket:
        return [job]
    tasks: list[int] = []
    for part in rest.rstrip("]").partition("%")[0].split(","):
        if (found := re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)) is not None:
            first, last, step = (int(text) if text else None for text in found.groups())
            tasks += range(first or 0, (last if last is not None else first or 0) + 1, step or 1)
    return [f"{array}_{task}" for task in tasks]
