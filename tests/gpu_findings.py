"""What reading the CUDA and NCCL paths against torch 2.15 found, and the scripted device after it (the last one); and
what shows that it is mended.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One finding: of a desk check, or of the first GPU."""

    what: str
    mended: str
    tests: tuple[str, ...]
    gpu_check: str
    """The line of gpu-check that will show it where there is a GPU; empty: no GPU is needed."""


FINDINGS = (
    Finding(
        "the newer NCCL backend lacks a private method by which groups of meshes got the run's timeout",
        "the public one is called",
        ("tests/strategies/test_fused_updates.py::test_every_installed_process_group_takes_a_timeout",),
        "one rank, sharded",
    ),
    Finding(
        "SGD and Adagrad have no fused update of sharded parameters",
        "`auto` takes foreach there; `fused` is refused",
        (
            "tests/strategies/test_fused_updates.py::test_what_is_fused_is_what_torch_can_fuse",
            "tests/strategies/test_fake_groups.py::test_a_selection_of_all_sizes_optimizers_and_precisions_trains",
        ),
        "one rank, sharded",
    ),
    Finding(
        "a rank that hangs was called killed",
        "the words of both NCCL backends are known",
        ("tests/launch/test_outcome.py",),
        "a rank that hangs",
    ),
    Finding(
        "gpu-check failed where a strategy waits by design",
        "the strategy says why, and no wait is looked for",
        ("tests/test_gpu_check.py::test_runs_on_gpus_never_wait_but_by_design",),
        "strategy parameter_server",
    ),
    Finding(
        "all messages of a rank to its peers share one queue",
        "`nccl.backend` and `nccl.per_edge` are the run's choices, recorded, and compared by `compare --by`",
        (
            "tests/test_gpu_choices.py::test_what_torch_and_nccl_are_told",
            "tests/test_gpu_choices.py::test_the_process_group_is_the_one_that_was_chosen",
            "tests/test_gpu_choices.py::test_runs_are_compared_by_backend",
        ),
        "nccl.backend=lazy",
    ),
    Finding(
        "one GPU that fell off the bus broke everybody's attempts on its node",
        "it keeps its place, and only runs that need it are refused",
        ("tests/test_devices.py::test_a_lost_gpu_of_another_job_disturbs_nobody",),
        "a rank that hangs",
    ),
    Finding(
        "`loader=arrow` opened a context of every rank on GPU 0",
        "its thread chooses the rank's device first",
        ("tests/test_scripted_cuda.py::test_the_loaders_thread_chooses_its_ranks_device_first",),
        "whole run on all devices, loader=arrow",
    ),
    Finding(
        "load of other jobs on a shared node was taken for the run's",
        "it is held against all cores, and processes on the run's GPUs are counted",
        ("tests/test_devices.py::test_gpus_that_others_compute_on_are_named",),
        "nccl.backend=lazy",
    ),
    Finding(
        "`tune=true` judged 2 ms on a GPU",
        "at least 0.5 s are timed, after as many steps as wake the device",
        (
            "tests/test_scripted_cuda.py::test_a_trial_on_a_gpu_times_long_enough",
            "tests/test_cuda_parts.py::test_a_trial_on_a_gpu_is_told_to_time_long_enough",
        ),
        "whole run on all devices, loader=arrow",
    ),
    Finding(
        "a step of a small model was 33 operations, 8 of them metrics",
        "24, and 12 for the sums of 64 steps; `graph=true` replays a step as one",
        (
            "tests/strategies/test_launches.py::test_a_step_of_a_small_model_is_few_launches_and_none_that_waits",
            "tests/strategies/test_captured.py::test_a_captured_step_trains_as_if_it_were_not",
        ),
        "launches per step",
    ),
    Finding(
        "FSDP gathered fp32 under bf16; ranks floated over sockets; a reference that did not fit kept its memory",
        "`strategy.gather=bf16`; ranks stay on their GPU's NUMA node; the reference is let go",
        (
            "tests/strategies/test_sharded.py::test_gathering_in_bf16_sends_half_and_trains_alike",
            "tests/test_devices.py::test_a_rank_is_pinned_beside_its_gpu",
            "tests/test_scripted_cuda.py::test_a_reference_that_does_not_fit_leaves_its_memory",
        ),
        "strategy fsdp",
    ),
    Finding(
        "a driver that is too old ended every run as an error",
        "`plan`, `doctor` and the job's first seconds say so, and `make install` before it fetches a wheel",
        (
            "tests/test_devices.py::test_a_driver_too_old_for_torch_is_named_before_anything_starts",
            "tests/launch/test_installation.py::"
            "test_a_driver_too_old_for_the_wheel_is_told_which_one_fits_before_anything_is_fetched",
        ),
        "strategy fsdp",
    ),
    Finding(
        "under `graph=true`, `ddp` ended as not like one device: nobody can count the bytes of a replay",
        "bytes are not counted there, and the result says so",
        ("tests/strategies/test_captured.py::test_a_replayed_all_reduce_is_counted_by_nobody_and_no_fault",),
        "strategy ddp",
    ),
    Finding(
        "gpu-check ended strategies whose ranks compile one after the other: others waited for 60 s only",
        "they wait for 240 s, and the run that failed is the one that is named",
        (
            "tests/test_gpu_check.py::test_ranks_wait_for_others_that_compile",
            "tests/test_gpu_check.py::test_ranks_that_fail_or_hang_are_reported",
        ),
        "strategy model_parallel",
    ),
    Finding(
        "`model_parallel` ended after its first epoch: a checksum added numbers of two GPUs",
        "numbers of one device are added at a time; CUDA tensors without values hold each check to it",
        ("tests/strategies/test_several_devices.py::test_nothing_adds_numbers_of_two_devices",),
        "strategy model_parallel",
    ),
    Finding(
        "`model.norm=sync` took 32 launches forward and 37 backward",
        "torch's own kernels take 7 and 3, messages apart, and compute on one rank what plain norms do",
        (
            "tests/models/test_norms.py::test_torchs_kernels_take_few_launches_and_their_messages_are_counted",
            "tests/models/test_norms.py::test_a_group_equals_batch_norm_on_the_whole_batch",
        ),
        "norm=sync on one rank",
    ),
    Finding(
        "each block computed the tables of rotary positions twice in each pass",
        "the layers of a model share them, and compute them in their first pass",
        ("tests/models/test_gpt.py::test_rotary_tables_are_computed_in_a_models_first_pass_only_and_fit_each_pass",),
        "no waits: gpt_tiny with rotary positions",
    ),
    Finding(
        "torch 2.11 has no fused Adagrad for GPUs, and the suite asked for it (seen on the first GPU)",
        "`auto` takes foreach there; `fused`, and what needs it, are refused",
        ("tests/strategies/test_fused_updates.py::test_an_adagrad_of_torch_2_11_is_not_fused_on_gpus",),
        "no waits: adagrad",
    ),
    Finding(
        "the parity check of a large language model took twice the memory of its training, and more",
        "a smaller model of its kind is checked, which the strategy cuts alike; the run says so",
        (
            "tests/advisor/test_parity_memory.py::test_the_check_of_a_large_model_fits_where_its_training_does",
            "tests/advisor/test_parity_memory.py::test_the_check_takes_no_more_memory_than_the_training",
            "tests/strategies/test_excerpt.py::test_a_wrong_strategy_is_caught",
        ),
        "",
    ),
    Finding(
        "context parallelism computed attention in plain products: up to 939 launches of a forward pass, moving 54 GB",
        "torch's fused kernels, merged by their log-sum-exps",
        ("tests/strategies/test_attention_blocks.py",),
        "attention of blocks, bf16",
    ),
    Finding(
        "the parity check of L-BFGS took all of the training set in fp64, several times its training's memory",
        "it takes the first samples, as many as other checks",
        ("tests/strategies/test_excerpt.py::test_a_training_set_that_is_one_batch_is_checked_by_its_first_samples",),
        "",
    ),
)
"""By the desk check's numbers, 1 to 12; then what was found since."""
BAD_INPUT = {
    "a driver too old for torch": (
        "tests/launch/test_bad_gpus.py::test_the_attempt_has_an_outcome_and_is_not_tried_again"
    ),
    "a GPU of another job, in use": (
        "tests/launch/test_bad_gpus.py::test_the_attempt_has_an_outcome_and_is_not_tried_again"
    ),
    "a lost GPU": "tests/test_devices.py::test_a_lost_gpu_of_the_run_is_refused_with_the_remedy",
    "MIG slices": "tests/test_devices.py::test_slices_of_a_gpu_are_one_device",
    "fewer GPUs than the site says": "tests/slurm/test_workers.py::test_fewer_gpus_than_planned",
    "a network interface that is not there": (
        "tests/test_gpu_choices.py::test_an_interface_that_is_not_there_ends_the_attempt_with_its_name"
    ),
    "GPUs of several types in one job": (
        "tests/launch/test_bad_gpus.py::test_types_that_differ_between_nodes_are_refused_by_all_ranks"
    ),
}
"""What gets one line, an outcome, and no second try → a test."""
BY_CONSTRUCTION = {
    "24 operations at most in a step of `single` in fp32, none of which waits (on an H200 35.5 kernels)": (
        "tests/strategies/test_launches.py::test_a_step_of_a_small_model_is_few_launches_and_none_that_waits",
        "launches per step",
    ),
    "a step as one CUDA graph (`graph=true`) trains alike, and is refused where it can't be": (
        "tests/strategies/test_captured.py::test_what_can_not_be_captured_is_refused_with_the_reason",
        "captured steps (graph=true)",
    ),
    "a language model's step takes at most 1.1 times the launches of one written by hand": (
        "tests/strategies/test_launches.py::test_a_step_of_a_language_model_is_few_launches_beside_one_written_by_hand",
        "",
    ),
    "a language model is compiled as one graph": (
        "tests/strategies/test_compile.py::test_a_language_model_is_compiled_whole",
        "",
    ),
    "captured steps of language models train alike": (
        "tests/strategies/test_captured.py::test_gpu_check_holds_captured_steps_of_language_models_against_others",
        "captured steps of gpt",
    ),
    "the loss and the update compiled (`compile_scope=step`) train alike, under every strategy that compiles": (
        "tests/strategies/test_compile.py::test_a_compiled_strategy_trains_like_one_device",
        "no waits: compile_scope=step, adam",
    ),
    "what can't be compiled is refused": (
        "tests/strategies/test_compile.py::test_what_can_not_be_compiled_is_refused_with_the_reason",
        "",
    ),
    "`cudnn_benchmark` is the run's choice, and refused where it would change nothing": (
        "tests/test_gpu_choices.py::test_choices_that_would_change_nothing_are_refused",
        "",
    ),
    "FSDP gathers bf16 (`strategy.gather=bf16`)": (
        "tests/strategies/test_sharded.py::test_gathering_in_bf16_sends_half_and_trains_alike",
        "strategy fsdp",
    ),
    "ranks stay on the cores of their GPU's NUMA node": (
        "tests/test_devices.py::test_ranks_of_gpus_stay_on_their_numa_node",
        "",
    ),
    "NCCL's backend, communicators per edge and interface are recorded, and compared by `compare --by`": (
        "tests/test_gpu_choices.py::test_runs_are_compared_by_backend",
        "nccl.per_edge=true",
    ),
    "GPUs without peer access are named": (
        "tests/test_devices.py::test_gpus_without_peer_access_are_named",
        "",
    ),
    "`doctor site=…` holds a site against the cluster before the first job": (
        "tests/launch/test_slurm.py::test_doctor_holds_a_site_against_the_cluster",
        "",
    ),
    "NVML's answers, lost GPUs and old drivers, played back": (
        "tests/telemetry/test_nvml.py::test_a_gpu_that_falls_off_the_bus_leaves_nulls_and_one_warning",
        "NVML's readings",
    ),
    "a check that failed is repeated alone; the table is made for an issue": (
        "tests/test_gpu_check.py::test_after_a_failure_only_what_has_not_passed_is_repeated",
        "",
    ),
}
"""What is asked of the GPU path besides → a test, and a line of gpu-check (empty: no GPU is needed)."""
