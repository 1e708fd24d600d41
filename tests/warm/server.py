"""Starts Python programs by forking a process that has loaded torch: `python -P server.py FD PADDING`.

A fork takes the place of exec. Libraries are loaded once, before the fork; the suite and plugins are loaded by each
process anew. All else is as after exec: command line, environment, descriptors, signals, cores, exit code, and who is
whose parent. A process that was started so starts others so: the supervisor its torchrun, torchrun its ranks, a rank
its sampler. What needs an environment that a library reads when it is loaded is started by exec.

One request at a time comes through the socket FD; see `tests.warm`. PADDING is room for the command lines of forks.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import ctypes
import gc
import importlib
import io
import json
import logging
import multiprocessing.util
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRELOADED = (
    "altair",
    "hydra",
    "msgspec",
    "omegaconf",
    "psutil",
    "rich.console",
    "rich.progress",
    "scipy.stats",
    "submitit",
    "torch",
    "torch._dynamo",
    # Modules that torch imports late: for the first optimizer, for `use_deterministic_algorithms`, for the strategies.
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
)
READ_AT_LOAD = ("CUDA_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "TORCH")
"""What begins so is read by a library, or by Python, when it is loaded."""
SET_LATER = (
    "CUDA_DEVICE_ORDER",
    "OMP_NUM_THREADS",
    "PYTHONSAFEPATH",
    "PYTHONUNBUFFERED",
    "TORCHELASTIC_",
    "TORCH_NCCL_",
)
"""Of these, what nothing reads before the fork, or what the fork sets."""
PROGRAMS = (
    "parallelbench.",
    "tests.advisor.rank_memory",
    "tests.fake_ranks",
    "tests.large_ranks",
    "torch.distributed.run",
)
COLD = ("parallelbench.training.warm",)
"""Programs whose own forks are what is tested."""
MESSAGE_BYTES = 150_000
STREAMS = (0, 1, 2)
_PR_SET_PDEATHSIG = 1

_exec = subprocess._fork_exec  # type: ignore[attr-defined]
_base_path: list[str] = []
_base_environment: dict[str, str] = {}
_kept: list[object] = []
"""What a fork inherits and must not finalise: a file that is closed here could have another's number."""


def main(descriptor: int) -> None:
    """Serve until the socket is closed."""
    _die_with_parent()
    for module in PRELOADED:
        importlib.import_module(module)
    _base_path[:] = sys.path
    _base_environment.update(os.environ)
    _warm_hydra()
    # Only a machine that loses its power could tell.
    os.fsync = os.fstat  # type: ignore[assignment]
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a fork copies one thread, and there are {len(threads)} after the imports"
    # Otherwise the first garbage collection of each child would copy all pages with objects.
    gc.collect()
    gc.freeze()
    subprocess._fork_exec = _fork_or_exec  # type: ignore[attr-defined]
    with socket.socket(fileno=descriptor) as client:
        client.send(b"ready")
        while content := _receive(client):
            _serve(client, *content)


def _warm_hydra() -> None:
    """Let Hydra find its plugins and learn the grammar of overrides, which takes most of a first composition."""
    learned = ["a.b_c=1", "d=1e-3", "e=null", "f=/g/h-1", "i='j'", "k=[l,{m:[0.5,true]}]", "n=o,p", "q=[1,2]"]
    with sys.modules["hydra"].initialize_config_dir(str(Path(__file__).parents[2] / "conf"), version_base="1.3"):
        sys.modules["hydra"].compose("config", overrides=[f"+warm.{text}" for text in learned if "," not in text])
    parser = importlib.import_module("hydra.core.override_parser.overrides_parser").OverridesParser.create()
    for text in learned:
        parser.parse_override(text)


def _receive(client: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    content, descriptors, _, _ = socket.recv_fds(client, MESSAGE_BYTES, len(STREAMS))
    return (json.loads(content), descriptors) if content else None


def _serve(client: socket.socket, request: dict[str, Any], descriptors: list[int]) -> None:
    """Start a program, and answer with its process id, or with null where a fork can't be this program."""
    command, environment = request["command"], request["environment"]
    pid = (
        _adopted(lambda: _as_asked(request, descriptors), command, environment) if _able(command, environment) else None
    )
    for descriptor in descriptors:
        os.close(descriptor)
    client.send(json.dumps(pid).encode())


def _as_asked(request: dict[str, Any], descriptors: list[int]) -> None:
    for stream, descriptor in zip(STREAMS, descriptors, strict=True):
        os.dup2(descriptor, stream)
    _close_all_but(STREAMS)
    os.sched_setaffinity(0, request["cores"])
    os.chdir(request["cwd"])
    if request["session"]:
        os.setsid()
    if request["before"]:
        sys.path.insert(0, request["root"])
        pickle.loads(base64.b64decode(request["before"]))()


def _adopted(begin: Callable[[], None], command: list[str], environment: dict[str, str]) -> int:
    """Fork a program whose parent is not this process, but the one that started this, which asked the kernel for it."""
    told, tell = os.pipe()
    go, let_go = os.pipe()

    def begin_then() -> None:
        os.close(let_go)
        os.read(go, 1)  # a process that asks to die with its parent needs its final one
        begin()

    if (middle := os.fork()) == 0:
        os.write(tell, str(_forked(begin_then, command, environment)).encode())
        os._exit(0)
    os.waitpid(middle, 0)
    pid = int(os.read(told, 32))
    for descriptor in (told, tell, go, let_go):
        os.close(descriptor)
    return pid


def _able(command: list[str], environment: dict[str, str]) -> bool:
    """Whether a fork can be this program."""
    words = command[1:]
    while words and words[0] in ("-P", "-u"):
        words = words[1:]
    named = len(words) >= 2 and words[0] == "-m" and words[1].startswith(PROGRAMS) and words[1] not in COLD
    return named and command[0] == sys.executable and _same_libraries(environment)


def _same_libraries(environment: dict[str, str]) -> bool:
    """Whether libraries would be loaded as they were; what the server's environment adds harms none."""

    def read(variables: dict[str, str]) -> dict[str, str]:
        return {k: v for k, v in variables.items() if k.startswith(READ_AT_LOAD) and not k.startswith(SET_LATER)}

    return read(_base_environment) == read(_base_environment) | read(environment)


def _fork_or_exec(*arguments: Any) -> int:
    """In the place of `_posixsubprocess.fork_exec`, with its arguments."""
    command, environment = [os.fsdecode(word) for word in arguments[0]], arguments[5]
    if environment is None:
        variables = dict(os.environ)
    else:
        pairs = (os.fsdecode(pair).partition("=") for pair in environment)
        variables = {name: value for name, _, value in pairs}
    if not _able(command, variables):
        return int(_exec(*arguments))
    return _forked(lambda: _as_after_exec(*arguments[2:]), command, variables)


def _as_after_exec(close: bool, keep: tuple[int, ...], cwd: Any, _environment: Any, *rest: Any) -> None:
    """What `_posixsubprocess.fork_exec` does in the child before exec, in its order."""
    # Python before 3.14 adds whether vfork may be used.
    (stdin, _, _, stdout, _, stderr, _, unused, restore, session, group, gid, gids, uid, umask, before, *_) = rest
    assert close, "all descriptors are closed but those that are passed on"
    assert gid is gids is uid is None, "no other user"
    assert umask < 0, "the umask stays"
    high = [-1 if one == -1 else os.dup(one) if one <= 2 else one for one in (stdin, stdout, stderr)]
    for stream, descriptor in zip(STREAMS, high, strict=True):
        if descriptor != -1:
            os.dup2(descriptor, stream)
    if cwd is not None:
        os.chdir(cwd)
    if restore:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
    if session:
        os.setsid()
    if group >= 0:
        os.setpgid(0, group)
    if before is not None:
        before()
    # The parent waits until this pipe is closed, as exec does.
    _close_all_but((*STREAMS, *(one for one in keep if one != unused)))


def _forked(begin: Callable[[], None], command: list[str], environment: dict[str, str]) -> int:
    """Fork a child that becomes a program after `begin`; returns its process id."""
    if pid := os.fork():
        return pid
    code = 130
    try:
        gc.freeze()
        begin()
        code = _become(command, environment)
    except KeyboardInterrupt:
        pass  # the program had ended, or had not begun: Python would do what is left, and end interrupted
    except BaseException:
        code = 1
        _print_exception()
    finally:
        os._exit(code)  # whatever happens: the frames above belong to the parent, and so do the files they would close


def _close_all_but(kept: tuple[int, ...]) -> None:
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - set(kept):
        with contextlib.suppress(OSError):  # that of the listing itself
            os.close(descriptor)


def _become(command: list[str], environment: dict[str, str]) -> int:
    """Run `python [-P] [-u] -m MODULE …` in this process; its exit code."""
    at = command.index("-m")
    module, flags = command[at + 1], command[1:at]
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.orig_argv = [module, *command[at + 2 :]], command
    _show(command)
    safe = "-P" in flags or bool(environment.get("PYTHONSAFEPATH"))
    sys.path[:] = _base_path if safe else [os.getcwd(), *_base_path]
    _reset_signals()
    _reset_streams(unbuffered="-u" in flags or bool(environment.get("PYTHONUNBUFFERED")))
    _forget_the_suite()
    atexit._clear()
    atexit.register(logging.shutdown)
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    if threads := environment.get("OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(min(int(threads), os.cpu_count() or 1))  # as torch does
    return _exit_code(module)


def _show(command: list[str]) -> None:
    """Let /proc show this command line; it is written over the server's own, and cut off at its length."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    content = b"".join(os.fsencode(word) + b"\0" for word in command)[: end - start - 1]
    ctypes.memmove(start, content.ljust(end - start, b"\0"), end - start)


def _reset_signals() -> None:
    """As exec and then Python do: what was ignored stays ignored, all other handlers go."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)


def _reset_streams(*, unbuffered: bool) -> None:
    _kept.extend((sys.stdin, sys.stdout, sys.stderr))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw: Any = open(number, "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
        by_line = not unbuffered and (number == 2 or raw.isatty())
        errors = getattr(sys, name).errors
        stream = io.TextIOWrapper(raw, "utf-8", errors, line_buffering=by_line, write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _forget_the_suite() -> None:
    """Leave the libraries only: what is not installed beside Python is imported anew."""
    installed = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    _kept.append(sys.modules.pop("__main__"))
    sys.modules["__main__"] = types.ModuleType("__main__")
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        places = [spec.origin or "", *(spec.submodule_search_locations or ())] if spec else []
        if any(place.startswith("/") and not place.startswith(installed) for place in places):
            _kept.append(sys.modules.pop(name))
    importlib.invalidate_caches()


def _exit_code(module: str) -> int:
    """Run a module as Python's `-m` does, to the end of its threads and exit handlers."""
    code, interrupted = 0, False
    try:
        runpy._run_module_as_main(module)  # type: ignore[attr-defined]
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        _print_exception()
        interrupted = True
    except BaseException:
        _print_exception()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = code or 120
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code & 0xFF


def _print_exception() -> None:
    """As Python at its end: silently nothing where the disk is full."""
    with contextlib.suppress(OSError):
        traceback.print_exc()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
