"""Notes the steps of somebody else's training program, from within its processes.

`import torch` calls `start` (torch ≥ 2.5) where this folder is on PYTHONPATH. It does nothing unless
PARALLELBENCH_STEPS names a folder. A process that runs a backward or an optimizer's step then writes a journal there;
`parallelbench.frameworks.program.journals` says what its lines mean, and reads them.

It runs inside other people's programs, with their Python (≥ 3.8): only the standard library, no process, no thread, no
exception of its own, no wait for a device until all steps that are timed are there.

A step is the first outermost call of an optimizer's `step` after a backward. It ends when that call returns, or, where
the optimizer steps within the backward, when the backward does. Where no backward was ever seen, each outermost call
counts.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import time
import weakref
from collections import deque
from threading import Lock, get_ident

TYPE_CHECKING = False  # typing is loaded for nobody
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

FOLDER = "PARALLELBENCH_STEPS"
"""Variable: the folder of the journals. Empty: the shim does nothing."""
ENOUGH = "PARALLELBENCH_ENOUGH"
"""Variable: the number of counted steps after which the journal says at once that they are there."""
STEPS_OF = "PARALLELBENCH_STEPS_OF"
"""Variable: the optimizer that marks a step, numbered from 0 in the order of their first steps. Empty: any."""
COMPARED_FROM = "PARALLELBENCH_COMPARED_FROM"
"""Variable: the step after which the optimizers' parameters are first looked at, at the next backward; without it, the
first. They are looked at again at enough steps; where nobody says how many these are, after twice as many, and so on
until they have changed."""
CORES = "PARALLELBENCH_CORES"
"""Variable: cores of each local rank, as in `0,1;2,3`; of every process, where there is one group."""
PINNED = "PARALLELBENCH_PINNED"
"""Variable that this sets: a process has its cores already, and its children have them from it."""

FLUSH_NS = 200_000_000
STATE_NS = 2_000_000_000
"""How often the sums and the process's facts are written anew."""
MOST_PENDING = 4096
"""CUDA events, and optimizers that are told apart."""
MOST_UNWRITTEN = 1 << 20
"""Bytes that a full disk may hold back before the journal ends."""
MOST_FAULTS = 10
"""Exceptions of its own after which the shim stops."""
PACKAGES = ("numpy", "transformers", "accelerate", "lightning", "pytorch_lightning", "deepspeed", "torchvision", "timm")

clock = time.monotonic_ns


class Optimizer:
    """What is known of one optimizer."""

    __slots__ = ("before", "counted", "device", "itself", "marked_at", "marks", "name", "number", "outermost", "raw")

    def __init__(self, optimizer: Any) -> None:
        self.name = type(optimizer).__name__
        self.itself = known_or_none(weakref.ref, optimizer)
        self.number: int | None = None  # of its first outermost call
        self.raw = self.outermost = self.marks = self.counted = 0
        self.marked_at = 0
        self.device = first_device(optimizer)
        self.before = steps_before(optimizer)

    def row(self) -> list[Any]:
        return [self.number, self.name, self.raw, self.outermost, self.marks, self.counted]


class Loader:
    """What is known of the DataLoaders that look the same."""

    __slots__ = ("backwards", "batch_size", "batches", "batches_without_grad", "key", "largest_batch")

    def __init__(self, key: tuple[Any, ...]) -> None:
        self.key, self.batch_size = key, key[3]
        self.batches = self.batches_without_grad = self.backwards = 0
        self.largest_batch: int | None = None

    def row(self) -> dict[str, Any]:
        dataset, length, sampler, batch_size, workers = self.key
        return {
            "dataset": dataset,
            "length": length,
            "sampler": sampler,
            "batch_size": batch_size,
            "workers": workers,
            "batches": self.batches,
            "batches_without_grad": self.batches_without_grad,
            "largest_batch": self.largest_batch,
            "backwards": self.backwards,
        }


class Thread:
    """What one thread is within."""

    __slots__ = ("fetching", "steps", "wait_ns")

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []  # (frame, optimizer) of each open call of an optimizer's step
        self.fetching = False
        self.wait_ns = 0  # in a DataLoader's next, since its last counted step


class Recorder:
    """One process's steps, and its journal."""

    __slots__ = (
        "backwards",
        "before_ns",
        "began",
        "captured",
        "carried",
        "chosen",
        "compare_at",
        "compared_from",
        "counted_at",
        "cuda",
        "depth",
        "due_ns",
        "ended_ns",
        "enough",
        "events",
        "facts",
        "fault",
        "faults",
        "fetched",
        "file",
        "folder",
        "grads",
        "has_grads",
        "identity",
        "lines",
        "loaders",
        "lock",
        "number",
        "numbered",
        "off",
        "optimizers",
        "others",
        "own_before_ns",
        "own_ns",
        "pid",
        "runs",
        "since_backwards",
        "since_grads",
        "stated_ns",
        "sums",
        "threads",
        "torch",
        "unwritten",
        "whole_graph",
    )  # which are quick to find where caches are cold

    def __init__(self, torch: Any, folder: str) -> None:
        self.torch, self.folder, self.pid = torch, folder, os.getpid()
        self.has_grads = torch.is_grad_enabled
        self.chosen = number_of(STEPS_OF)
        self.enough = number_of(ENOUGH)
        self.compared_from = number_of(COMPARED_FROM) or 1
        self.compare_at = self.enough or 2 * self.compared_from
        self.threads: dict[int, Thread] = {}
        self.lock = Lock()
        self.off = not folder
        # Steps.
        self.number = 0
        self.counted_at = 0  # the backward after which the last step counted
        self.runs = 0  # backwards, as `backward` or `grad`, each numbered from 1
        self.depth = 0  # of backwards within each other
        self.carried: dict[Optimizer, None] = {}  # that stepped within the open backward
        self.backwards = self.grads = 0  # before the last counted step
        self.since_backwards = self.since_grads = 0  # the same, since the last counted step
        self.ended_ns = self.before_ns = 0  # the end of that step; from there to the first backward
        self.own_ns = self.own_before_ns = 0  # of the shim itself; until the last counted step
        self.captured = 0
        self.whole_graph = False
        self.optimizers: dict[tuple[int, type], Optimizer] = {}
        self.others = 0  # optimizers beyond the most that are told apart
        self.numbered = 0
        self.loaders: dict[tuple[Any, ...], Loader] = {}
        self.fetched: dict[Loader, None] = {}  # that gave a batch since the last backward
        self.sums: list[tuple[Any, Any]] = []  # (parameter, sum of its bits) after `compared_from` steps
        # CUDA.
        self.cuda = torch.cuda.is_initialized()  # looked at anew when the journal is written
        self.events: deque[tuple[int, Any]] = deque()
        # The journal.
        self.file: int | None = None
        self.identity: tuple[int, int] | None = None
        self.lines: list[str | tuple[int | None, ...]] = []  # a step's numbers become text when it is written
        self.unwritten = b""
        self.due_ns = self.stated_ns = 0
        self.began = False  # whether a state was written since the first counted step
        self.facts: dict[str, Any] = {}
        self.faults = 0
        self.fault: str | None = None

    def thread(self) -> Thread:
        """The one that calls."""
        thread = self.threads.get(get_ident())
        if thread is None:
            thread = self.threads[get_ident()] = Thread()
        return thread

    # Steps

    def close_left(self, steps: list[tuple[int, int]], frame: Any) -> None:
        """Forget calls of a step that an exception has left; the others are open around this frame."""
        open_frames, outer = set(), frame.f_back
        while outer is not None:
            open_frames.add(id(outer))
            outer = outer.f_back
        steps[:] = [step for step in steps if step[0] in open_frames]

    def leave(self, optimizer: Any, frame: Any, now: int) -> None:
        """It ends."""
        thread, place = self.threads.get(get_ident()) or self.thread(), 0
        steps = thread.steps
        if len(steps) == 1:
            steps.clear()
        else:
            for column, own in ((0, id(frame)), (1, id(optimizer))):  # torch.compile continues a call in another frame
                places = [place for place, step in enumerate(steps) if step[column] == own]
                if places:
                    place = places[-1]
                    break
            del steps[place:]
        if self.cuda and self.torch.cuda.is_current_stream_capturing():
            self.captured += 1
            return
        key = (id(optimizer), type(optimizer))
        known = self.optimizers.get(key)
        if known is None:
            self.cuda = self.torch.cuda.is_initialized()
            known = Optimizer(optimizer)
            if len(self.optimizers) < MOST_PENDING:
                self.optimizers[key] = known
            else:
                self.others += 1
        known.raw += 1
        if not place:
            known.outermost += 1
            if known.number is None:
                known.number, self.numbered = self.numbered, self.numbered + 1
            if not self.depth:
                self.stepped(known, thread, now)
            else:
                self.carried[known] = None

    def stepped(self, optimizer: Optimizer, thread: Thread, now: int) -> None:
        """An outermost call has ended, and any backward around it: is it a step?"""
        marks = not self.runs or self.runs > optimizer.marked_at
        if marks:
            optimizer.marks += 1
            optimizer.marked_at = self.runs
        if self.chosen is None:
            counts = not self.runs or self.runs > self.counted_at
        else:
            counts = marks and optimizer.number == self.chosen
        if not counts:
            return
        self.counted_at = self.runs
        self.number += 1
        optimizer.counted += 1
        own_ns, backwards, grads = self.own_ns - self.own_before_ns, self.since_backwards, self.since_grads
        self.backwards += backwards
        self.grads += grads
        line = (self.number, now, thread.wait_ns, backwards, grads, own_ns, optimizer.number, self.before_ns)
        self.lines.append(line)
        self.ended_ns, self.before_ns, self.own_before_ns = now, 0, self.own_ns
        thread.wait_ns = self.since_backwards = self.since_grads = 0
        if self.number in (1, self.enough, self.compare_at):
            self.due_ns = 0
        if self.cuda:
            self.mark_device(optimizer)

    def begin_backward(self, now: int) -> None:
        self.depth += 1
        if self.depth > 1:
            return
        if not self.before_ns:
            self.before_ns = now - self.ended_ns if self.ended_ns else 0
        if not self.runs and self.number:  # what counted so far were no steps, but an optimizer's preparations
            self.lines.append(f'{{"void":{self.number}}}')
            self.number, self.enough, self.began = 0, number_of(ENOUGH), False
            self.events.clear()
            self.sums.clear()
            self.compare_at = self.enough or 2 * self.compared_from
            for optimizer in self.optimizers.values():
                optimizer.marks = optimizer.counted = 0
        self.runs += 1
        if self.fetched:
            for loader in self.fetched:
                loader.backwards += 1
            self.fetched.clear()
        if self.number == self.compared_from and not self.sums:  # all optimizers have had their turn
            self.sums = self.summed()

    def end_backward(self, accumulated: bool, now: int) -> None:
        """The time of steps that it carried is that of its end."""
        self.depth -= 1
        if self.depth > 0:
            return
        self.depth = 0
        if accumulated:
            self.since_backwards += 1
        else:
            self.since_grads += 1
        if not self.carried:
            return
        thread, carried, self.carried = self.thread(), self.carried, {}
        if not thread.steps:
            for optimizer in carried:
                self.stepped(optimizer, thread, now)

    # Parameters

    def summed(self) -> list[tuple[Any, Any]]:
        """A sum over the bits of each parameter of all optimizers, on its device: nobody waits for it.

        Counters of in-place updates would cost less, and miss updates by fused kernels and by way of `.data`.
        """
        found: dict[int, Any] = {}
        if self.cuda and self.torch.cuda.is_current_stream_capturing():
            return []
        for optimizer in list(self.optimizers.values()):
            itself = optimizer.itself() if optimizer.itself is not None else None
            for group in getattr(itself, "param_groups", ()):
                found.update((id(parameter), parameter) for parameter in group.get("params", ()))
        sums = [(parameter, known_or_none(sum_of_bits, self.torch, parameter)) for parameter in found.values()]
        return [(known_or_none(weakref.ref, parameter), of_bits) for parameter, of_bits in sums if of_bits is not None]

    def compare(self) -> None:
        """Note how many parameters are others than when they were first looked at; waits for their devices."""
        pairs = []
        for reference, before in self.sums:
            parameter = reference() if reference is not None else None
            after = known_or_none(sum_of_bits, self.torch, parameter) if parameter is not None else None
            if after is not None:
                pairs.append((before, after))
        changed = known_or_none(count_unlike, self.torch, pairs)
        if pairs and changed is not None:
            self.lines.append(f'{{"changed":[{self.compared_from},{self.number},{changed},{len(pairs)}]}}')
        if changed or self.enough is not None:
            self.sums = []
        self.compare_at = 2 * self.number

    # Batches

    def fetch(self, iterator: Any, batch: Any, came: bool) -> None:
        """A DataLoader's next has ended."""
        if not came:
            return
        known = iterator.__dict__.get("_parallelbench_loader")
        loader = known[1] if known is not None and known[0] is self else self.loader_of(iterator)
        if self.has_grads():
            loader.batches += 1
        else:
            loader.batches_without_grad += 1
        if loader.largest_batch is None or loader.largest_batch != loader.batch_size:  # none is larger than that
            size = samples_of(batch, loader.batch_size, self.torch.Tensor)
            if size is not None:
                loader.largest_batch = max(size, loader.largest_batch or 0)
        self.fetched[loader] = None

    def loader_of(self, iterator: Any) -> Loader:
        """Those that look the same are one: programs make new ones in each epoch."""
        sampler, length = getattr(iterator, "_index_sampler", None), None
        if getattr(iterator, "_dataset_kind", None) == 0:
            length = known_or_none(len, iterator._dataset)
        key = (
            type(getattr(iterator, "_dataset", None)).__name__,
            length,
            type(sampler).__name__,
            integer(getattr(sampler, "batch_size", None)),
            integer(getattr(iterator, "_num_workers", None)),
        )
        loader = self.loaders.get(key)
        if loader is None:
            loader = self.loaders[key] = Loader(key)
        iterator.__dict__["_parallelbench_loader"] = (self, loader)
        return loader

    # CUDA

    def mark_device(self, optimizer: Optimizer) -> None:
        """Let the current stream note when it gets here."""
        cuda = self.torch.cuda
        if len(self.events) >= MOST_PENDING:
            return
        device = optimizer.device if getattr(optimizer.device, "type", None) == "cuda" else None
        event = cuda.Event(enable_timing=True)
        event.record(cuda.current_stream(device))
        self.events.append((self.number, event))

    def read_events(self) -> None:
        events = self.events
        while len(events) > 1 and events[1][1].query():
            earlier = events.popleft()
            if events[0][0] == earlier[0] + 1:
                took_ns = 1e6 * earlier[1].elapsed_time(events[0][1])
                self.lines.append(f'{{"device":[{events[0][0]},{took_ns:.0f}]}}')

    # The journal

    def write(self, now: int, *, last: bool = False) -> None:
        """Write what came since."""
        if self.off or not self.lock.acquire(False):
            return
        try:
            if self.pid != os.getpid():  # a fork that Python doesn't know of
                self.off = True
                return
            if self.file is None and not self.open(now):
                return
            self.due_ns = now + FLUSH_NS
            self.cuda = self.torch.cuda.is_initialized()
            enough = self.enough is not None and self.number >= self.enough
            first = self.number > 0 and not self.began
            capturing = self.cuda and self.torch.cuda.is_current_stream_capturing()
            if self.events and not capturing:
                self.read_events()
            if last or enough or first or now - self.stated_ns >= STATE_NS:
                self.stated_ns, self.began = now, self.number > 0
                self.state()
            if self.sums and self.number >= self.compare_at and not capturing:
                self.compare()
            if enough:
                self.lines.append(f'{{"enough":{self.number}}}')
                self.enough = None
            if last:
                self.lines.append(f'{{"end":{now}}}')
            lines, self.lines = self.lines, []
            texts = [line if isinstance(line, str) else f'{{"step":[{",".join(map(str, line))}]}}' for line in lines]
            self.unwritten += "".join([text + "\n" for text in texts]).encode()
            self.flush()
        finally:
            self.lock.release()

    def is_its_file(self) -> bool:
        """Programs that become daemons close all descriptors: the number may be another file's by now."""
        try:
            return self.file is not None and identity(self.file) == self.identity
        except OSError:
            return False

    def flush(self) -> None:
        if self.file is None or not self.is_its_file():
            self.off = True
            return
        while self.unwritten:
            try:
                self.unwritten = self.unwritten[os.write(self.file, self.unwritten) :]
            except OSError:  # perhaps there is room again, next time
                self.off = len(self.unwritten) > MOST_UNWRITTEN
                return

    def open(self, now: int) -> bool:
        """Create the journal, unless this process is a worker of a DataLoader."""
        workers = sys.modules.get("torch.utils.data._utils.worker")
        if getattr(workers, "_worker_info", None) is not None:
            self.off = True
            return False
        node = os.uname().nodename
        for number in range(100):  # a number of a process comes again
            name = f"{node}-{self.pid}-{number}.jsonl" if number else f"{node}-{self.pid}.jsonl"
            try:
                path = os.path.join(self.folder, name)
                self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
                self.identity = identity(self.file)
                break
            except FileExistsError:
                continue
            except OSError:
                break
        if self.file is None:
            self.off = True
            return False
        begin = {"version": 1, "node": node, "pid": self.pid, "monotonic_ns": clock(), "unix_ns": time.time_ns()}
        self.lines.insert(0, as_json({"begin": begin}))
        at_its_end()
        leave_to_python()
        return True

    def state(self) -> None:
        try:
            facts = self.facts_now()
            if facts != self.facts:
                self.facts = facts
                self.lines.append(as_json({"process": facts}))
            peaks = memory(self.torch)
        except Exception as error:  # a device or a group of processes that has failed
            note_fault(error)
            peaks = []
        state = {
            "monotonic_ns": clock(),
            "unix_ns": time.time_ns(),
            "steps": self.number,
            "backwards": self.backwards + self.since_backwards,
            "grads": self.grads + self.since_grads,
            "own_ns": self.own_ns,
            "captured": self.captured,
            "whole_graph": self.whole_graph,
            "optimizers": optimizer_rows(list(self.optimizers.values())),
            "other_optimizers": self.others,
            "loaders": [loader.row() for loader in list(self.loaders.values())],
            "memory": peaks,
            "collectives": known_or_none(collectives, self.torch),
            "faults": self.faults,
            "fault": self.fault,
        }
        self.lines.append(as_json({"state": state}))

    def facts_now(self) -> dict[str, Any]:
        facts = facts_of_program(self.torch) if not self.facts else dict(self.facts)
        facts.update(facts_of_rank(self.torch))
        devices = [optimizer.device for optimizer in list(self.optimizers.values())]
        before = [each.before for each in list(self.optimizers.values()) if each.before is not None]
        facts["steps_before"] = max(before, default=None)
        facts["device_types"] = sorted({device.type for device in devices if device is not None})
        return facts


recorder: Recorder | None = None
compiling: Callable[[], bool] = bool


# Where it enters


def start() -> None:
    """What torch calls at the end of its import; whatever happens, the program goes on."""
    global recorder, compiling
    folder = os.environ.get(FOLDER, "")
    if not folder or recorder is not None:
        return
    try:
        torch: Any = sys.modules["torch"]
        recorder = Recorder(torch, os.path.abspath(folder))
        compiling = torch.compiler.is_dynamo_compiling  # `is_compiling` calls two more functions
        hook_optimizers()
        hook_backward(torch)
        hook_loaders()
        os.register_at_fork(after_in_child=after_fork)
        atexit.register(finish)
    except Exception as error:
        note_fault(error)
    try:
        pin()
    except Exception as error:
        note_fault(error)


def hook_optimizers() -> None:
    """Of all classes and instances, also of those that exist already."""
    from torch.optim import optimizer

    optimizer.register_optimizer_step_pre_hook(before_step)
    optimizer.register_optimizer_step_post_hook(after_step)


def leave_to_python() -> None:
    """Keep Dynamo, where it is loaded, from compiling the shim that a compiled program calls."""
    skip_code = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
    if skip_code is None:
        return
    codes = [value.__code__ for value in [*globals().values(), *vars(Recorder).values()] if hasattr(value, "__code__")]
    for code in codes:
        skip_code(code)
        for inner in code.co_consts:
            if isinstance(inner, type(code)):
                skip_code(inner)


def hook_backward(torch: Any) -> None:
    """`backward` and `grad` both go through one function, also where they were imported by name."""
    name = "_engine_run_backward"
    if hasattr(torch.autograd, name):
        wrapped = around_backward(getattr(torch.autograd, name))
        torch.autograd._engine_run_backward = wrapped
        if hasattr(torch.autograd.graph, name):
            torch.autograd.graph._engine_run_backward = wrapped
    else:
        torch.autograd.backward = around_backward(torch.autograd.backward, accumulate=True)
        torch.autograd.grad = around_backward(torch.autograd.grad)


def hook_loaders() -> None:
    """Where torch has loaded its DataLoader, which `import torch` does."""
    module = sys.modules.get("torch.utils.data.dataloader")
    base = getattr(module, "_BaseDataLoaderIter", None)
    if base is not None:
        base.__next__ = around_next(base.__next__)


def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """The global hook before an optimizer's step."""
    if compiling() and must_stay_whole():
        return
    start = clock()
    known = recorder
    if known is None or known.off:
        return
    try:
        frame = sys._getframe(1)
        steps = (known.threads.get(get_ident()) or known.thread()).steps
        if steps:
            known.close_left(steps, frame)
        steps.append((id(frame), id(optimizer)))
        known.own_ns += clock() - start
    except Exception as error:
        note_fault(error)


def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """The global hook after it."""
    if compiling() and must_stay_whole():
        return
    now = clock()
    known = recorder
    if known is None or known.off:
        return
    try:
        known.leave(optimizer, sys._getframe(1), now)
        if now >= known.due_ns:
            known.write(now)
        known.own_ns += clock() - now
    except Exception as error:
        note_fault(error)


def must_stay_whole() -> bool:
    """Dynamo runs this while it traces: a hook breaks the graph, which is an error with `fullgraph=True`."""
    try:
        convert = sys.modules["torch._dynamo.symbolic_convert"]
        trace = getattr(convert.tls, "current_tx", None)
        whole = trace is None or bool(trace.one_graph) or bool(getattr(trace, "error_on_graph_break", False))
    except Exception:
        whole = True
    if whole and recorder is not None:
        recorder.whole_graph = True
    return whole


must_stay_whole._dynamo_marked_constant = True  # type: ignore[attr-defined]


def around_backward(run: Callable[..., Any], accumulate: bool = False) -> Callable[..., Any]:
    """A backward that is noted."""

    @functools.wraps(run)
    def noted(*args: Any, **kwargs: Any) -> Any:
        known = recorder
        if known is None or known.off:
            return run(*args, **kwargs)
        start = clock()
        try:
            known.begin_backward(start)
        except Exception as error:
            note_fault(error)
        before = clock()
        try:
            result = run(*args, **kwargs)
        except BaseException:
            known.depth = max(known.depth - 1, 0)
            if not known.depth:
                known.carried.clear()
            raise
        now = clock()
        try:
            known.end_backward(accumulate or bool(kwargs.get("accumulate_grad")), now)
            if now >= known.due_ns:
                known.write(now)
            known.own_ns += clock() - now + before - start
        except Exception as error:
            note_fault(error)
        return result

    return noted


def around_next(fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A DataLoader's next that is noted; one within another's is a part of that."""

    @functools.wraps(fetch)
    def noted(iterator: Any) -> Any:
        known = recorder
        if known is None or known.off:
            return fetch(iterator)
        thread = known.threads.get(get_ident()) or known.thread()
        if thread.fetching:
            return fetch(iterator)
        thread.fetching = True
        batch, came = None, False
        start = clock()
        try:
            batch = fetch(iterator)
            came = True
        finally:
            now = clock()
            thread.fetching = False
            thread.wait_ns += now - start
            try:
                known.fetch(iterator, batch, came)
                known.own_ns += clock() - now
            except Exception as error:
                note_fault(error)
        return batch

    return noted


def after_fork() -> None:
    """A child counts for itself, where it trains."""
    global recorder
    if recorder is not None:
        if recorder.file is not None and recorder.is_its_file():
            os.close(recorder.file)
        recorder = Recorder(recorder.torch, recorder.folder)


def finish() -> None:
    """Write the rest, at the end of the process."""
    known = recorder
    try:
        if known is not None and known.file is not None and known.pid == os.getpid():
            known.write(clock(), last=True)
            known.off = True
    except Exception:
        pass


def at_its_end() -> None:
    """A child of multiprocessing may end without atexit's functions."""
    processes, util = sys.modules.get("multiprocessing.process"), sys.modules.get("multiprocessing.util")
    if processes is not None and util is not None and processes.parent_process() is not None:
        util.Finalize(None, finish, exitpriority=-1000)


def note_fault(error: Exception) -> None:
    """Remember an exception of the shim's own; after too many, it stops."""
    if recorder is not None:
        recorder.faults += 1
        recorder.fault = f"{type(error).__name__}: {error}"
        recorder.off = recorder.off or recorder.faults >= MOST_FAULTS


def pin() -> None:
    """Take the cores of this local rank, before the program does anything."""
    groups = [group for group in os.environ.get(CORES, "").split(";") if group.strip()]
    if not groups or PINNED in os.environ:
        return
    rank = number_of("LOCAL_RANK")
    if len(groups) == 1:
        rank = 0
    elif rank is None or number_of("LOCAL_WORLD_SIZE") != len(groups):
        return
    cores = {int(core) for core in groups[rank].split(",")}
    for thread in os.listdir("/proc/self/task"):  # libraries that were loaded before may have some
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)
    os.environ[PINNED] = groups[rank]


# Facts


def facts_of_program(torch: Any) -> dict[str, Any]:
    """What doesn't change while it trains."""
    cuda = known_or_none(torch.cuda.is_initialized)
    return {
        "executable": sys.executable,
        "python": sys.version.split()[0],
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or getattr(torch.version, "hip", None),
        "cudnn": known_or_none(torch.backends.cudnn.version) if cuda else None,
        "nccl": known_or_none(lambda: ".".join(map(str, torch.cuda.nccl.version()))) if cuda else None,
        "packages": packages(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def facts_of_rank(torch: Any) -> dict[str, Any]:
    """What may change: the ranks meet late, threads and cores are set by a library."""
    rank = world_size = backend = None
    source = "none"
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        source, rank, world_size = "distributed", distributed.get_rank(), distributed.get_world_size()
        backend = known_or_none(distributed.get_backend)
    elif number_of("RANK") is not None and number_of("WORLD_SIZE") is not None:
        source, rank, world_size = "environment", number_of("RANK"), number_of("WORLD_SIZE")
    return {
        "rank": rank,
        "world_size": world_size,
        "rank_from": source,
        "local_rank": number_of("LOCAL_RANK"),
        "backend": backend,
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cores": sorted(os.sched_getaffinity(0)),
        "deterministic": bool(torch.are_deterministic_algorithms_enabled()),
        "cudnn_deterministic": bool(torch.backends.cudnn.deterministic),
        "cudnn_benchmark": bool(torch.backends.cudnn.benchmark),
        "matmul_precision": known_or_none(torch.get_float32_matmul_precision),
    }


def collectives(torch: Any) -> int | None:
    """Collective operations that this process has begun, in all process groups; messages between two are none."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    groups = list(distributed.distributed_c10d._world.pg_map)
    return sum(int(group._get_sequence_number_for_group()) for group in groups)


def packages() -> dict[str, str]:
    """Versions of what the program has loaded of them."""
    from importlib import metadata

    found = {}
    for name in PACKAGES:
        if name in sys.modules:
            version = known_or_none(metadata.version, name.replace("_", "-"))
            if version is not None:
                found[name] = str(version)
    return found


def memory(torch: Any) -> list[dict[str, Any]]:
    """Peaks of the GPUs on which this process has memory."""
    cuda, found = torch.cuda, []
    if not cuda.is_initialized():
        return []
    for index in range(cuda.device_count()):
        allocated, reserved = cuda.max_memory_allocated(index), cuda.max_memory_reserved(index)
        if reserved:
            properties = cuda.get_device_properties(index)
            found.append(
                {
                    "index": index,
                    "uuid": str(getattr(properties, "uuid", "")) or None,
                    "name": properties.name,
                    "peak_allocated_bytes": int(allocated),
                    "peak_reserved_bytes": int(reserved),
                }
            )
    return found


def optimizer_rows(optimizers: list[Optimizer]) -> list[list[Any]]:
    """Each of the first ones; of the rest the sums by class."""
    rows = [optimizer.row() for optimizer in optimizers[:16]]
    rest: dict[str, list[Any]] = {}
    for optimizer in optimizers[16:]:
        row = rest.setdefault(optimizer.name, [None, optimizer.name, 0, 0, 0, 0])
        for place, value in enumerate(optimizer.row()[2:], start=2):
            row[place] += value
    return rows + list(rest.values())


def first_device(optimizer: Any) -> Any:
    """Of its first parameter."""
    try:
        return next(iter(optimizer.param_groups[0]["params"])).device
    except Exception:
        return None


def steps_before(optimizer: Any) -> int | None:
    """Steps that it had taken before its first call here, as its state counts them: it went on from a checkpoint."""
    try:
        for state in optimizer.state.values():
            step = state.get("step")
            if step is not None and getattr(getattr(step, "device", None), "type", "cpu") == "cpu":
                return int(step) - 1
    except Exception:
        pass
    return None


def sum_of_bits(torch: Any, parameter: Any) -> Any:
    """Of this process's part of it, as a scalar on its device; None where it has none."""
    own = getattr(parameter, "_local_tensor", parameter).detach()  # of a DTensor, whose sum would be a collective
    if not own.numel():
        return None
    if own.is_complex():
        own = torch.view_as_real(own)
    size = own.element_size()
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    per_word = 8 // size  # sums over long words are ten times as fast
    if not own.is_contiguous() or own.storage_offset() % per_word:
        return own.view(whole).sum()
    own = own.view(-1)
    cut = own.numel() - own.numel() % per_word
    return own[:cut].view(torch.int64).sum() + own[cut:].view(whole).sum()


def count_unlike(torch: Any, pairs: list[tuple[Any, Any]]) -> int:
    """How many pairs of scalars differ; one wait for each device."""
    of_devices: dict[Any, list[tuple[Any, Any]]] = {}
    for pair in pairs:
        of_devices.setdefault(pair[0].device, []).append(pair)
    unlike = [torch.stack(column[0]) != torch.stack(column[1]) for column in map(transposed, of_devices.values())]
    return sum(int(each.sum()) for each in unlike)


def transposed(pairs: list[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    """Pairs as two lists."""
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def samples_of(batch: Any, batch_size: int | None, tensor: Any) -> int | None:
    """The first dimension of the first tensor in it; the length of a list of samples that were not stacked."""
    for _ in range(4):
        if isinstance(batch, (list, tuple)) and batch:
            inner = batch[0]
            if len(batch) == batch_size and not (isinstance(inner, tensor) and first_dimension(inner) == batch_size):
                return len(batch)
            batch = inner
            continue
        if isinstance(batch, tensor):
            return first_dimension(batch)
        if not isinstance(batch, dict):
            batch = getattr(batch, "data", None)  # a UserDict, as transformers' BatchEncoding
        if not isinstance(batch, dict):
            return None
        batch = next(iter(batch.values()), None)
    return None


def first_dimension(tensor: Any) -> int | None:
    """None of a scalar."""
    return int(tensor.shape[0]) if len(tensor.shape) else None


def identity(file: int) -> tuple[int, int]:
    """Of what a descriptor stands for."""
    status = os.fstat(file)
    return status.st_dev, status.st_ino


def integer(value: Any) -> int | None:
    """The value, where it is an integer."""
    return value if isinstance(value, int) else None


def number_of(variable: str) -> int | None:
    """The integer in a variable of the environment."""
    text = os.environ.get(variable, "").strip()
    return int(text) if text.isdigit() else None


def known_or_none(function: Callable[..., Any], *args: Any) -> Any:
    """What it returns; None where it raises."""
    try:
        return function(*args)
    except Exception:
        return None


def as_json(value: Any) -> str:
    """On one line, without spaces."""
    import json

    return json.dumps(value, separators=(",", ":"))
