"""The numbers that `facts` and `summary` add to those of single runs."""

from __future__ import annotations

from parallelbench.results.tables import Column, Over, Show

PER_FACT = (
    Column("group", "string", "runs of the same work: only within it are runs compared", repeats=Over.SAME),
    Column(
        "configuration",
        "string",
        "strategy × devices",
        repeats=Over.SAME,
        heading="Configuration",
        tables=("configurations", "energy"),
        show=Show.CONFIGURATION,
        brief="configuration",
    ),
    Column(
        "variant",
        "string",
        "strategy, and the options in which it differs from others of its name",
        repeats=Over.SAME,
    ),
    Column(
        "exclusion",
        "string",
        "why the run doesn't count in comparisons of time and memory",
        null="it counts",
        heading="Excluded from comparisons",
        tables=("runs",),
        show=Show.EXCLUSION,
        beside=("exclusion_detail",),
    ),
    Column("exclusion_detail", "string", "the run's own reason for its exclusion", null="it has none"),
    Column(
        "displayed",
        "bool",
        "whether the numbers of its configuration are computed from it: it counts, or others disturbed it and none of "
        "its configuration counts",
    ),
    Column(
        "accuracy_target",
        "float64",
        "the accuracy of `report --target`; without it, the highest step of a fixed ladder of accuracies that more "
        "than half of each configuration's runs reach, found after training",
        "share",
        null="one configuration reaches no step of the ladder",
        repeats=Over.SAME,
        heading="Target",
        tables=("energy",),
    ),
    Column(
        "time_to_accuracy_s",
        "float64",
        "training time to accuracy_target",
        "s",
        null="no target, a repeat of the configuration never reaches it, or the run was resumed",
        repeats=Over.MEDIAN,
    ),
    Column(
        "energy_to_accuracy_j",
        "float64",
        "the GPUs' energy while training to accuracy_target",
        "J",
        null="no target, a repeat of the configuration never reaches it, or an epoch without energy",
        repeats=Over.MEDIAN,
        heading="GPU energy to the target accuracy",
        tables=("energy",),
    ),
)
"""What `facts` adds to the table `run` and to `per_run`."""

_INTERVAL = "end of the interval (95 %, or more where several verdicts are given) of"
_TOO_FEW = "too few pairs, or one device itself"
_NO_PAIR = "no pair of repeats"
PER_CONFIGURATION = (
    Column("outcomes", "string", "how the runs of this configuration ended"),
    Column("runs", "int32", "runs of this configuration"),
    Column("exclusions", "string", "how many runs don't count, by the reason", null="all count"),
    Column(
        "repeats",
        "int32",
        "runs that count: the numbers of this row are computed from them, or from disturbed ones where none counts",
        heading="Runs counted",
        show=Show.COUNTED,
        beside=("runs", "exclusions"),
        brief="runs",
    ),
    Column(
        "disturbed",
        "bool",
        "whether the numbers of this row are those of runs that others disturbed: they are shown, and compared with "
        "nothing",
    ),
    Column(
        "speed_up",
        "float64",
        "over one device, steady state: median over paired repeats of t_1 ÷ t_n (strong scaling) or of the ratio of "
        "throughputs (weak scaling); not the ratio of the medians",
        null=_NO_PAIR,
        heading="Speed-up and interval",
        show=Show.INTERVAL,
        beside=("speed_up_low", "speed_up_high"),
        brief="speed-up",
    ),
    Column("speed_up_low", "float64", f"lower {_INTERVAL} speed_up", null=_TOO_FEW),
    Column("speed_up_high", "float64", f"upper {_INTERVAL} speed_up", null=_TOO_FEW),
    Column("speed_up_pairs", "int32", "repeats that were paired"),
    Column(
        "verdict",
        "string",
        "faster or slower than one device; indistinguishable where the interval holds 1; too few repeats for one; "
        "not interleaved where the sides were measured apart; no repeat in common; "
        "disturbed where others took cores or GPUs of all runs of a side; "
        "not comparable where the environments differ in what must match",
        null=_NO_PAIR,
        heading="Against one device",
        show=Show.VERDICT,
        beside=("speed_up_pairs",),
    ),
    Column(
        "efficiency",
        "float64",
        "speed_up ÷ devices, 1 = ideal",
        "share",
        null=_NO_PAIR,
        heading="Efficiency, steady",
        brief="effi-\nciency",
    ),
    Column(
        "efficiency_with_startup",
        "float64",
        "the same with start-up: from total_time_s, under weak scaling from throughput_with_startup_samples_per_s",
        "share",
        null=_NO_PAIR,
        heading="Efficiency with start-up",
    ),
    Column(
        "energy_ratio",
        "float64",
        "energy per sample ÷ that of one device: median over paired repeats; below 1 takes less",
        null=_NO_PAIR,
        heading="Per sample, against one device, and interval",
        tables=("energy",),
        show=Show.INTERVAL,
        beside=("energy_ratio_low", "energy_ratio_high"),
    ),
    Column("energy_ratio_low", "float64", f"lower {_INTERVAL} energy_ratio", null=_TOO_FEW),
    Column("energy_ratio_high", "float64", f"upper {_INTERVAL} energy_ratio", null=_TOO_FEW),
    Column(
        "parity",
        "string",
        "runs that passed the parity check of those that were checked, how many were not, and of how many the closing "
        "check after training did not end",
        heading="Parity passed",
    ),
)
"""What is computed of each configuration, besides what aggregates its runs (`Column.repeats`)."""
