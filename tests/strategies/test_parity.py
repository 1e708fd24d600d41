"""Every strategy, and whatever a run chooses beside it, trains like one device: the table of trainings.

Of each line losses, gradients, parameters and evaluation are those of one device in fp64, a state of one device passes
through the strategy, and groups of ranks wait as long as the run says. What is beside that (bytes, faults, checkpoints,
refusals) has files of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from parallelbench.training.checks.comparability import local_statistics
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.helpers import torchs_strategies
from tests.ranks import PATIENCE_S, run_ranks
from tests.strategies.training import STEPS, configure, one_device, summed, train

pytestmark = pytest.mark.slow

SYNTHETIC = ["data=synthetic", "data.channels=1", "data.train_samples=96", "data.test_samples=37"]
MODELS = {
    "mlp": ["model=mlp", "data.image_size=32"],
    "cnn_small": ["model=cnn_small", "data.image_size=28"],
    "vit_tiny": ["model=vit_tiny", "data.image_size=32"],
    "resnet_sync": ["model=resnet_tiny", "model.norm=sync", "data.image_size=32"],
    "resnet_group": ["model=resnet_tiny", "model.norm=group", "data.image_size=32"],
}
OVERRIDES = {
    "downpour": ["optimizer.momentum=0.0"],
    "sandblaster_lbfgs": ["optimizer=lbfgs", "optimizer.lr=1.0", "batch_size=96"],
}
"""What a strategy needs besides its file."""
SHIPPED = [name for name in torchs_strategies() if name not in ("single", "expert_parallel")]
"""`expert_parallel` takes models with experts only."""
WITHOUT_IMAGES = ("data_parallel", "context_parallel", "fsdp_cp")
"""One needs two GPUs; the others cut sequences."""
OFTEN = ("ddp", "fsdp", "pipeline")
"""Strategies whose resnets `make test` trains, too."""
CUTS_BATCHES = ("pipeline", "dp_pp", "model_parallel")
"""Micro-batches normalise on their own under norm=sync: these strategies train resnets with norm=group."""

_GPT = "data.sequence=12 data.vocabulary=20 data.train_samples=96 data.test_samples=13 model.layers=2 model.width=16"
_MOE = f"data=tokens model=gpt_moe_tiny {_GPT} model.sequence=12 model.vocabulary=24 model.experts=4 model.mlp_width=24"
_IMAGES = " ".join(SYNTHETIC)
MODELS_OF_ROWS = {
    "bare": "",
    **{name: " ".join((_IMAGES, *model)) for name, model in MODELS.items()},
    "cnn_8": f"{_IMAGES} data.image_size=8 model=cnn_small",
    "vit_8": f"{_IMAGES} data.image_size=8 model=vit_tiny",
    "resnet_8": f"{_IMAGES} data.image_size=8 model=resnet_tiny model.norm=sync",
    "deep_mlp": f"{_IMAGES} data.image_size=8 model=mlp model.hidden=[24,20,16,12,20,24,16]",
    "vectors": "data=breast_cancer model=mlp model.hidden=[24,20,16]",
    "gpt": f"data=tokens model=gpt_tiny {_GPT} model.sequence=12 model.vocabulary=24",
    "gpt_32": "data=tokens data.sequence=16 data.vocabulary=20 data.train_samples=96 data.test_samples=13 "
    "model=gpt_tiny model.layers=2 model.width=32 model.sequence=20 model.vocabulary=24",
    "moe": f"{_MOE} model.balance=0.7",
    "one_sample": f"{_MOE} model.balance=0.7 data.test_samples=1",
}
WORDS = {
    "llama": "model.positions=rope model.mlp=swiglu model.mlp_width=40 model.kv_heads=2",
    "llama_experts": "model.positions=rope model.mlp=swiglu model.kv_heads=2 model.shared_width=20",
    "tied": "model.tied=true",
    "smoothed": "loss.label_smoothing=0.1",
    "by_tokens": "strategy.sequence_parallel=true",
    "by_vocabulary": "strategy.vocabulary_parallel=true",
    "zbv": "strategy.schedule=zbv strategy.stages_per_rank=2",
    "full": "activation_recomputation=full",
    "selective": "activation_recomputation=selective",
    "kept": "strategy.reshard_after_forward=false",
    # Another rate in each of the steps that are compared: they warm up.
    "scheduled": "lr_schedule=cosine lr_schedule.warmup_epochs=0.25 epochs=1",
    # Below the norm of each gradient here.
    "clipped": "clip_norm=0.2",
    "chosen": "loss=mse metric=macro_f1",
}
CHOSEN = "chosen scheduled clipped"
ROWS = """
# What is chosen beside the strategy: data, loss, metric, schedule, clipping
vectors  2  !ddp ring_ddp !zero1 !fsdp !model_parallel !pipeline tensor_parallel       | chosen scheduled clipped
vectors  2  model_parallel_tutorial                                                    | chosen scheduled clipped
vectors  4  dp_pp dp_tp hsdp dp_pp_tp !parameter_server                                | chosen scheduled clipped
mlp      2  sandblaster_lbfgs                                                          | chosen

# Language models, as they are, as Llama, with tied weights and recomputed
gpt      2  ddp ring_ddp zero1 fsdp tensor_parallel context_parallel fsdp_cp model_parallel pipeline !parameter_server
gpt      2  sandblaster_lbfgs
gpt      4  hsdp dp_tp dp_pp dp_pp_tp
gpt      2  tensor_parallel !fsdp pipeline | llama
gpt      4  dp_pp_tp                       | llama
gpt      2  !ddp ring_ddp !zero1 !fsdp !tensor_parallel !context_parallel fsdp_cp      | full tied
gpt      2  parameter_server sandblaster_lbfgs                                         | full tied
gpt      4  !hsdp !dp_tp                                                               | full tied
gpt      2  model_parallel pipeline                                                    | full
gpt      4  dp_pp !dp_pp_tp                                                            | full
gpt      2  model_parallel                 | tied strategy.device_map={embed:0,block1:1,block2:1,head:0}
resnet_group 2 fsdp zero1
resnet_sync  2 fsdp              | full
gpt      2  tensor_parallel !context_parallel | selective model.positions=rope model.kv_heads=2
resnet_sync 2 !ddp                         | full

# Vocabularies and sequences divided among ranks
gpt      2  tensor_parallel   | by_vocabulary tied smoothed
gpt      2  !tensor_parallel  | by_tokens llama tied by_vocabulary
gpt      2  !tensor_parallel  | by_tokens clip_norm=0.01
gpt      2  !tensor_parallel  | by_vocabulary full
gpt      2  tensor_parallel   | by_tokens by_vocabulary full
gpt      4  dp_tp             | by_vocabulary smoothed clip_norm=0.01 kept
gpt      4  dp_tp             | by_tokens llama clip_norm=0.01
gpt      4  dp_tp             | by_tokens tied by_vocabulary kept
gpt      4  dp_pp_tp          | by_vocabulary llama smoothed zbv
gpt      4  dp_pp_tp          | by_tokens optimizer=adam

# Sequences cut among ranks: two parts have no middle, and all_to_all repeats heads of keys that are fewer than ranks
gpt_32   2  !context_parallel | strategy.exchange=all_to_all llama
gpt_32   2  context_parallel  | strategy.exchange=all_gather llama
gpt_32   2  !context_parallel | strategy.exchange=ring clipped
gpt_32   2  !context_parallel | strategy.exchange=ring tied smoothed
gpt_32   4  context_parallel  | strategy.exchange=all_to_all llama
gpt_32   4  context_parallel  | strategy.exchange=all_to_all model.kv_heads=1
gpt_32   4  context_parallel  | strategy.exchange=ring llama
gpt_32   4  context_parallel  | strategy.exchange=all_gather model.kv_heads=1
gpt_32   4  fsdp_cp           | strategy.exchange=ring strategy.context=4 strategy.micro_batches=3 clipped
gpt_32   4  fsdp_cp           | strategy.exchange=all_gather kept tied smoothed
gpt_32   4  fsdp_cp           | strategy.exchange=ring llama full strategy.micro_batches=2
gpt_32   4  fsdp_cp           | strategy.exchange=all_to_all optimizer=adamw clipped lr_schedule=cosine epochs=1
gpt_32   4  fsdp_cp           | strategy.exchange=all_to_all selective model.kv_heads=1 scaling=weak batch_size=6

# Experts and their balance loss; 13 test samples: four ranks have 4, 3, 3 and 3
moe      2  !ddp !fsdp tensor_parallel parameter_server
moe      2  !fsdp !tensor_parallel zero1 | llama_experts
moe      4  !dp_tp                       | llama_experts
moe      2  model_parallel !ring_ddp pipeline | model.balance=0
moe      4  hsdp
moe      4  dp_pp dp_pp_tp               | model.balance=0
moe      2  !ddp                         | strategy.micro_batches=3
moe      2  fsdp                         | full strategy.micro_batches=2
moe      2  !expert_parallel
moe      2  expert_parallel              | full
moe      4  !expert_parallel             | llama_experts optimizer=adam tied
moe      4  expert_parallel              | clip_norm=0.01 optimizer.momentum=0.9
moe      4  expert_parallel              | strategy.expert_ranks=2 clip_norm=0.01 optimizer.momentum=0.9
moe      4  expert_parallel              | strategy.expert_ranks=2 llama_experts optimizer=adamw tied selective
one_sample 4  expert_parallel            | strategy.expert_ranks=2

# Micro-batches, the clipping of all of them, and of parts of unequal size: a class token has fewer rows than shards
mlp      2  ring_ddp zero1     | strategy.micro_batches=3
mlp      4  hsdp               | strategy.micro_batches=3
mlp      2  !ddp !fsdp         | strategy.micro_batches=2 clip_norm=0.01
vit_tiny 4  fsdp dp_tp         | clipped
vit_tiny 2  pipeline           | clipped zbv
mlp      4  !parameter_server  | clipped strategy.servers=2

# Other options; updates of many tensors at once meet plain tensors beside DTensors of several meshes
cnn_8    2  !tensor_parallel | optimizer=adam optimizer.implementation=foreach channels_last=true
cnn_8    4  dp_tp            | optimizer=adam optimizer.implementation=foreach channels_last=true
vit_8    4  dp_pp_tp         | optimizer=adam optimizer.implementation=foreach channels_last=true
resnet_8 4  dp_pp            | strategy.schedule=gpipe strategy.micro_batches=1
deep_mlp 4  dp_pp_tp         | strategy.schedule=interleaved_1f1b strategy.stages_per_rank=2
deep_mlp 4  dp_pp_tp         | zbv
resnet_group 2 pipeline      | strategy.micro_batches=4 channels_last=true optimizer=adam
resnet_sync 2 ddp | strategy.static_graph=true strategy.gradient_as_bucket_view=false strategy.bucket_mib=0.01
cnn_small 2 !ddp | strategy.static_graph=true strategy.gradient_as_bucket_view=false strategy.bucket_mib=0.01
cnn_small 2 !ddp !model_parallel | optimizer=adam scaling=weak batch_size=12 channels_last=true
cnn_small 4 parameter_server     | strategy.servers=2 optimizer=adam
cnn_small 4 parameter_server     | strategy.servers=3 optimizer=adagrad channels_last=true
cnn_small 3 !parameter_server    | optimizer.weight_decay=0.01 scaling=weak batch_size=8
"""
"""Models, devices, strategies | options. With a ! `make test` has it, too."""


def rows() -> list[tuple[str, str, int, str, bool]]:
    """Model, strategy, devices, options, whether `make test` has it."""
    found = [
        (model, strategy, devices, "", model == "mlp" or ("resnet" in model and strategy in OFTEN))
        for row, strategy in enumerate(SHIPPED)
        for column, model in enumerate(MODELS)
        if strategy not in WITHOUT_IMAGES
        if model not in (("resnet_sync",) if strategy in CUTS_BATCHES else ("resnet_group",))
        for devices in ((4,) if model == "mlp" else (2 + 2 * ((row + column) % 2),))
    ]
    for line in filter(None, (line.partition("#")[0].strip() for line in ROWS.splitlines())):
        head, _, options = (part.strip() for part in line.partition("|"))
        model, devices, *strategies = head.split()
        chosen = " ".join(options.split())
        found += [(model, each.lstrip("!"), int(devices), chosen, each.startswith("!")) for each in strategies]
    return found


def run_of(model: str, strategy: str, devices: int, options: str) -> RunConfig:
    """What a row trains."""
    chosen = " ".join(WORDS.get(word, word) for word in options.split())
    own = " ".join((*OVERRIDES.get(strategy, []), f"launcher.collective_timeout_s={PATIENCE_S}"))
    given = f"{MODELS_OF_ROWS[model]} strategy={strategy} devices={devices} {own} {chosen}".split()
    last = {word.partition("=")[0]: word for word in given}  # as a row's options say, where the model says it, too
    return configure(*last.values())


@pytest.mark.parametrize(
    ("model", "strategy", "devices", "options"),
    [pytest.param(*row, marks=[] if often else pytest.mark.exhaustive) for *row, often in rows()],
)
def test_ranks_train_like_one_device(model: str, strategy: str, devices: int, options: str, tmp_path: Path) -> None:
    """A state of one device that passes through each strategy passes between any two."""
    try:
        run = run_of(model, strategy, devices, options)
    except ConfigError as error:
        if options or model not in MODELS:
            raise
        try:  # every strategy × every model of images: on the other size, or not at all
            run = run_of(model, strategy, 6 - devices, options)
        except ConfigError:
            pytest.skip(f"refused: {error}")
    expected = one_device(run)
    ranks = run_ranks(train_and_hand_on, run.strategy.processes(run, "cpu"), tmp_path, run, expected["state"])
    trained, handed_on, timeouts = zip(*ranks, strict=True)
    assert list(handed_on[0]) == list(expected["state"])
    torch.testing.assert_close(handed_on[0], expected["state"], rtol=0, atol=0)
    assert set().union(*timeouts) == {PATIENCE_S}, "torch gives a new group half an hour, however short the run's own"
    assert _computes_as_one_device(run) or strategy == "downpour"
    if strategy != "downpour":
        assert_equal(list(trained), expected, tolerance=1e-9)


def _computes_as_one_device(run: RunConfig) -> bool:
    """Asynchronous ones do not: they are compared with a sequential simulation elsewhere."""
    return run.strategy.equals_one_device(run) and not local_statistics(run)


Trained = tuple[dict[str, Any] | None, dict[str, torch.Tensor], set[float]]


def train_and_hand_on(rank: int, size: int, run: RunConfig, state: dict[str, torch.Tensor]) -> Trained:
    """What `train` gives, where that can be compared; the state as it comes out again; groups' timeouts in seconds."""
    trained = train(rank, size, run) if _computes_as_one_device(run) else None
    model = build_model(run).double()
    model.load_state_dict(state, strict=True)
    handed_on = run.strategy.prepare(model, run, World(rank=rank, size=size, local_rank=rank)).full_state_dict()
    groups, cpu = dist.distributed_c10d._world.pg_map, torch.device("cpu")  # the first is that of `run_ranks`
    return trained, handed_on, {group._get_backend(cpu).options._timeout.total_seconds() for group in groups}


def test_every_strategy_has_rows_of_language_models() -> None:
    other = {"data_parallel", "downpour", "model_parallel_tutorial"}
    with_gpt = {strategy for model, strategy, _, options, _ in rows() if (model, options) == ("gpt", "")}
    assert with_gpt == set(SHIPPED) - other, "a new strategy has rows here, too"
    other = {"data_parallel", "downpour", "context_parallel", "fsdp_cp", "sandblaster_lbfgs"}
    chosen = {strategy for model, strategy, _, options, _ in rows() if (model, options) == ("vectors", CHOSEN)}
    assert chosen == set(SHIPPED) - other, "with a loss, metric, schedule and clipping of its own, too"


@pytest.mark.parametrize(("strategy", "model"), [("model_parallel_tutorial", "mlp"), ("model_parallel", "cnn_small")])
def test_naive_model_parallelism_is_bitwise_equal(strategy: str, model: str, tmp_path: Path) -> None:
    run = configure(*SYNTHETIC, *MODELS[model], f"strategy={strategy}", "devices=2")
    ranks = run_ranks(train, 2, tmp_path, run)
    assert_equal(ranks, one_device(run), tolerance=0.0)
    owner = 0 if strategy == "model_parallel_tutorial" else 1  # the tutorial's map goes back to the first device
    assert [rank["steps"][0] is not None for rank in ranks] == [owner == 0, owner == 1]


def assert_equal(ranks: list[dict[str, Any]], expected: dict[str, Any], *, tolerance: float) -> None:
    """What the ranks computed together is what one device computed."""
    for step in range(STEPS):
        together = summed([rank["steps"][step] for rank in ranks])
        assert together == pytest.approx(expected["steps"][step], rel=tolerance, abs=tolerance)
    evaluated = summed([rank["evaluated"] for rank in ranks])
    assert evaluated == pytest.approx(expected["evaluated"], rel=tolerance, abs=tolerance)
    for what in ("gradients", "state"):
        torch.testing.assert_close(ranks[0][what], expected[what], rtol=0, atol=tolerance)
        assert list(ranks[0][what]) == list(expected[what]), "same names in the same order"
        assert not any(rank[what] for rank in ranks[1:])
