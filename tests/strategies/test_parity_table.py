"""Whatever a run chooses, ranks train like one device: losses, gradients, parameters, evaluation, in fp64.

Each line is one training. `test_parity.py` has every strategy with every model of images; what is beside parity (bytes,
faults, checkpoints, refusals) has a file per strategy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from parallelbench.config.run import RunConfig
from tests.ranks import run_ranks
from tests.strategies.test_parity import MODELS, OVERRIDES, SHIPPED, SYNTHETIC, assert_equal
from tests.strategies.training import configure, one_device, train

if TYPE_CHECKING:
    from pathlib import Path

_GPT = "data.sequence=12 data.vocabulary=20 data.train_samples=96 data.test_samples=13 model.layers=2 model.width=16"
_EXPERTS = "model.experts=4 model.mlp_width=24 model.balance=0.7"
_IMAGES = " ".join(SYNTHETIC)
MODELS_OF_ROWS = {
    **{name: " ".join((_IMAGES, *model)) for name, model in MODELS.items()},
    "cnn_8": f"{_IMAGES} data.image_size=8 model=cnn_small",
    "vit_8": f"{_IMAGES} data.image_size=8 model=vit_tiny",
    "resnet_8": f"{_IMAGES} data.image_size=8 model=resnet_tiny model.norm=sync",
    "deep_mlp": f"{_IMAGES} data.image_size=8 model=mlp model.hidden=[24,20,16,12,20,24,16]",
    "gpt": f"data=tokens model=gpt_tiny {_GPT} model.sequence=12 model.vocabulary=24",
    "gpt_32": "data=tokens data.sequence=16 data.vocabulary=20 data.train_samples=96 data.test_samples=13 "
    "model=gpt_tiny model.layers=2 model.width=32 model.sequence=20 model.vocabulary=24",
    "moe": f"data=tokens model=gpt_moe_tiny {_GPT} model.sequence=12 model.vocabulary=24 {_EXPERTS}",
    "one_sample": f"data=tokens model=gpt_moe_tiny {_GPT} model.sequence=12 model.vocabulary=24 {_EXPERTS} "
    "data.test_samples=1",
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
}
ROWS = """
# Language models, as they are, as Llama, with tied weights
gpt      2  ddp ring_ddp zero1 fsdp tensor_parallel context_parallel fsdp_cp model_parallel pipeline !parameter_server
gpt      2  sandblaster_lbfgs
gpt      4  hsdp dp_tp dp_pp dp_pp_tp
gpt      2  tensor_parallel !fsdp pipeline                                | llama
gpt      4  dp_tp dp_pp_tp                                                | llama
gpt      2  ddp ring_ddp !zero1 !fsdp tensor_parallel context_parallel fsdp_cp parameter_server sandblaster_lbfgs | tied
gpt      4  !hsdp !dp_tp                                                  | tied
gpt      2  model_parallel | tied strategy.device_map={embed:0,block1:1,block2:1,head:0}

# Vocabularies and sequences divided among ranks
gpt      2  tensor_parallel   | by_vocabulary tied smoothed
gpt      2  !tensor_parallel  | by_vocabulary llama
gpt      4  dp_tp             | by_vocabulary llama tied
gpt      4  dp_tp             | by_vocabulary smoothed clip_norm=0.01 kept
gpt      4  dp_pp_tp          | by_vocabulary optimizer=adam
gpt      4  dp_pp_tp          | by_vocabulary llama smoothed zbv
gpt      2  tensor_parallel   | by_tokens
gpt      2  tensor_parallel   | by_tokens llama tied by_vocabulary
gpt      2  !tensor_parallel  | by_tokens clip_norm=0.01
gpt      4  dp_tp             | by_tokens llama clip_norm=0.01
gpt      4  dp_tp             | by_tokens tied by_vocabulary kept
gpt      4  dp_pp_tp          | by_tokens optimizer=adam
gpt      4  dp_pp_tp          | by_tokens llama by_vocabulary zbv

# Sequences cut among ranks
gpt_32   2  !context_parallel | strategy.exchange=all_to_all
gpt_32   2  context_parallel  | strategy.exchange=all_to_all llama
gpt_32   2  context_parallel  | strategy.exchange=all_to_all model.kv_heads=1
gpt_32   2  context_parallel  | strategy.exchange=ring
gpt_32   2  context_parallel  | strategy.exchange=ring llama
gpt_32   2  context_parallel  | strategy.exchange=ring model.kv_heads=1
gpt_32   2  !context_parallel | strategy.exchange=ring clip_norm=0.2
gpt_32   2  !context_parallel | strategy.exchange=ring tied smoothed
gpt_32   2  context_parallel  | strategy.exchange=all_gather
gpt_32   2  context_parallel  | strategy.exchange=all_gather llama
gpt_32   2  context_parallel  | strategy.exchange=all_gather model.kv_heads=1
gpt_32   4  context_parallel  | strategy.exchange=all_to_all
gpt_32   4  context_parallel  | strategy.exchange=all_to_all llama
gpt_32   4  context_parallel  | strategy.exchange=all_to_all model.kv_heads=1
gpt_32   4  context_parallel  | strategy.exchange=ring
gpt_32   4  context_parallel  | strategy.exchange=ring llama
gpt_32   4  context_parallel  | strategy.exchange=ring model.kv_heads=1
gpt_32   4  context_parallel  | strategy.exchange=all_gather
gpt_32   4  context_parallel  | strategy.exchange=all_gather llama
gpt_32   4  context_parallel  | strategy.exchange=all_gather model.kv_heads=1
gpt_32   2  fsdp_cp           | strategy.exchange=ring
gpt_32   4  fsdp_cp           | strategy.exchange=ring llama
gpt_32   4  fsdp_cp           | strategy.exchange=ring strategy.context=4 strategy.micro_batches=3 clip_norm=0.2
gpt_32   4  fsdp_cp           | strategy.exchange=all_gather kept tied smoothed
gpt_32   4  fsdp_cp           | strategy.exchange=all_gather llama full strategy.micro_batches=2
gpt_32   4  fsdp_cp           | strategy.exchange=all_to_all optimizer=adamw clip_norm=0.2 lr_schedule=cosine epochs=1
gpt_32   4  fsdp_cp           | strategy.exchange=all_to_all selective model.kv_heads=1 scaling=weak batch_size=6

# Experts and their balance loss; 13 test samples: four ranks have 4, 3, 3 and 3
moe      2  !ddp ring_ddp zero1 !fsdp tensor_parallel parameter_server
moe      4  hsdp !dp_tp
moe      2  !fsdp !tensor_parallel zero1 | llama_experts
moe      4  dp_tp                        | llama_experts
moe      2  model_parallel pipeline      | model.balance=0
moe      4  dp_pp dp_pp_tp               | model.balance=0
moe      2  !expert_parallel
moe      2  !expert_parallel             | llama_experts optimizer=adam tied
moe      2  !expert_parallel             | clip_norm=0.01 optimizer.momentum=0.9
moe      4  expert_parallel
moe      4  !expert_parallel             | llama_experts optimizer=adam tied
moe      4  expert_parallel              | clip_norm=0.01 optimizer.momentum=0.9
moe      4  expert_parallel              | strategy.expert_ranks=2
moe      4  expert_parallel              | strategy.expert_ranks=2 clip_norm=0.01 optimizer.momentum=0.9
moe      4  expert_parallel              | strategy.expert_ranks=2 llama_experts optimizer=adamw tied selective
one_sample 2  expert_parallel
one_sample 4  expert_parallel            | strategy.expert_ranks=2

# Recomputation
gpt      2  !ddp ring_ddp zero1 !fsdp !tensor_parallel !context_parallel fsdp_cp model_parallel pipeline | full
gpt      2  parameter_server sandblaster_lbfgs                                 | full
gpt      4  hsdp dp_tp dp_pp !dp_pp_tp                                         | full
gpt      2  fsdp tensor_parallel pipeline !context_parallel | selective model.positions=rope model.kv_heads=2
gpt      2  tensor_parallel  | full by_tokens
gpt      2  !tensor_parallel | full by_vocabulary
gpt      2  tensor_parallel  | full by_tokens by_vocabulary
resnet_sync 2  !ddp fsdp     | full
moe      2  ddp              | full
moe      2  !ddp             | strategy.micro_batches=3
moe      2  fsdp             | full strategy.micro_batches=2
moe      2  expert_parallel  | selective
moe      2  expert_parallel  | full

# Micro-batches, the clipping of all of them, and of parts of unequal size: a class token has fewer rows than shards
mlp      2  !ddp ring_ddp zero1 !fsdp | strategy.micro_batches=3
mlp      4  hsdp                      | strategy.micro_batches=3
mlp      2  !ddp fsdp                 | strategy.micro_batches=2 clip_norm=0.01
vit_tiny 4  fsdp dp_tp                | clip_norm=0.2
vit_tiny 2  pipeline                  | clip_norm=0.2 zbv
mlp      4  !parameter_server         | clip_norm=0.2 strategy.servers=2

# Other options; updates of many tensors at once meet plain tensors beside DTensors of several meshes
cnn_8    2  !tensor_parallel | optimizer=adam optimizer.implementation=foreach channels_last=true
cnn_8    4  dp_tp            | optimizer=adam optimizer.implementation=foreach channels_last=true
vit_8    4  dp_pp_tp         | optimizer=adam optimizer.implementation=foreach channels_last=true
resnet_8 4  dp_pp            | strategy.schedule=gpipe strategy.micro_batches=1
deep_mlp 4  dp_pp_tp         | strategy.schedule=interleaved_1f1b strategy.stages_per_rank=2
deep_mlp 4  dp_pp_tp         | zbv
mlp vit_tiny resnet_sync resnet_group 2 ddp | strategy.static_graph=true strategy.gradient_as_bucket_view=false strategy.bucket_mib=0.01
cnn_small 2 !ddp | strategy.static_graph=true strategy.gradient_as_bucket_view=false strategy.bucket_mib=0.01
cnn_small 2 !ddp !model_parallel | optimizer=adam
cnn_small 2 !ddp !model_parallel | scaling=weak batch_size=12
cnn_small 2 ddp model_parallel   | channels_last=true
cnn_small 2 ddp model_parallel   | optimizer=adagrad
cnn_small 4 parameter_server     | strategy.servers=2 optimizer=adam
cnn_small 4 parameter_server     | strategy.servers=3 optimizer=adagrad channels_last=true
cnn_small 3 !parameter_server    | optimizer.weight_decay=0.01 scaling=weak batch_size=8
"""  # noqa: E501
"""Models, devices, strategies | options. With a ! `make test` has it, too."""


def rows() -> list[tuple[str, str, int, str, bool]]:
    """Model, strategy, devices, options, whether `make test` has it."""
    found = []
    for line in filter(None, (line.partition("#")[0].strip() for line in ROWS.splitlines())):
        head, _, options = (part.strip() for part in line.partition("|"))
        words = head.split()
        place = next(place for place, word in enumerate(words) if word.isdigit())
        for model in words[:place]:
            for strategy in words[place + 1 :]:
                row = (model, strategy.lstrip("!"), int(words[place]), " ".join(options.split()))
                found.append((*row, strategy.startswith("!")))
    return found


def run_of(model: str, strategy: str, devices: int, options: str) -> RunConfig:
    """What a row trains."""
    chosen = " ".join(WORDS.get(word, word) for word in options.split())
    own = " ".join(OVERRIDES.get(strategy, []))
    given = f"{MODELS_OF_ROWS[model]} strategy={strategy} devices={devices} {own} {chosen}".split()
    last = {word.partition("=")[0]: word for word in given}  # as a row's options say, where the model says it, too
    return configure(*last.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "strategy", "devices", "options"),
    [pytest.param(*row, marks=[] if often else pytest.mark.exhaustive) for *row, often in rows()],
)
def test_ranks_train_like_one_device(model: str, strategy: str, devices: int, options: str, tmp_path: Path) -> None:
    run = run_of(model, strategy, devices, options)
    ranks = run_ranks(train, run.strategy.processes(run, "cpu"), tmp_path, run)
    assert_equal(ranks, one_device(run), tolerance=1e-9)


def test_every_strategy_has_rows_of_language_models() -> None:
    """As they are, with tied weights where one device has both ends, and recomputed."""
    other = {"data_parallel", "downpour", "model_parallel_tutorial"}
    with_gpt = {strategy for model, strategy, _, options, _ in rows() if (model, options) == ("gpt", "")}
    assert with_gpt == set(SHIPPED) - other, "a new strategy has rows here, too"
    assert {strategy for model, strategy, _, options, _ in rows() if (model, options) == ("gpt", "full")} == with_gpt
    cut = {"model_parallel", "pipeline", "dp_pp", "dp_pp_tp"}
    assert {
        strategy for model, strategy, _, options, _ in rows() if (model, options) == ("gpt", "tied")
    } == with_gpt - cut
