"""What the table `ranks` holds of the processor time that others took from a rank."""

from __future__ import annotations

from parallelbench.store.columns import Column

PROCESSOR_SHARE = (
    Column(
        "others_time_s",
        "float64",
        "processor time that this rank's own cores gave to others in it: other programs, interrupts, the hypervisor",
        "s",
        null="it has no cores of its own (GPU ranks), or the kernel does not say",
    ),
    Column(
        "others_signed_time_s",
        "float64",
        "the same before it is cut off at 0: the kernel counts idle time in steps of 10 ms, so a short epoch's may be "
        "negative; those of many epochs add up",
        "s",
        null="likewise",
    ),
    Column(
        "stolen_time_s",
        "float64",
        "of that, what the hypervisor gave to other machines",
        "s",
        null="likewise",
    ),
    Column(
        "run_delay_s",
        "float64",
        "how long the training thread was ready to run in it, and had to wait for a core",
        "s",
        null="the kernel does not say",
    ),
)
"""Measured by `parallelbench.probes.processor_share`."""
