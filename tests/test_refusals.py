"""What is refused, with the key that is named; and what a refusal proposes works: all checks accept it."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from launch.checks import prepare_all
from launch.launcher import launcher_of
from launch.sweep import expand, one_run
from launch.sweep.compose import group_choices
from parallelbench.config import run_rules
from parallelbench.config.rule import Refusal
from parallelbench.config.run import RunConfig
from parallelbench.config.run_rules import UnfitError, check_run
from parallelbench.errors import MOST_REFUSALS, ConfigError, Refusals
from tests.docs import OPTIMIZERS, model_and_devices
from tests.test_cli import here

__all__ = ["here"]

CORES = len(os.sched_getaffinity(0))
TWO = "strategy=ddp devices=2 launcher.oversubscribe=true"
SLURM = "launcher=slurm site=local_cluster"
REFUSED: list[tuple[str, str, str, str]] = [
    # keys
    ("epohcs=2", "", "epohcs is not a key: did you mean epochs? valid: epochs, ", "epochs=2"),
    ("optimizer.lrr=1,2", "", "optimizer.lrr is not a key: did you mean lr?", "optimizer.lr=1,2"),
    ("optimizer.momentumm=0.5", "", "momentumm is not a key: did you mean optimizer.momentum, a key of optimizer=sgd?",
     "optimizer.momentum=0.5 optimizer=sgd"),
    ("optimizer.gamma=0.5", "", "optimizer.gamma is not a key: valid: ", ""),
    ("optimizer.beta=0.5", "", "optimizer.beta is not a key: did you mean beta", "optimizer.beta1=0.5"),
    ("epochs.x=1,2", "", "epochs.x is not a key", ""),
    ("+foo=1", "", "foo is not a key", ""),
    ("lr=0.1", "", "lr is not a key: did you mean optimizer.lr?", "optimizer.lr=0.1"),
    ("repeats=3", "", "repeats is not a key: did you mean sweep.repeats?", "sweep.repeats=3"),
    ("micro_batches=2", "",
     "did you mean strategy.micro_batches, a key of strategy=", f"strategy.micro_batches=2 {TWO}"),
    ("strategy.micro_batches=2", "",
     "is not a key of strategy=single, but of strategy=", f"strategy.micro_batches=2 {TWO}"),
    ("strategy.bucket_mib=1,2", "strategy=ddp,fsdp devices=2",
     "of strategy=fsdp, but of strategy=context_parallel,ddp,", ""),
    ("optimizer.learning_rate=0.1", "", "did you mean optimizer.lr?", "optimizer.lr=0.1"),
    ("learning_rate=0.1", "", "did you mean optimizer.lr?", "optimizer.lr=0.1"),
    ("gradient_checkpointing=full", "model=gpt_tiny data=synthetic",
     "did you mean activation_recomputation?", "data=text activation_recomputation=full"),
    ("num_gpus=1", "", "did you mean devices?", "devices=1"),
    ("gradient_accumulation_steps=2", TWO,
     "did you mean strategy.micro_batches?", "strategy.micro_batches=2"),
    ("num_workers=2", "", "did you mean loader.workers, a key of loader=", "loader=dataloader loader.workers=2"),
    ("experiment=x", "", "needs a folder experiment/ of your own: name the folder that it lies in with --conf", ""),
    # choices
    (f"model={'k' * 300}", "", f"model={'k' * 40}… is no choice: valid: ", ""),
    ("model=cnn_smal", "", "model=cnn_smal is no choice: did you mean cnn_small?", "model=cnn_small"),
    ("precision=fp31", "", "precision=fp31 is no choice: did you mean fp32?", "precision=fp32"),
    ("model=null", "", "model=None is no choice", ""),
    ("sweep=demo,adhoc", "", "choose one at a time", ""),
    # values
    ("epochs=many", "", "epochs='many' is not valid: expected `int`", ""),
    ("epochs=0", "", "epochs=0 trains nothing without preprocess.engine: choose epochs=1", "epochs=1"),
    ("epochs=-1", "", "epochs=-1 is not valid: expected `int` >= 0", ""),
    ("measure.telemetry_hz=0.01", "",
     "measure.telemetry_hz=0.01 is less than one sample in ten seconds: choose ", "measure.telemetry_hz=0.1"),
    ("launcher.collective_timeout_s=inf", "", "is not valid: expected a finite number", ""),
    ("sweep.repeats=0", "", "sweep.repeats=0 is not valid: expected `int` >= 1", "sweep.repeats=1"),
    ("sweep.name=../up", "", "sweep.name='../up' is not valid: expected 1 to 64 letters, digits, dots, dashes", ""),
    ("sweep.name=nan", "", """'sweep.name="…"'""", 'sweep.name="nan"'),
    ("launcher.timeout_s=nan", "", "launcher.timeout_s=nan is not valid: expected `float` > 0", ""),
    ("launcher.time_limit_min=1:30:00", SLURM, "launcher.time_limit_min=90", "launcher.time_limit_min=90"),
    ("launcher.time_limit_min=16:30", SLURM, "launcher.time_limit_min=17", ""),
    ("launcher.timeout_s=1:30:00", "", "launcher.timeout_s=5400", "launcher.timeout_s=5400"),
    ("sweep.name=2026", "", """'sweep.name="…"'""", 'sweep.name="2026"'),
    ("results=mü", "", """quote it: 'results="mü"'""", 'results="mü"'),
    ("results=", "", "results='' is not valid: expected `str` of length >= 1", ""),
    ("results=" + "x" * 300, "", "results=xxx", ""),
    ("results=$NOT_SET_HERE/x", "", "results=$NOT_SET_HERE/x: $NOT_SET_HERE is not set", ""),
    ("results=${NOT_SET_HERE}/x", "", "an environment variable is $NAME, without braces", ""),
    ("site.data_dir=nowhere", "data=mnist", "`parallelbench prepare data=mnist site.data_dir=/", ""),
    ("model._target_=os.system", "", "model._target_='os.system' is refused", ""),
    ("strategy._target_=parallelbench.errors.ConfigError", "", "is refused: it is no strategy", ""),
    # what Hydra reads, and what it is not asked for
    ("epochs", "", "'epochs'", "epochs=1"),
    ("train.py", "", "a program of your own is measured by program='python train.py'", ""),
    ("demo", "", "did you mean sweep=demo?", "sweep=demo"),
    ("~sweep", "", "~sweep would delete a key", ""),
    ("~repeat", "", "set repeat=VALUE; `parallelbench help repeat`", "repeat=1"),
    ("epochs=range(1,1000000000)", "", "10000 values", ""),
    ("devices=interval(0,1)", "", "write devices=A,B,C", ""),
    ("epochs=1,range(2,4)", "", "write epochs=A,B,C", "epochs=1,2,3"),
    ("hydra.run.dir=x", "", "a setting of Hydra's, which composes here, but starts nothing: ", "results=x"),
    ("hydra.sweeper.x=1", "", "a list of values is a sweep by itself (devices=1,2)", ""),
    ("epochs=${hydra:runtime.cwd}", "", "write the value itself", ""),
    # blocks
    ("sweep.blocks=[]", "", "sweep.blocks=[] is not valid: expected a list of length >= 1", ""),
    ("sweep.blocks=[{grids:{epochs:[1]}}]", "",
     "grids is not a key: did you mean grid?", "sweep.blocks=[{grid:{epochs:[1]}}]"),
    ("sweep.blocks=[{grid:{epohcs:[1]}}]", "", "did you mean epochs?", "sweep.blocks=[{grid:{epochs:[1]}}]"),
    ("sweep.blocks=[{grid:{model:[nothing]}}]", "", "model=nothing is no choice", ""),
    ("sweep.blocks=[{grid:{model:[[mlp]]}}]", "",
     "is no choice: did you mean mlp?", "sweep.blocks=[{grid:{model:[mlp]}}]"),
    # this machine
    ("devices=1000", "strategy=ddp", f"choose devices={CORES} or fewer", f"devices={CORES}"),
    ("cores_per_device=1000", "", f"choose cores_per_device={CORES} or fewer", f"cores_per_device={CORES}"),
    ("device=cuda", "", "device=cuda, but this machine shows no CUDA device", "device=cpu"),
    ("nodes=2", TWO, "choose nodes=1", "nodes=1"),
    ("devices=3", "strategy=ddp nodes=2", "nodes=2: choose devices=2 or devices=4, or nodes=1", ""),
    ("devices=1", "strategy=single nodes=2", "nodes=2: choose devices=2, or nodes=1", ""),
    ("batch_size=33", TWO, "2 equal parts by strategy=ddp on devices=2: choose batch_size=32 or 34", "batch_size=34"),
    ("batch_size=32,33", TWO, "32 or 34; the other runs could start without it", "batch_size=32,34"),
    ("model=logistic_regression", "devices=2 strategy=model_parallel",
     "it has 1 layer (fc1): choose model=cnn", "model=cnn"),
    ("precision=tf32", "device=cpu", "choose precision=fp32", "precision=fp32"),
    # a cluster
    ("nodes=1", f"{SLURM} strategy=ddp devices=8",
     "8 a node, but site=local_cluster has site.devices_per_node=4: choose nodes=2", "nodes=2"),
    ("devices=5", f"{SLURM} strategy=ddp batch_size=60",
     "devices=5 need 2 nodes of site=local_cluster, which has site.devices_per_node=4, and can't be spread evenly over "
     "them: choose devices=4 or devices=6, or nodes=5", "devices=6"),
    ("nodes=2", f"{SLURM} strategy=ddp devices=8 site.max_nodes=1",
     "nodes=2, but site=local_cluster allows a job site.max_nodes=1", ""),
    ("site.max_time_min=30", f"{SLURM} launcher.time_limit_min=60",
     "time_limit_min=60, but site=local_cluster allows a job site.max_time_min=30", ""),
    ("launcher.time_limit_min=3", SLURM,
     "signal_delay_s=120 with launcher.time_limit_min=3: Slurm's warning can come 60 s", ""),
    ("launcher.signal_delay_s=600", f"{SLURM} site.max_time_min=11",
     "signal_delay_s=600 with jobs of at most 11 min: Slurm's warning can come 60 s early, so a run would be stopped "
     "as soon as it starts: lower launcher.signal_delay_s", "launcher.signal_delay_s=120"),
    ("launcher.time_limit_min=long", SLURM,
     "expected `int` >= 1 and <= 1000000 or auto", "launcher.time_limit_min=auto"),
    ("device=cuda", f"{SLURM} site.gpus_per_node=0", "gpus_per_node=0: choose device=cpu", "device=cpu"),
    ("nodes=2", f"{SLURM} {TWO} launcher.pack=true", "launcher.pack=true with nodes=2 is refused", "nodes=1"),
    *(
        (f"site.{key}", SLURM, " is not valid: expected ", "")
        for key in (
            *("partition='gpu, low'", "nice=-1"),
            *("nodelist='n1 n2'", "exclude='$(x)'", "exclusive=user", "reservation='a,b'", "modules=[a b]"),
            *("constraint=a b", "mail_user='-x'", "mail_user='a;b'"),
        )
    ),
]  # fmt: skip
"""What is wrong, what is asked for beside it, what the refusal says, and what to write in its place."""
WITHIN_BLOCKS = ("sweep.blocks=[{grid:", "sweep.blocks=[{zip:")
"""These name the key that is wrong within a block."""


def asked(*overrides: str) -> None:
    """What `submit` asks of a sweep before anything is written."""
    plan = expand(overrides)
    prepare_all(plan, launcher_of(plan[0].run).prepare)


@pytest.mark.parametrize(
    ("wrong", "beside", "said", "fix"), REFUSED, ids=[f"{row[0][:40]} {row[1]}" for row in REFUSED]
)
def test_a_refusal_names_the_key_and_what_to_write_instead(
    here: Path, wrong: str, beside: str, said: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        asked(wrong, *beside.split())
    assert said in str(caught.value)
    assert wrong.partition("=")[0].lstrip("+~") in str(caught.value) or wrong.startswith(WITHIN_BLOCKS)
    assert "\n" not in str(caught.value)
    if fix:
        keys = {text.partition("=")[0] for text in fix.split()}
        asked(*fix.split(), *(text for text in beside.split() if text.partition("=")[0] not in keys))
    assert not list(here.iterdir())


IMAGES = ("data=synthetic", "data.channels=1", "data.train_samples=96", "batch_size=96", "epochs=2", "model=mlp")
TOKENS = ("data=tokens", "data.train_samples=96", "batch_size=96", "epochs=2", "model=gpt_tiny")


def refused(overrides: list[str], device_type: str = "cpu") -> UnfitError | None:
    try:
        check_run(one_run(overrides).run, device_type)
    except UnfitError as error:
        return error
    return None


def chosen(overrides: list[str], fix: str) -> list[str]:
    """The overrides with what a fix says in place of what they say of its keys: all others stay, as they are typed."""
    keys = {text.partition("=")[0] for text in fix.split()}
    return [*(text for text in overrides if text.partition("=")[0] not in keys), *fix.split()]


def rejected(error: UnfitError, overrides: list[str], device_type: str) -> list[str]:
    """What it proposes, and is refused in turn."""
    each = [fix for fixes in error.fixes() for fix in fixes]
    proposals = each if len(error.refusals) == 1 else [" ".join(each)]
    wrong = []
    for proposal in filter(None, proposals):
        devices = [text.partition("=")[2] for text in proposal.split() if text.startswith("device=")]
        again = refused(chosen(overrides, proposal), *devices or [device_type])
        wrong += [f"{error.reason!r}, but {proposal} gives {again.reason!r}"] if again else []
    return wrong


@pytest.mark.parametrize(
    ("overrides", "fixes"),
    [
        ("strategy=ddp devices=2 batch_size=95", ["batch_size=94", "batch_size=96"]),
        ("strategy=single batch_size=2000", ["batch_size=96"]),
        ("strategy=ddp devices=1", ["devices=2", "strategy=single devices=1"]),
        ("strategy=single devices=2", ["devices=1", "strategy=ddp"]),
        ("strategy=ddp devices=2 strategy.micro_batches=7", ["strategy.micro_batches=6", "strategy.micro_batches=8"]),
        ("strategy=hsdp devices=3", ["devices=4", "devices=6"]),
        ("strategy=hsdp devices=12 strategy.shard=5", ["strategy.shard=4", "strategy.shard=6"]),
        ("strategy=hsdp devices=2", ["devices=4", "devices=6"]),
        ("strategy=fsdp devices=2 precision=fp16", ["precision=bf16", "precision=fp64"]),
        ("strategy=dp_pp_tp devices=4 precision=fp16", ["precision=bf16", "precision=fp64"]),
        ("strategy=fsdp devices=2 strategy.gather=bf16", ["precision=bf16", "strategy.gather=stored"]),
        ("strategy=tensor_parallel devices=3", ["devices=2", "devices=4"]),
        ("strategy=dp_tp devices=6 strategy.tensor=4", ["devices=8", "devices=12"]),
        ("strategy=dp_tp devices=4 strategy.tensor=1", ["strategy.tensor=2"]),
        ("strategy=model_parallel devices=8", ["devices=4", "devices=3"]),
        ("strategy=pipeline devices=2 strategy.micro_batches=1", ["strategy.micro_batches=2"]),
        ("strategy=pipeline devices=2 strategy.schedule=zbv", ["strategy.stages_per_rank=2"]),
        ("strategy=parameter_server devices=2 strategy.servers=2", ["strategy.servers=1", "devices=3"]),
        ("strategy=parameter_server devices=8", ["batch_size=91", "batch_size=84"]),
        ("strategy=downpour devices=2 optimizer=adam",
         ["optimizer=adagrad", "optimizer=sgd optimizer.momentum=0.0 optimizer.nesterov=false"]),
        ("strategy=downpour devices=2 optimizer=sgd optimizer.nesterov=true",
         ["optimizer=sgd optimizer.momentum=0.0 optimizer.nesterov=false"]),
        ("optimizer=sgd optimizer.momentum=0 optimizer.nesterov=true",
         ["optimizer.momentum=0.9", "optimizer.nesterov=false"]),
        ("strategy=tf_single optimizer=sgd optimizer.momentum=0 optimizer.nesterov=true",
         ["optimizer.momentum=0.9", "optimizer.nesterov=false"]),
        # 32 pixels ÷ 4 by the stem ÷ 8 by three stages: maps of one value
        ("model=resnet50 strategy=ddp devices=2 batch_size=2", ["batch_size=4", "batch_size=6"]),
        ("model=resnet50 strategy=pipeline devices=2 strategy.micro_batches=96", ["strategy.micro_batches=48"]),
        ("model=resnet50 model.norm=sync strategy=single devices=1 batch_size=1", ["batch_size=2", "batch_size=3"]),
        ("launcher=slurm site=local_cluster strategy=tf_mirrored devices=8", ["nodes=1 devices=4"]),
        ("strategy=tf_mirrored devices=2 clip_norm=1.0", ["clip_norm=null", "strategy=ddp"]),
        ("strategy=ddp devices=2 optimizer=lbfgs", ["optimizer=adagrad", "strategy=sandblaster_lbfgs"]),
        ("strategy=single devices=1 optimizer=lbfgs batch_size=24", ["batch_size=96"]),
        ("launcher=inline strategy=ddp devices=2", ["launcher=local"]),
        ("preprocess.threads=4 preprocess.executions=3", ["preprocess.threads=1 preprocess.executions=1"]),
        ("data=tokens strategy=context_parallel devices=3 model=gpt_tiny", ["data.sequence=60", "data.sequence=54"]),
        ("data=tokens model=gpt_tiny strategy=expert_parallel devices=2", ["model=gpt_moe", "strategy=ddp"]),
        ("data=tokens model=gpt_moe_tiny strategy=expert_parallel devices=6", ["devices=4", "devices=8"]),
        ("data=tokens model=gpt_moe_tiny strategy=expert_parallel devices=4 strategy.expert_ranks=3",
         ["strategy.expert_ranks=null", "strategy.expert_ranks=2"]),
        ("data=tokens model=gpt_moe_tiny strategy=pipeline devices=2", ["model.balance=0", "strategy=ddp"]),
        ("data=tokens model=gpt_tiny strategy=pipeline devices=2 model.tied=true", ["model.tied=false"]),
    ],
)  # fmt: skip
def test_the_nearest_values_that_work_are_named(overrides: str, fixes: list[str]) -> None:
    given = overrides.split()
    keys = {text.partition("=")[0] for text in given}
    base = TOKENS if "data=tokens" in given else IMAGES
    whole = [*(text for text in base if text.partition("=")[0] not in keys), *given]
    error = refused(whole)
    assert error is not None
    assert error.fixes()[0][: len(fixes)] == fixes
    assert not rejected(error, whole, "cpu")
    assert ": choose " in str(error)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["strategy=downpour", "devices=2", "optimizer=adam"], "strategy"),
        (["strategy=downpour", "devices=2", "strategy.mode=sync", "optimizer=adagrad"], "strategy"),
        (["strategy=tensor_parallel", "devices=3"], "strategy"),
        (["strategy=tf_single"], "loader"),
        (["strategy=tf_single", "loader=dataloader"], "loader"),
    ],
)
def test_what_is_refused_depends_on_no_name(overrides: list[str], key: str) -> None:
    """A preset of one's own may have any name."""
    run = one_run([*IMAGES[:-1], "model=mlp", *overrides]).run
    renamed = msgspec.structs.replace(run, **{key: msgspec.structs.replace(getattr(run, key), name="of_mine")})
    keys = [[refusal.keys for refusal in run_rules.refusals(each, "cpu")] for each in (run, renamed)]
    assert keys[0] == keys[1]


@pytest.mark.parametrize(
    "overrides",
    [
        "model=resnet50 model.norm=sync strategy=ddp devices=2 batch_size=2",
        "model=resnet50 model.norm=group strategy=ddp devices=2 batch_size=2",
        "model=resnet50 data.image_size=33 strategy=ddp devices=2 batch_size=2",
        "model=resnet50 model.stem=cifar strategy=ddp devices=2 batch_size=2",
    ],
)
def test_one_sample_is_enough_where_norms_have_several_values_of_a_channel(overrides: str) -> None:
    keys = {text.partition("=")[0] for text in overrides.split()}
    assert refused([*(text for text in IMAGES if text.partition("=")[0] not in keys), *overrides.split()]) is None


OPTIONS = (
    *(f"{group}={name}" for group in ("lr_schedule", "metric", "loss", "optimizer") for name in group_choices()[group]),
    *("precision=fp16", "precision=bf16", "precision=fp64", "precision=tf32", "clip_norm=1.0", "nodes=2"),
    *("compile=true", "compile_scope=step", "graph=true", "cudnn_benchmark=true", "channels_last=true"),
    *("activation_recomputation=full", "scaling=weak", "loader=streamed", "measure.attribution_steps=2"),
)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", group_choices()["strategy"])
def test_what_a_refusal_proposes_is_accepted(strategy: str) -> None:
    device_type = "cuda" if strategy == "data_parallel" else "cpu"
    model, _ = model_and_devices(strategy)
    work = (*IMAGES[:-1], f"model={model}") if model == "mlp" else (*TOKENS[:-1], f"model={model}")
    drawn, wrong, proposed = random.Random(strategy), list[str](), 0
    for _ in range(15):
        options = [f"devices={drawn.choice([1, 2, 3, 4, 8])}", f"batch_size={drawn.choice([96, 96, 95, 24, 1])}"]
        options += drawn.sample(OPTIONS, drawn.choice([0, 1, 1, 2]))
        options += [] if any(text.startswith("optimizer=") for text in options) else [
            f"optimizer={OPTIMIZERS.get(strategy, 'adam')}"
        ]  # fmt: skip
        keys = {text.partition("=")[0] for text in options}
        overrides = [*(text for text in work if text.partition("=")[0] not in keys), f"strategy={strategy}", *options]
        try:
            error = refused(overrides, device_type)
        except ConfigError:  # devices that nodes don't divide are no run
            continue
        if error is not None:
            proposed += any(error.fixes())
            wrong += rejected(error, overrides, device_type)
    assert wrong == []
    assert proposed, "else nothing can fail here"


def test_all_refusals_come_together_and_what_they_propose_works_together() -> None:
    overrides = [*IMAGES, "strategy=ddp", "devices=2", "batch_size=95", "precision=tf32", "nccl.per_edge=true"]
    error = refused(overrides)
    assert error is not None
    assert error.fixes() == [["batch_size=94"], ["nccl.per_edge=false"], ["precision=fp32"]]
    assert not rejected(error, overrides, "cpu")
    assert [line.rpartition(": ")[2] for line in str(error).splitlines()] == [
        "choose batch_size=94",
        "choose nccl.per_edge=false",
        "choose precision=fp32",
    ]


def test_what_is_proposed_stands_behind_the_refusal_that_it_mends(monkeypatch: pytest.MonkeyPatch) -> None:
    rules, own = run_rules.refusals, Refusal("nobody knows how to mend this", ())
    monkeypatch.setattr(run_rules, "refusals", lambda *run: [*rules(*run), own])
    error = refused([*IMAGES, "strategy=ddp", "devices=2", "batch_size=95"])
    assert str(error).splitlines()[0].endswith(": choose batch_size=94")
    assert str(error).splitlines()[1:] == [own.reason]


@pytest.mark.parametrize("key", ["batch_size", "strategy", "model.no_such_option", "precision=fp32"])
def test_where_no_neighbour_works_nothing_is_proposed(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = Refusal("batch_size=95 suits nobody", (key,))
    monkeypatch.setattr(run_rules, "refusals", lambda _run, _device_type: [refusal])
    with pytest.raises(UnfitError) as error:
        check_run(one_run([*IMAGES, "strategy=ddp", "devices=2"]).run, "cpu")
    assert error.value.fixes() == [[]]
    assert str(error.value) == error.value.reason == "batch_size=95 suits nobody"


def test_fixes_are_searched_only_for_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[RunConfig] = []

    def search(run: RunConfig, _device_type: str, found: Sequence[Refusal]) -> list[list[str]]:
        searched.append(run)
        return [[] for _ in found]

    monkeypatch.setattr(run_rules, "fixes", search)
    collected, run = Refusals(), one_run([*IMAGES, "strategy=ddp", "devices=2"]).run
    for batch_size in range(1, 95, 2):
        with collected:
            check_run(msgspec.structs.replace(run, batch_size=batch_size), "cpu")
    assert searched == []
    with pytest.raises(ConfigError, match="more refusals"):
        collected.raise_any()
    assert 0 < len(searched) <= MOST_REFUSALS
