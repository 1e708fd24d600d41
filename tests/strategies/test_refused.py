"""What a strategy can't do is refused before anything starts, with the reason and the fix: one table."""

from __future__ import annotations

import pytest

from parallelbench.errors import ConfigError
from tests.strategies.test_parity import MODELS_OF_ROWS, WORDS
from tests.strategies.training import configure

LBFGS = "optimizer=lbfgs optimizer.lr=1.0 batch_size=96"
ROWS = """
# Micro-batches, clipping, recomputation
mlp 2 ddp strategy.micro_batches=5                 | =5 doesn't divide; batch of 12 samples; micro_batches=4 or 6
mlp 2 ddp strategy.micro_batches=2 compile=true    | compile=true is refused; compile=false
mlp 2 ddp strategy.micro_batches=2 strategy.static_graph=true | static_graph=true; static_graph=false
mlp 1 single clip_norm=1 optimizer=lbfgs batch_size=96 | a line search needs the gradient of the loss itself
mlp 3 parameter_server clip_norm=1 strategy.mode=async | no server has a whole gradient
mlp 3 downpour clip_norm=1 optimizer.momentum=0.0  | choose clip_norm=null, or strategy=parameter_server
mlp 1 tf_single clip_norm=1                        | strategy=tf_single has updates of its own, which clip nothing
mlp 1 single clip_norm=0                           | clip_norm=0 is not valid
mlp 1 single selective                             | model=mlp names no attention; =none or full
mlp 1 single model=logistic_regression full        | one layer
mlp 1 tf_single full                               | tensorflow trains; backward pass of its own
vit_8 2 pipeline zbv full                          | =zbv cuts backward in two; activation_recomputation=none
vit_8 1 single full compile=true                   | the compiler chooses; compile=false

# Data parallel, sharded
mlp 2 ring_ddp strategy.bucket_mib=0               | bucket_mib
mlp 2 ring_ddp strategy.gradient_as_bucket_view=1  | gradient_as_bucket_view
mlp 1 zero1                                        | needs two devices or more
mlp 4 hsdp strategy.shard=1                        | shards nothing
mlp 4 hsdp precision=fp16                          | precision=fp16 with strategy=hsdp

# Pipelines
deep_mlp 2 pipeline strategy.stages_per_rank=2     | 1f1b puts 1 stage on; choose strategy.stages_per_rank=1
deep_mlp 1 pipeline                                | two stages or more; devices=2
deep_mlp 4 pipeline model.hidden=[8]               | can't cut; into 4 stages; fc1, fc2
deep_mlp 2 pipeline strategy.schedule=dualpipev strategy.stages_per_rank=2 strategy.micro_batches=3 | =4 or 6
deep_mlp 4 pipeline strategy.schedule=interleaved_1f1b batch_size=18 strategy.micro_batches=9 | =6, or
deep_mlp 2 pipeline precision=fp16                 | choose precision=bf16
deep_mlp 2 pipeline zbv compile=true               | compile=false
deep_mlp 2 pipeline strategy.stage_map={fc1:0}     | leaves out fc2
deep_mlp 2 pipeline model.hidden=[8,8] strategy.stage_map={fc1:0,fc2:1,fc3:0} | goes back; model_parallel
deep_mlp 2 pipeline model.hidden=[8,8] strategy.stage_map={fc1:0,fc2:0,fc3:0} | uses the stages [0]; 0 … 1
deep_mlp 2 pipeline model.hidden=[8] strategy.stage_map={fc1:0,fc9:1} | fc9; fc2

# Tensors and meshes
mlp 2 tensor_parallel model=logistic_regression    | nothing to shard
vit_8 3 tensor_parallel                            | 3 equal shards; 4 equal parts
mlp 2 tensor_parallel precision=fp16               | precision=bf16
mlp 3 dp_tp                                        | multiple of 2 devices, at least 4
deep_mlp 6 dp_pp strategy.stages=4                 | multiple of 4
mlp 4 dp_pp strategy.micro_batches=8               | doesn't divide the batch of 12
cnn_8 8 dp_pp_tp strategy.stages=4                 | 3 layers

# Language models; vocabularies and tokens divided
mlp 1 single model=gpt_tiny                        | model=gpt_tiny takes tokens; data=synthetic holds images
bare 1 single data=tokens model=mlp                | model=mlp takes; data=tokens holds tokens
gpt 1 single data.sequence=13                      | 13 tokens; model.sequence=12; choose model.sequence=13
gpt 1 single data.vocabulary=25                    | model.vocabulary=24; 25; choose model.vocabulary=25
gpt 4 tensor_parallel llama                        | model.kv_heads=2; 4 equal shards
gpt 2 model_parallel tied                          | embed and head of model=gpt_tiny on one; model.tied=false
gpt 2 tensor_parallel by_tokens data.sequence=11   | 11 tokens; sequence_parallel=false, or data.sequence=1
gpt 2 tensor_parallel by_tokens compile=true       | never tried; sequence_parallel=false, or compile=false
bare 2 tensor_parallel by_tokens data=synthetic model=mlp | model=mlp names no norms; sequence_parallel=false
gpt 2 tensor_parallel by_vocabulary model.vocabulary=25 | among 2 tensor ranks; vocabulary_parallel=false, or
gpt 2 tensor_parallel by_vocabulary loss=mse       | loss=mse; vocabulary_parallel=false, or
gpt 2 tensor_parallel by_vocabulary compile=true   | never tried; vocabulary_parallel=false, or
bare 2 tensor_parallel by_vocabulary data=synthetic model=mlp | model=mlp has no vocabulary to divide

# Sequences cut among ranks
gpt_32 3 context_parallel strategy.exchange=ring   | data.sequence=16; 6 equal parts; devices=3
gpt_32 3 context_parallel strategy.exchange=all_to_all | data.sequence=16; 3 equal parts
gpt_32 2 context_parallel strategy.exchange=ring data.sequence=3 model.sequence=3 | data.sequence=4 model.sequence=4
gpt_32 8 context_parallel strategy.exchange=all_to_all | devices=8; model.heads=4
gpt_32 3 fsdp_cp strategy.exchange=ring            | strategy.context=2; multiple of 2 devices; devices=3
gpt_32 4 fsdp_cp strategy.exchange=ring strategy.context=1 | strategy.context=1 leaves
gpt_32 6 fsdp_cp strategy.exchange=ring strategy.context=3 | 6 equal parts; context=3; data.sequence=18 or 12
gpt_32 4 fsdp_cp strategy.exchange=ring strategy.micro_batches=5 | batch of 12 samples; micro_batches=4 or 6
gpt_32 4 fsdp_cp strategy.exchange=ring batch_size=23 | 2 equal parts; choose batch_size=22 or 24
bare 2 fsdp_cp data=synthetic model=mlp            | no such attention

# Experts and their balance loss
moe 3 expert_parallel                              | model.experts=4; devices=3; choose devices=2 or 4
moe 2 expert_parallel precision=fp16               | precision=fp16
moe 4 expert_parallel strategy.expert_ranks=1      | strategy.expert_ranks=1 divides no experts
moe 4 expert_parallel strategy.expert_ranks=8      | strategy.expert_ranks=8 is more than devices=4
moe 4 expert_parallel strategy.expert_ranks=4      | is all of devices=4, which strategy.expert_ranks=null says
moe 12 expert_parallel strategy.expert_ranks=6     | strategy.expert_ranks=6 does not divide model.experts=4
moe 2 model_parallel                               | model.balance=0.7 with; choose model.balance=0
moe 2 sandblaster_lbfgs lbfgs                      | model.balance=0.7 with; choose model.balance=0
moe 2 tensor_parallel by_vocabulary                | model.balance=0.7 adds to a loss computed from parts

# Servers
cnn_small 1 parameter_server                       | leaves no worker; choose devices=2
cnn_small 4 parameter_server batch_size=25         | batch_size=25; 3 equal parts; batch_size=24 or 27
cnn_small 3 parameter_server scaling=weak batch_size=9 | choose batch_size=8 or 10
cnn_small 3 parameter_server strategy.n_push=2     | =2; strategy.n_push=1 strategy.n_fetch=1; strategy.mode=async
cnn_small 3 parameter_server precision=fp16        | precision=bf16
resnet_sync 3 parameter_server strategy.mode=async | choose model.norm=batch or group
cnn_small 3 downpour optimizer=sgd                 | sgd with momentum; optimizer.momentum=0.0
cnn_small 3 downpour optimizer=adagrad strategy.mode=sync | strategy=parameter_server
cnn_small 3 parameter_server strategy.slow_worker_factor=0.5 | strategy.slow_worker_factor=0.5; >= 1

# L-BFGS
cnn_small 2 sandblaster_lbfgs                      | optimizer=sgd; optimizer=lbfgs; batch_size=96
cnn_small 2 sandblaster_lbfgs lbfgs batch_size=24  | batch_size=24; choose batch_size=96
cnn_small 2 sandblaster_lbfgs lbfgs batch_size=24 scaling=weak | choose batch_size=48
cnn_small 1 single lbfgs precision=bf16            | precision=fp32 or fp64
cnn_small 1 single lbfgs channels_last=true        | channels_last=false
"""
"""Model, devices, strategy, options, as in the table of trainings | what is said."""


@pytest.mark.parametrize("row", [" ".join(row.split()) for row in ROWS.splitlines() if row and row[0] != "#"])
def test_what_can_not_work_is_refused_with_the_reason_and_the_fix(row: str) -> None:
    head, _, said = row.partition("|")
    model, devices, strategy, *options = head.split()
    words = {**WORDS, "lbfgs": LBFGS}
    chosen = " ".join(words.get(option, option) for option in options)
    given = f"{MODELS_OF_ROWS[model]} strategy={strategy} devices={devices} {chosen}".split()
    with pytest.raises(ConfigError) as refused:
        configure(*{word.partition("=")[0]: word for word in given}.values())
    assert [each for each in map(str.strip, said.split(";")) if each not in str(refused.value)] == []
