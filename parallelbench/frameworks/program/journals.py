"""What the shim wrote within the processes of somebody else's program, read while it runs.

Each training process has a file `<node>-<pid>.jsonl`. Each line is a JSON object with one key:

- `begin`: version, node, pid, and the monotonic and Unix time of the same instant.
- `process`: facts of the process (`Process`), at the first backward, and again whenever they have changed.
- `step`: `[number, end, wait, backwards, grads, own, optimizer, before]` of a counted step (`Step`).
- `device`: `[number, ns]`, the GPU's time from the end of the step before to the end of this one.
- `changed`: `[first, last, changed, seen]`, how many of the optimizers' parameters the steps between have changed
  (`Changed`).
- `void`: the steps so far were none: no backward had been seen when they were counted.
- `state`: sums so far (`State`), at the first step, every two seconds, at enough steps, and at the end.
- `enough`: the number of counted steps that was asked for is there.
- `end`: monotonic ns of the process's orderly end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path


class Step(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A counted step. Waiting, backwards and the shim's own time are of the interval that it ends."""

    number: int
    """1 …"""
    ended_ns: int
    """Of the node's monotonic clock."""
    wait_ns: int
    """In a DataLoader's `next`, on the thread that steps."""
    backwards: int
    """Outermost calls of `torch.autograd.backward`."""
    grads: int
    """Outermost calls of `torch.autograd.grad`."""
    own_ns: int
    """What the shim itself took."""
    optimizer: int
    """The number of the one that marked it."""
    before_ns: int = 0
    """From the end of the step before to the first backward: waiting for data, and the forward pass."""


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """What a process says of itself."""

    rank: int | None
    world_size: int | None
    rank_from: str
    """Who says so: `distributed` (torch.distributed, ranks that have met), `environment` (RANK, WORLD_SIZE), `none`."""
    local_rank: int | None
    """LOCAL_RANK of the environment."""
    backend: str | None
    """Of the default process group."""
    steps_before: int | None
    """Most steps that an optimizer had taken before its first here, where its state counts them and is on the host."""
    device_types: list[str]
    """Of the first parameter of each optimizer."""
    threads: int
    interop_threads: int
    cores: list[int]
    executable: str
    python: str
    torch: str
    cuda: str | None
    """The version that torch was built for, or HIP's."""
    cudnn: int | None
    nccl: str | None
    packages: dict[str, str]
    """Some packages that it has loaded, and their versions."""
    omp_num_threads: str | None
    cuda_visible_devices: str | None
    deterministic: bool
    cudnn_deterministic: bool
    cudnn_benchmark: bool
    matmul_precision: str | None


class Optimizer(msgspec.Struct, array_like=True, frozen=True):
    """Calls of an optimizer's `step`; beyond the first 16, of all those of a class."""

    number: int | None
    """In the order of their first outermost step; None: it only stepped within others', or stands for several."""
    name: str
    """Its class."""
    raw: int
    outermost: int
    """Those that were not within another optimizer's."""
    marks: int
    """Those of them that came first after a backward: the steps, if it alone marked them."""
    counted: int
    """The steps that it did mark."""


class Loader(msgspec.Struct, frozen=True, kw_only=True):
    """The DataLoaders of one dataset (by class and length), sampler, batch size and number of workers."""

    dataset: str
    length: int | None
    sampler: str
    batch_size: int | None
    """As its batch sampler says."""
    workers: int | None
    batches: int
    """That came while gradients were enabled."""
    batches_without_grad: int
    largest_batch: int | None
    """The largest first dimension of a batch."""
    backwards: int
    """Backwards before which at least one batch came since the last one: a training loader has as many as batches, or a
    fraction; one that is only evaluated has one per evaluation."""


class Changed(msgspec.Struct, array_like=True, frozen=True):
    """Which parameters of the optimizers are others after a step than after an earlier one, by all of their bits."""

    first: int
    """The earlier step."""
    last: int
    changed: int
    """How many of those that were seen."""
    seen: int
    """Parameters that are there at both steps, and of which this process has a part; at least one."""


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Peaks of torch's memory on a GPU."""

    index: int
    """As the process numbers them."""
    uuid: str | None
    name: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Sums since the process began."""

    monotonic_ns: int
    unix_ns: int
    steps: int
    backwards: int
    grads: int
    own_ns: int
    captured: int
    """Calls of `step` that only went into a CUDA graph, whose replays nobody sees."""
    whole_graph: bool
    """Whether torch.compile has traced a step with `fullgraph=True`, where nobody sees it."""
    optimizers: list[Optimizer]
    other_optimizers: int
    """Calls of those that were too many to tell apart."""
    loaders: list[Loader]
    memory: list[DeviceMemory]
    faults: int
    """Exceptions of the shim's own."""
    fault: str | None
    """The last of them."""
    collectives: int | None = None
    """Collective operations that it has begun, in all process groups of torch's; None where they don't say."""


class _Begin(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    node: str
    pid: int
    monotonic_ns: int
    unix_ns: int


class _Line(msgspec.Struct, frozen=True):
    begin: _Begin | None = None
    process: Process | None = None
    step: Step | None = None
    device: tuple[int, int] | None = None
    changed: Changed | None = None
    void: int | None = None
    state: State | None = None
    enough: int | None = None
    end: int | None = None


_DECODER = msgspec.json.Decoder(_Line)


@dataclass
class Journal:
    """What one process has written so far."""

    path: Path
    node: str = ""
    pid: int = 0
    process: Process | None = None
    steps: list[Step] = field(default_factory=list)
    device_ns: dict[int, int] = field(default_factory=dict)
    """Step → the GPU's time from the end of the step before to its end, where that is known."""
    state: State | None = None
    first_state: State | None = None
    """The first one after a step."""
    changed: Changed | None = None
    """None: it was not looked at, or could not be."""
    voided: int = 0
    """Calls that counted as steps until the first backward was seen."""
    enough: bool = False
    ended: bool = False
    """Whether its end was orderly."""
    unreadable: int = 0
    """Lines that can't be read."""
    _unix_minus_monotonic_ns: int = 0
    _read_bytes: int = 0

    @property
    def saw_backwards(self) -> bool:
        """Whether steps are told by backwards; without any, each outermost call of an optimizer's `step` counts."""
        return self.state is not None and self.state.backwards + self.state.grads > 0

    def unix_s(self, monotonic_ns: int) -> float:
        """The Unix time of an instant of the node's monotonic clock, by the clocks when the journal began."""
        return (monotonic_ns + self._unix_minus_monotonic_ns) / 1e9

    def read(self) -> bool:
        """Take in what was written since; whether that was anything. A torn last line waits for its end."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._read_bytes)
                written = file.read()
        except OSError:  # not there yet, or on a disk that is gone for a moment
            return False
        whole = written[: written.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for text in whole.splitlines():
            try:
                self._take(_DECODER.decode(text))
            except msgspec.DecodeError:
                self.unreadable += 1
        return bool(whole)

    def _take(self, line: _Line) -> None:
        if line.step:
            self.steps.append(line.step)
        elif line.device:
            self.device_ns[line.device[0]] = line.device[1]
        elif line.state:
            self.state = line.state
            self.first_state = self.first_state or (line.state if line.state.steps else None)
        elif line.process:
            self.process = line.process
        elif line.begin:
            self.node, self.pid = line.begin.node, line.begin.pid
            self._unix_minus_monotonic_ns = line.begin.unix_ns - line.begin.monotonic_ns
        elif line.void is not None:
            self.voided, self.steps, self.device_ns, self.enough = line.void, [], {}, False
            self.first_state = self.changed = None
        elif line.changed is not None:
            self.changed = line.changed
        elif line.enough is not None:
            self.enough = True
        elif line.end is not None:
            self.ended = True


class Journals:
    """All journals of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._journals: dict[Path, Journal] = {}

    def poll(self) -> list[Journal]:
        """Read what was written since; all journals, by name."""
        for path in self._folder.glob("*.jsonl"):
            self._journals.setdefault(path, Journal(path))
        for journal in self._journals.values():
            journal.read()
        return [self._journals[path] for path in sorted(self._journals)]
