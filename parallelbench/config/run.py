"""One run: all its keys. Default values live in `conf/`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from msgspec import Meta, field

from parallelbench.config.sites import LauncherOptions, Site, expanded
from parallelbench.config.structure import Count, Name, Node, SlurmName
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from parallelbench.config.components import Data, Loader, Loss, LrSchedule, Metric, Model, Optimizer, Strategy


class Measure(Node, frozen=True, kw_only=True):
    """What is measured, and how."""

    parity: bool
    """Compare the strategy with single-device training before the timed part."""
    parity_steps: Annotated[int, Meta(ge=1, le=1000)]
    """Training steps of that comparison."""
    steps_sampled: Annotated[int, Meta(ge=0)]
    """Most steps per epoch with a row in `steps.parquet`, evenly spread."""
    steps_per_epoch: Annotated[int, Meta(ge=1)] | None
    """Steps after which each epoch stops; null: the whole epoch."""
    deterministic: bool
    """Use deterministic algorithms only (`torch.use_deterministic_algorithms`); slower."""
    detect_anomaly: bool
    """Let autograd name the operation that produced a NaN; much slower, for debugging."""
    waits: Literal["allowed", "error"] = "allowed"
    """error: end the run where, on GPUs, the host waits for a device within an epoch, but an attempt's first one."""
    probe: bool
    """Measure a matrix product and the memory's bandwidth before and after the training, on at most
    eight ranks of each node, about 0.3 s."""
    telemetry_hz: Annotated[float, Meta(ge=0, le=100)]
    """Samples of energy, power and load per second, 0.1 or more; 0: none."""
    attribution_steps: Annotated[int, Meta(ge=0, le=10_000)]
    """Steps trained after the last epoch to divide their time among phases (`phases`); 0: none."""
    trace: bool
    """After the last epoch, write a Chrome trace of a few more steps per rank into the attempt's folder."""


class Nccl(Node, frozen=True, kw_only=True):
    """How GPUs of several processes exchange messages; the defaults leave it to torch, NCCL and the site."""

    backend: Literal["default", "lazy", "legacy"] = "default"
    """torch's process group for CUDA tensors. default: "nccl" of the installed torch; lazy: "nccl-lazy", whose messages
    between different pairs of ranks overlap; legacy: "nccl" as it was before torch 2.15."""
    per_edge: bool = False
    """Give neighbouring stages of a pipeline a communicator of their own, one for each direction."""
    interface: SlurmName | None = None
    """Network interface of NCCL's sockets (NCCL_SOCKET_IFNAME), e.g. ib0; null: `site.network_interface`."""

    def variables(self) -> dict[str, str]:
        """Variables by which torch and NCCL learn these choices; torch reads them when it is imported."""
        chosen = {
            "TORCH_DIST_USE_NCCL2": "0" if self.backend == "legacy" else None,
            "TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P": "1" if self.per_edge else None,
            "NCCL_SOCKET_IFNAME": self.interface,
        }
        return {name: value for name, value in chosen.items() if value is not None}


Engine = Literal["none", "numpy", "torch", "arrow", "polars", "duckdb", "velox"]
ENGINES = tuple(str(name) for name in get_args(Engine) if name != "none")


class Preprocess(Node, frozen=True, kw_only=True):
    """What is done to the training set before the training, by an engine in a process of its own."""

    engine: Engine = "none"
    """The library that does it; none: nothing is done."""
    recipe: Literal["normalise", "filter", "subset", "statistics", "join", "sort"] | None = None
    """What is done. A run can train on the rows of filter, subset, join and sort; null: nothing."""
    threads: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Threads that the engine may use; on a CPU the cores of one device."""
    executions: Annotated[int, Meta(ge=1, le=1000)] = 1
    """How often it is done in the same process: the first execution is cold, the later ones are warm."""


class SweepBlock(Node, frozen=True, kw_only=True):
    """One part of a sweep: the product of `grid` and `zip`, less what `exclude` matches."""

    grid: dict[str, Any] = field(default_factory=dict)
    """Key → list of values (or one value): every combination."""
    zip: dict[str, list[Any]] = field(default_factory=dict)
    """Key → list of values, all of one length: taken side by side."""
    exclude: list[dict[str, Any]] = field(default_factory=list)
    """Combinations to leave out: each entry matches where all its keys have its values."""


class Sweep(Node, frozen=True, kw_only=True):
    """Which runs a sweep consists of."""

    name: Name
    """Name of the sweep's folder below `results`."""
    blocks: Annotated[list[SweepBlock], Meta(min_length=1)]
    """The sweep is the union of its blocks. Each has `grid`, key → list of values, for every combination; `zip`, the
    same, taken side by side; and `exclude`, a list of combinations to leave out."""
    repeats: Count
    """How often each configuration is measured; repeat r trains with `seed + r`."""
    order: Literal["interleaved", "listed"]
    """interleaved: rounds come in pairs, a drawn order of all configurations and its reverse. listed: as written, which
    gets no verdict: one side always comes first."""
    unfit: Literal["refused", "left_out"] = "refused"
    """What becomes of configurations that are refused: refused: so is the sweep as a whole. left_out: each is left out,
    with a line that says why."""
    baseline: Annotated[str, Meta(min_length=1)] | None = None
    """The configuration that reports compare the others with, as they call it, e.g. "fsdp × 4" or "fsdp x 4". null: one
    device where it counts, else the first one on the fewest devices. `report --baseline` takes another one."""


class Settings(Node, frozen=True, kw_only=True):
    """The keys of a run that are not components."""

    devices: Count
    """Devices in total, over all nodes."""
    nodes: Count | None
    """Nodes the devices are spread over, evenly. null: with launcher=slurm as few as `site.devices_per_node` allows,
    else this machine. Runs have, and are told apart by, the number."""
    device: Literal["auto", "cpu", "cuda"]
    """Kind of device; auto: CUDA where there is any, else CPU."""
    cores_per_device: Count
    """On a CPU, a device is this many pinned cores."""
    epochs: Annotated[int, Meta(ge=0, le=1_000_000)]
    """Passes over the training set; 0: preprocess only, without a model."""
    batch_size: Count
    """Global batch under strong scaling, batch per device under weak scaling."""
    clip_norm: Annotated[float, Meta(gt=0)] | None = None
    """Scale gradients down where their norm, over all parameters and ranks, exceeds this; null: never."""
    scaling: Literal["strong", "weak"]
    """strong: the global batch stays fixed as devices are added. weak: the batch per device does."""
    precision: Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
    """Arithmetic of forward and backward; parameters stay fp32 (fp64 under fp64). fp32 uses no TF32, neither in
    products nor in convolutions, where torch allows it by default; tf32 uses it in both; bf16 and fp16 are autocast,
    and fp16 scales the loss."""
    channels_last: bool
    """Store images and convolution weights channels last."""
    compile: bool
    """Compile with `torch.compile` what `compile_scope` names."""
    compile_scope: Literal["model", "step"] = "model"
    """model: forward and backward of the model. step: also the loss and the optimizer's update."""
    activation_recomputation: Literal["none", "selective", "full"] = "none"
    """What backward computes again instead of keeping it. full: every layer but the last. selective: attention between
    its linear layers (Korthikanti et al. 2022, arXiv 2205.05198)."""
    graph: bool = False
    """Replay each training step as one CUDA graph, so that the host launches it at once; of some strategies on GPUs."""
    cudnn_benchmark: bool = False
    """Let cuDNN time its algorithms for each shape and take the fastest, on GPUs."""
    seed: Annotated[int, Meta(ge=0, lt=2**31)]
    """Seed of initialisation, permutation and augmentation."""
    repeat: Annotated[int, Meta(ge=0, lt=100_000)]
    """Number of this repetition of the configuration; it trains with `seed + repeat`."""
    results: Annotated[str, Meta(min_length=1)]
    """Folder that holds the sweeps' folders."""
    nccl: Nccl = Nccl()
    """How GPUs of several processes exchange messages."""
    preprocess: Preprocess = Preprocess()
    """What is done to the training set first."""
    measure: Measure
    site: Site


class RunConfig(Settings, frozen=True, kw_only=True):
    """One run: the content of `config.yaml` in a run folder."""

    nodes: Count
    """As chosen, or as `nodes_of` finds."""
    model: Model
    data: Data
    strategy: Strategy
    optimizer: Optimizer
    lr_schedule: LrSchedule
    loss: Loss
    metric: Metric
    loader: Loader
    launcher: LauncherOptions
    sweep_name: Name = "adhoc"
    """The sweep it belongs to: the name of the folder above the run folder."""
    sweep_place: Annotated[int, Meta(ge=0)] = 0
    """The place of its configuration in the sweep's file, by which reports choose among equals."""
    sweep_baseline: str | None = None
    """`sweep.baseline`."""
    plugin_sources: str = ""
    """Whose sources train, as `package@hash`: a part of the run id. Empty: the suite's alone, or not recorded."""

    def __post_init__(self) -> None:
        """Check what involves several fields."""
        if self.devices % self.nodes:
            below = self.devices - self.devices % self.nodes
            nearest = " or ".join(f"devices={each}" for each in (below, below + self.nodes) if each)
            spread = max(each for each in range(1, self.nodes) if self.devices % each == 0)
            raise ConfigError(
                f"devices={self.devices} can't be spread evenly over nodes={self.nodes}: choose {nearest}, or "
                f"nodes={spread}"
            )

    @property
    def effective_seed(self) -> int:
        """Seed of this repetition: all strategies of one repeat share it."""
        return self.seed + self.repeat

    @property
    def logits_per_label(self) -> int:
        """A language model's vocabulary, which may be larger than the data's, or the data's classes."""
        return self.model.anatomy().vocabulary.entries or self.data.num_classes

    @property
    def metric_size(self) -> int:
        """How many sums the metric has; 0: none is measured."""
        return self.metric.size(self.logits_per_label)

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step, over all devices."""
        return self.batch_size * (self.devices if self.scaling == "weak" else 1)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch; the tail that fills no global batch is dropped."""
        full = self.data.train_samples // self.global_batch_size
        return min(full, self.measure.steps_per_epoch or full)

    def rate_factor(self, step: int) -> float:
        """What the learning rate is multiplied by in a training step, counted from 1; 1 in steps after the last epoch.

        The closing check and the attribution take such steps: at rates near 0 nobody could see an update.
        """
        return self.lr_schedule.factor(step, self) if step <= self.epochs * self.steps_per_epoch else 1.0

    @property
    def compiles_step(self) -> bool:
        """Whether the loss and the optimizer's update are compiled, not the model alone."""
        return self.compile and self.compile_scope == "step"

    @property
    def sweep_folder(self) -> Path:
        """The folder of the sweep: the parent of the run's own."""
        return expanded(self.results, "results") / self.sweep_name


def nodes_of(devices: int, launcher: LauncherOptions, site: Site) -> int:
    """Nodes of a run that leaves their number open; raises `ConfigError` where devices can't be spread over them."""
    nodes, each = launcher.fewest_nodes(devices, site), site.devices_per_node
    if devices % nodes == 0:
        return nodes
    below = each * (devices // each)  # whole nodes
    most = range(nodes, devices + 1)
    near = [count for count in range(below, below + each + 1) if count % launcher.fewest_nodes(count, site) == 0]
    nearest = [max(count for count in near if count < devices), min(count for count in near if count > devices)]
    spread = next(count for count in most if devices % count == 0)
    raise ConfigError(
        f"devices={devices} need {nodes} nodes of site={site.name}, which has site.devices_per_node={each}, and can't "
        f"be spread evenly over them: choose devices={nearest[0]} or devices={nearest[1]}, or nodes={spread}"
    )


def own_reference(run: RunConfig) -> Strategy | None:
    """The reference of the strategy's author, which stands in for one device; None: one device, or nothing, does."""
    return None if run.strategy.equals_one_device(run) else run.strategy.reference(run)
