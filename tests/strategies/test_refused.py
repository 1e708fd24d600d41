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
mlp 4 hsdp strategy.shard=1                        | strategy.shard=1 must divide devices=4, and be neither 1
mlp 4 hsdp precision=fp16                          | precision=fp16 with strategy=hsdp
mlp 2 data_parallel                                | on a CPU would train on one device

# Pipelines
deep_mlp 2 pipeline strategy.stages_per_rank=2     | 1f1b puts 1 stage on; choose strategy.stages_per_rank=1
deep_mlp 1 pipeline                                | two stages or more; devices=2
deep_mlp 4 pipeline model.hidden=[8]               | can't cut; for 4 stages; fc1, fc2
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
moe 8 expert_parallel                              | model.experts=4 among devices=8: choose devices=4
moe 2 expert_parallel precision=fp16               | precision=fp16
moe 4 expert_parallel strategy.expert_ranks=1      | =1 must divide devices=4 and model.experts=4, and be neither 1
moe 4 expert_parallel strategy.expert_ranks=8      | strategy.expert_ranks=8 must divide devices=4 and
moe 4 expert_parallel strategy.expert_ranks=4      | nor all devices, which null says
moe 12 expert_parallel strategy.expert_ranks=6     | strategy.expert_ranks=6 must divide; model.experts=4
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

# Rates of steps
mlp 1 single epochs=5 lr_schedule=linear_warmup lr_schedule.warmup_epochs=5 | never ends; choose fewer
mlp 1 single epochs=5 lr_schedule=cosine lr_schedule.warmup_epochs=7.5 | warmup_epochs=7.5 with epochs=5 never ends
mlp 1 single epochs=5 lr_schedule=step lr_schedule.every_epochs=5 | changes nothing; lr_schedule=constant
mlp 1 single lbfgs lr_schedule=cosine              | a line search finds each step's length
mlp 2 sandblaster_lbfgs lbfgs lr_schedule=cosine   | strategy=sandblaster_lbfgs has updates of its own
mlp 2 downpour optimizer.momentum=0.0 lr_schedule=cosine | a server counts pushes; strategy=parameter_server
mlp 3 parameter_server strategy.mode=async lr_schedule=step | a server counts pushes; strategy.mode=sync
mlp 1 tf_single lr_schedule=step                   | updates of its own; choose lr_schedule=constant
mlp 1 single lr_schedule=step compile=true compile_scope=step precision=fp32 | choose compile_scope=model

# Losses and metrics
mlp 1 tf_single loss=mse                           | TensorFlow's part computes cross entropy without smoothing only
mlp 1 tf_single smoothed                           | TensorFlow's part computes cross entropy without smoothing only
mlp 1 tf_single metric=top5                        | evaluates loss and accuracy only: choose metric=none
mlp 1 single metric=top5 metric.k=10               | each of 10 classes is among so many: choose metric.k of at most 9
mlp 1 single metric=calibration_error loss=mse     | have no confidence by softmax: choose loss=cross_entropy
mlp 1 single metric=macro_f2                       | metric=macro_f2; macro_f1
mlp 1 single metric.k=3                            | metric.k
gpt 2 tensor_parallel by_vocabulary metric=macro_f1 | metric=macro_f1 needs all logits at once; metric=none

# Data and their preprocessing
bare 1 single data=torch_dataset model=mlp         | names no class: choose data.dataset=PACKAGE.Class
bare 1 single data=mnist data.copies=3 model=mlp   | data.copies=3; valid: 1, 4, 8
gpt 1 single data.branches=5 data.vocabulary=4     | data.branches=5 is more; choose data.branches=4
bare 1 single data=breast_cancer model=cnn_small   | data=breast_cancer holds vectors: choose model=
bare 1 single data=breast_cancer model=vit_tiny    | takes images
vectors 1 single loader=streamed                   | loader=streamed with; it holds vectors: choose loader=resident
vectors 1 single data.augment=true                 | data.augment=true with data=breast_cancer is refused
vectors 1 single channels_last=true                | channels_last=true with data=breast_cancer is refused
vectors 1 single preprocess.engine=numpy preprocess.recipe=sort | its recipes are for images
vectors 1 tf_single                                | TensorFlow's part takes images only
mlp 1 single preprocess.recipe=sort                | =none does nothing: choose preprocess.recipe=null
mlp 1 single preprocess.engine=numpy               | preprocess.engine=numpy needs a recipe
mlp 1 single preprocess.engine=numpy preprocess.recipe=sort preprocess.threads=2 | but a device has 1 core
mlp 1 single preprocess.engine=numpy preprocess.recipe=normalise | a run can't train on what
mlp 2 ddp epochs=0 preprocess.engine=numpy preprocess.recipe=sort | preprocesses only; choose devices=1

# Models
mlp 1 single model.hidden=[]                       | model.hidden
mlp 1 single model.hidden=[8,0]                    | model.hidden.1=0
mlp 1 single model=cnn model.norm=batchnorm        | model.norm=batchnorm; batch, group, sync
mlp 1 single model=cnn_large model.grouped=1       | model.grouped=1
mlp 1 single model=cnn_small model.norm=batch      | model.norm is not a key
mlp 1 single model=resnet50 model.block=wide       | model.block=wide; basic, bottleneck
mlp 1 single model=vit model.dim=100               | model.dim=100; model.heads=8; model.dim=104
mlp 1 single model=vit model.patch_size=0          | model.patch_size=0
mlp 1 single model=cnn_large data.image_size=7     | image_size=7; image_size=8
mlp 1 single model=cnn data.image_size=4           | image_size=4; image_size=8
mlp 1 single model=vit data.image_size=30          | image_size=30; patch_size=4; 1, 2, 3, 5, 6, 10, 15, 30
mlp 1 single model=vit_b_16 data.channels=3 data.image_size=28 | image_size=28; patch_size=16
mlp 1 single model=vit_b_16 data.channels=1        | in_channels=1; model=vit
gpt 1 single model.width=18                        | model.width=18; model.heads=4; model.width=20
gpt 1 single model.width=12 model.positions=rope   | model.positions=rope; model.width=12; model.width=16
gpt 1 single model.kv_heads=3                      | model.kv_heads=3; model.heads=4; choose 1, 2, 4
moe 1 single model.kv_heads=3                      | model.kv_heads=3; choose 1, 2, 4
moe 1 single model.top_k=1                         | model.top_k=1; always 1; model.top_k=2 … 4
moe 1 single model.top_k=6                         | model.top_k=6; model.experts=4; model.top_k=2 … 4
moe 1 single model.top_k=1 model.experts=1         | model.top_k=1; model.experts=2; model=gpt
moe 1 single compile=true                          | compile=true is refused: model=gpt_moe_tiny
"""
"""Model, devices, strategy, options, as in the table of trainings | what is said."""
ROWS_ON_GPUS = """
mlp 1 data_parallel                                | on devices=1 would train on one device
mlp 2 data_parallel nodes=2                        | needs nodes=1, not nodes=2
mlp 2 data_parallel batch_size=25                  | batch_size=25 can't be scattered evenly over devices=2
mlp 2 data_parallel batch_size=1                   | batch_size=1 can't be scattered
mlp 2 data_parallel compile=true                   | the module is copied anew
mlp 2 model_parallel nodes=2                       | drives all GPUs from one process and so needs nodes=1
mlp 2 zero1 precision=fp16                         | precision=fp16 with strategy=zero1 makes the host wait
mlp 2 ddp nccl.per_edge=true                       | means nothing for strategy=ddp, which has no stages
mlp 2 fsdp optimizer.implementation=fused          | torch has no fused update of this optimizer for sharded
vit_8 4 dp_tp optimizer=adagrad optimizer.implementation=fused | optimizer=adagrad and strategy=dp_tp
mlp 1 single measure.waits=error epochs=1          | measure.waits=error is refused with epochs=1
mlp 2 parameter_server measure.waits=error epochs=2 | measure.waits=error; the host waits by design
mlp 1 single measure.waits=error epochs=2 lbfgs    | measure.waits=error; a line search reads each loss

# Captured steps
mlp 2 zero1 graph=true                             | a step of strategy=zero1 can't be captured
mlp 1 single graph=true precision=fp16             | precision=fp16 adapts the scale of the loss on the host
mlp 1 single graph=true compile=true               | compile=true makes other launches
mlp 1 single graph=true clip_norm=1.0              | graph=true captures no clipping
mlp 1 single graph=true lr_schedule=cosine         | every step has the rate of the one that was captured
mlp 1 single graph=true measure.attribution_steps=5 | no phases for measure.attribution_steps
mlp 1 single graph=true lbfgs                      | optimizer=lbfgs can't be captured
mlp 1 single graph=true optimizer.implementation=foreach | optimizer.implementation=foreach with graph=true

# Compiled steps
mlp 1 single step compile=false                    | nothing is compiled under compile=false
mlp 1 single step precision=fp16                   | under precision=fp16 the host decides whether to update
mlp 1 single step lbfgs                            | torch compiles no step of optimizer=lbfgs
mlp 1 single step optimizer.implementation=fused   | a fused update is one kernel already
mlp 1 single step optimizer=adamw precision=fp64   | corrects the bias of the running means in fp32
mlp 1 single step graph=true                       | graph=true is refused: compile=true makes other launches
"""


@pytest.mark.parametrize(
    ("device_type", "row"),
    [
        (device_type, " ".join(row.split()))
        for device_type, rows in (("cpu", ROWS), ("cuda", ROWS_ON_GPUS))
        for row in rows.splitlines()
        if row and row[0] != "#"
    ],
)
def test_what_can_not_work_is_refused_with_the_reason_and_the_fix(device_type: str, row: str) -> None:
    head, _, said = row.partition("|")
    model, devices, strategy, *options = head.split()
    words = {**WORDS, "lbfgs": LBFGS, "step": "compile=true compile_scope=step precision=fp32"}
    chosen = " ".join(words.get(option, option) for option in options)
    given = f"{MODELS_OF_ROWS[model]} strategy={strategy} devices={devices} {chosen}".split()
    with pytest.raises(ConfigError) as refused:
        configure(*{word.partition("=")[0]: word for word in given}.values(), device_type=device_type)
    assert [each for each in map(str.strip, said.split(";")) if each not in str(refused.value)] == []


@pytest.mark.parametrize(
    "asked",
    [
        *("graph=true", "strategy=ddp devices=2 graph=true", "compile=true compile_scope=step precision=fp32"),
        *("strategy=data_parallel devices=2", "epochs=2 measure.waits=error", "strategy=fsdp devices=2 optimizer=adam"),
    ],
)
def test_on_gpus_these_work(asked: str) -> None:
    configure(*MODELS_OF_ROWS["mlp"].split(), *asked.split(), device_type="cuda")
