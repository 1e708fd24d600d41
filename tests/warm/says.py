"""Says what it is, starts itself DEPTH times over, and ends as it is told: `python -m tests.warm.says DEPTH DEED`."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import parallelbench.errors as ours

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2, signal.SIGPIPE)
DEEDS: dict[str, Any] = {
    "return": lambda: None,
    "exit": lambda: sys.exit(7),
    "words": lambda: sys.exit("words"),
    "raise": lambda: 1 / 0,
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def main() -> int:
    depth = int(sys.argv[1])
    print(json.dumps(said()))
    ours.told_before = True  # type: ignore[attr-defined]
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    if depth:
        left_open = os.open(os.devnull, os.O_RDONLY)
        own = {"WARM_DEPTH": str(depth), "OMP_NUM_THREADS": str(2 + depth)}
        command = [sys.executable, "-u", "-m", "tests.warm.says", str(depth - 1), sys.argv[2]]
        code = subprocess.call(command, env=os.environ | own, start_new_session=True, preexec_fn=ignore)
        os.close(left_open)
        return code
    atexit.register(print, "at exit")
    threading.Timer(0.05, print, ("a thread that lasts longer",)).start()
    DEEDS[sys.argv[2]]()
    return 0


def said() -> dict[str, Any]:
    """What differs between two programs, or between a fork and a program."""
    if threads := os.environ.get("OMP_NUM_THREADS"):
        importlib.import_module("torch")
    return {
        "argv": sys.argv,
        "command line": Path("/proc/self/cmdline").read_text().rstrip("\0").split("\0"),
        "name": (__name__, __spec__.name),
        "told before": hasattr(ours, "told_before"),
        "main": hasattr(sys.modules["__main__"], "DEEDS"),
        "variables": {key: value for key, value in os.environ.items() if key.startswith("WARM_")},
        "threads": sys.modules["torch"].get_num_threads() if threads else None,
        "descriptors": sorted(os.listdir("/proc/self/fd"))[:3],
        "count": len(os.listdir("/proc/self/fd")),
        "folder": os.getcwd(),
        "path": sys.path,
        "leads": os.getsid(0) == os.getpid(),
        "handlers": [str(signal.getsignal(number)).split(" at ")[0] for number in HANDLED],
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "cores": sorted(os.sched_getaffinity(0)),
        "streams": [(one.encoding, one.errors, one.line_buffering, one.fileno()) for one in (sys.stdout, sys.stderr)],
        "unbuffered": sys.stdout.write_through,
        "is child": os.getppid() == int(os.environ.get("WARM_PARENT", os.getppid())),
    }


def ignore() -> None:
    """Runs between fork and exec."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.environ["WARM_LOST"] = "a change before exec that exec does not pass on"


if __name__ == "__main__":
    sys.exit(main())
