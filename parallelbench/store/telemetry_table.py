"""What is sampled of devices and hosts: the columns of the table `telemetry`, and what an epoch holds of them."""

from __future__ import annotations

from parallelbench.store.columns import KEYS, Column, Over, Show

_NO_GPU = "not sampled of all the run's GPUs for the whole window"
_NO_HOST = "not sampled for the whole window"

GPU_AND_HOST = (
    Column(
        "gpu_energy_j",
        "float64",
        "energy of all the run's GPUs, each once, from the first rank's start of training to the last rank's end",
        "J",
        null=f"{_NO_GPU}; telemetry_flags may say why",
        into=(
            Column(
                "gpu_energy_per_epoch_j",
                "float64",
                "energy of all the run's GPUs in an epoch's training window: median over the epochs that have one, "
                "without each attempt's first one",
                "J",
                null="no GPU, or no telemetry of all of them",
                over=Over.MEDIAN,
                steady=True,
                repeats=Over.MEDIAN,
                heading="GPU energy per epoch",
                tables=("energy",),
            ),
        ),
    ),
    Column(
        "gpu_power_mean_w",
        "float64",
        "mean power of all these GPUs together in that window",
        "W",
        null=_NO_GPU,
        into=(
            Column(
                "steady_gpu_power_mean_w",
                "float64",
                "mean power of all the run's GPUs together: median over the epochs without each attempt's first one",
                "W",
                null="no GPU, or no telemetry of all of them",
                over=Over.MEDIAN,
                steady=True,
                repeats=Over.MEDIAN,
                heading="Power, all GPUs",
                tables=("energy",),
            ),
        ),
    ),
    Column(
        "gpu_power_max_w",
        "float64",
        "highest power sampled of one GPU in that window",
        "W",
        null=_NO_GPU,
        into=(
            Column(
                "steady_gpu_power_max_w",
                "float64",
                "highest power sampled of one GPU in any epoch but each attempt's first one",
                "W",
                null="no GPU, or no telemetry of all of them",
                over=Over.MAX,
                steady=True,
                repeats=Over.MAX,
                heading="Highest power of one GPU",
                tables=("energy",),
            ),
        ),
    ),
    Column("gpu_utilization_mean", "float64", "mean share of time in which a kernel ran", "share", null=_NO_GPU),
    Column(
        "gpu_memory_used_max_bytes",
        "int64",
        "most memory sampled in use on one GPU, by all processes",
        "bytes",
        null=_NO_GPU,
    ),
    Column(
        "gpu_processes_max",
        "int64",
        "most processes sampled at a time that computed on one GPU; the run itself has one on each",
        null=_NO_GPU,
    ),
    Column(
        "gpu_throttle_reasons",
        "int64",
        "all sampled reasons for lower clocks (bits: nvmlClocksEventReason…)",
        null=_NO_GPU,
        into=(
            Column(
                "steady_gpu_throttle_reasons",
                "int64",
                "all sampled reasons for lower clocks in any epoch but each attempt's first one (bits: "
                "nvmlClocksEventReason…)",
                null="no GPU, or no telemetry of all of them",
                over=Over.BITS,
                steady=True,
            ),
        ),
    ),
    Column("gpu_clock_mean_hz", "float64", "mean clock of the GPUs' SMs", "Hz", null=_NO_GPU),
    Column("gpu_temperature_max_c", "float64", "highest temperature sampled of one GPU", "°C", null=_NO_GPU),
    Column(
        "cpu_energy_j",
        "float64",
        "energy of all the nodes' processors in that window (RAPL)",
        "J",
        null=f"not readable, or {_NO_HOST}",
        into=(
            Column(
                "cpu_energy_per_epoch_j",
                "float64",
                "energy of the nodes' whole processors, other programs' work included (RAPL), in an epoch's training "
                "window: median over the epochs without each attempt's first one",
                "J",
                null="not readable",
                over=Over.MEDIAN,
                steady=True,
                repeats=Over.MEDIAN,
                heading="Processors' energy per epoch",
                tables=("energy",),
            ),
        ),
    ),
    Column(
        "cpu_clock_mean_hz", "float64", "mean clock of all the nodes' cores, read once a second", "Hz", null=_NO_HOST
    ),
    Column(
        "host_memory_used_max_bytes",
        "int64",
        "most memory sampled in use on one node, by all processes",
        "bytes",
        null=_NO_HOST,
    ),
    Column(
        "network_sent_bytes",
        "int64",
        "sent by all processes of the nodes in that window, without the loopback interface and RDMA; sum over nodes",
        "bytes",
        null=_NO_HOST,
    ),
    Column("network_received_bytes", "int64", "received, likewise", "bytes", null=_NO_HOST),
    Column(
        "telemetry_flags",
        "string",
        "short: the window is under 2 s, so energies are not to be trusted; sparse: samples more than 1 s apart; "
        "from_power: energy integrated from power, since there is no counter; and why an energy is null: reset: the "
        "counter began anew; incomplete: no sample before or after the window",
        null="no flag",
        into=(
            Column(
                "energy_flags",
                "string",
                "flags of the energies of the epochs without each attempt's first one: short, sparse, from_power, "
                "reset, incomplete, see telemetry_flags",
                null="no flag",
                over=Over.FLAGS,
                steady=True,
                repeats=Over.FLAGS,
                heading="Flags",
                tables=("energy",),
                show=Show.PLAIN,
            ),
        ),
    ),
)
"""What `epochs` holds of them."""

WARNING = "telemetry_warning"
"""The event of a journal that gives the reason for a null."""
_NOT_READ = "the device or its driver does not say"
TELEMETRY = (
    *KEYS,
    Column("node", "string", "host name"),
    Column("device_uuid", "string", "the GPU that was sampled", null="the host itself was"),
    Column("time", "float64", "Unix time of the sample", "s"),
    Column(
        "energy_j",
        "float64",
        "energy counter: of a GPU since its driver was loaded, of a host's processors (RAPL) since an arbitrary moment",
        "J",
        null=_NOT_READ,
    ),
    Column("power_w", "float64", "power of a GPU, instantaneous where the driver has that", "W", null=_NOT_READ),
    Column("utilization", "float64", "recent share of time in which a kernel ran", "share", null=_NOT_READ),
    Column("memory_used_bytes", "int64", "memory in use, by all processes", "bytes", null=_NOT_READ),
    Column(
        "clock_hz",
        "float64",
        "clock of a GPU's SMs; mean clock of a host's cores, once in 10 samples",
        "Hz",
        null=_NOT_READ,
    ),
    Column("temperature_c", "float64", "temperature of a GPU", "°C", null=_NOT_READ),
    Column("throttle_reasons", "int64", "reasons for a GPU's lower clocks (bits)", null=_NOT_READ),
    Column("processes", "int64", "processes that compute on a GPU", null=_NOT_READ),
    Column(
        "network_sent_bytes",
        "int64",
        "sent by a host since it started, without the loopback interface and RDMA",
        "bytes",
        null=_NOT_READ,
    ),
    Column("network_received_bytes", "int64", "received, likewise", "bytes", null=_NOT_READ),
)
