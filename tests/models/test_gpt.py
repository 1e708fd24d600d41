"""Language models: published sizes, the advisor's formula, GPT-2's and Llama's arithmetic by hand."""

from __future__ import annotations

import copy
import csv
import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import analysis.advisor
from analysis.advisor.layouts import layouts_of
from analysis.advisor.step_tables import SHAPES
from analysis.advisor.transformer import GptShape, gpt_shape, model_flops
from analysis.advisor.transformer import parameters as formula
from parallelbench.config.build import build
from parallelbench.config.run import RunConfig
from parallelbench.config.sites import shipped
from parallelbench.data.tokens import Tokens
from parallelbench.measure.count_layers import model_counts
from parallelbench.models.gpt import Gpt
from parallelbench.models.gpt_layers import CausalAttention, Rotary, rotary_tables, turned
from parallelbench.training.torch_session import build_model
from tests.strategies.test_launches import Operations
from tests.strategies.training import configure, loader_of, prepared

SIZES = {"layers": 2, "width": 16, "heads": 4, "kv_heads": None, "sequence": 12, "vocabulary": 31}
TINY: dict[str, Any] = {"name": "gpt", **SIZES, "positions": "learned", "mlp": "gelu", "mlp_width": None, "tied": False}

ONE = {"global_batch": 1, "micro_batch": 1, "tensor": 1, "pipeline": 1, "data": 1, "recompute": 0, "sharded": 0}
"""One sample on one device."""
DATA = Path(analysis.advisor.__file__).parent / "data"
TIED = ["model.tied=true"]


def built(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    chosen = Gpt(**{**TINY, **options})
    return chosen.build(in_channels=31, image_size=12, num_classes=31).double()


def tokens(samples: int = 3, length: int = 12) -> Tensor:
    return torch.randint(31, (samples, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("positions", "mlp", "tied", "kv_heads"),
    [*itertools.product(("learned", "rope"), ("gelu", "swiglu"), (True, False), (None, 2))],
)
def test_the_advisors_formula_counts_the_same_parameters(positions: str, mlp: str, tied: bool, kv_heads: Any) -> None:
    options = {**TINY, "positions": positions, "mlp": mlp, "tied": tied, "kv_heads": kv_heads, "mlp_width": 40}
    counted = sum(each.numel() for each in built(**options).parameters())
    del options["name"]
    assert counted == formula(layouts_of(gpt_shape(options).columns() | ONE))[0]


def test_a_tied_head_shares_the_embeddings_weights_and_its_gradient_has_both_parts() -> None:
    tied, free = built(tied=True), built(tied=False)
    assert tied.head.linear.weight is tied.embed.tokens.weight
    free.load_state_dict(tied.state_dict())
    for model in (tied, free):
        model(tokens()).logsumexp(-1).sum().backward()
    both = free.embed.tokens.weight.grad + free.head.linear.weight.grad
    torch.testing.assert_close(tied.embed.tokens.weight.grad, both, rtol=1e-12, atol=1e-12)


def test_the_logits_are_gpt_2s_by_hand() -> None:
    model, x = built(), tokens()
    state = {name: value.detach() for name, value in model.state_dict().items()}

    def linear(name: str, y: Tensor) -> Tensor:
        return y @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(name: str, y: Tensor) -> Tensor:
        centred = y - y.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]

    h = state["embed.tokens.weight"][x] + state["embed.positions"]
    hidden_places = torch.ones(12, 12, dtype=torch.bool).triu(1)
    for block in ("block1", "block2"):
        qkv, values = linear(f"{block}.attention.qkv", norm(f"{block}.norm1", h)), []
        for head in range(4):
            q, k, v = qkv[..., 12 * head : 12 * head + 12].split(4, dim=-1)
            scores = (q @ k.transpose(1, 2) / math.sqrt(4)).masked_fill(hidden_places, -math.inf)
            values.append(scores.softmax(-1) @ v)
        h = h + linear(f"{block}.attention.out", torch.cat(values, -1))
        z = linear(f"{block}.fc1", norm(f"{block}.norm2", h))
        h = h + linear(f"{block}.fc2", 0.5 * z * (1 + torch.erf(z / math.sqrt(2))))
    logits = norm("head.norm", h) @ state["head.linear.weight"].T
    torch.testing.assert_close(model(x), logits, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_no_token_sees_a_later_one(positions: str) -> None:
    model, x = built(positions=positions), tokens(1)
    changed = x.clone()
    changed[0, 7] = (x[0, 7] + 1) % 31
    differs = (model(x) != model(changed)).any(-1)[0]
    assert differs.tolist() == [False] * 7 + [True] * 5


def test_rotary_positions_turn_pairs_as_complex_numbers_and_know_distances_only() -> None:
    x = torch.randn(1, 1, 9, 8, dtype=torch.float64)
    wavelengths = 10_000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    angles = torch.arange(9, dtype=torch.float64)[:, None] * wavelengths
    by_hand = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    tables = rotary_tables(x)
    torch.testing.assert_close(turned(x, *tables), torch.cat([by_hand.real, by_hand.imag], -1), rtol=1e-12, atol=1e-12)
    q, k = (vector.expand(1, 1, 9, 8) for vector in torch.randn(2, 8, dtype=torch.float64))
    products = (turned(q, *tables) @ turned(k, *tables).transpose(2, 3))[0, 0]
    for offset in range(-8, 9):
        along = products.diagonal(offset)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-10, atol=1e-10)


def test_rotary_tables_are_computed_in_a_models_first_pass_only_and_fit_each_pass() -> None:
    model, x = built(positions="rope"), tokens()
    with torch.no_grad():
        with Operations() as first, torch.inference_mode():
            model(x)
        with Operations() as second:
            model(x)
    assert (first.seen["arange"], second.seen["arange"]) == (2, 0), "for all layers"
    model(x).sum().backward()
    assert not [name for name, _ in model.named_buffers()]
    narrow, again = copy.deepcopy(model).float(), built(positions="rope")
    torch.testing.assert_close(narrow(x), model(x).float(), rtol=1e-4, atol=1e-5)
    for places in (torch.arange(12), torch.arange(12) * 3):
        for each in (model, again):
            for layer in each.modules():
                if isinstance(layer, CausalAttention):
                    layer.places = places
        assert torch.equal(model(x), again(x)), "those of these places"
    with torch.device("meta"):
        empty = built(positions="rope")
    assert empty(x.to("meta")).device.type == "meta"
    empty.to_empty(device="cpu").load_state_dict(again.state_dict())
    assert torch.equal(empty(x), built(positions="rope")(x))


def test_rotary_tables_are_not_rounded_to_half_precision() -> None:
    x = torch.randn(1, 1, 300, 8)
    exact = turned(x, *Rotary().tables(x, None))
    rounded = turned(x.bfloat16(), *Rotary().tables(x.bfloat16(), None))
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0.01, atol=0.03)


def test_grouped_heads_are_whole_ones_whose_keys_are_equal() -> None:
    grouped, whole = built(kv_heads=2, positions="rope", mlp="swiglu"), built(positions="rope", mlp="swiglu")
    state = grouped.state_dict()
    for name in [name for name in state if name.endswith("qkv.weight")]:
        queries, *shared = state[name].view(2, 4, 4, 16).split([2, 1, 1], dim=1)
        each = [queries.flatten(0, 1), *(heads.flatten(0, 1).repeat_interleave(2, dim=0) for heads in shared)]
        state[name] = torch.stack(each, dim=1).flatten(0, 2)
    whole.load_state_dict(state)
    torch.testing.assert_close(grouped(tokens()), whole(tokens()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_backward_keeps_queries_keys_and_values_once(positions: str, kv_heads: int | None) -> None:
    """Together three times the width, beside the result, a number for each query and head, and rotary tables."""
    attention, kept = built(positions=positions, kv_heads=kv_heads).block1.attention, {}
    width = attention.qkv.out_features
    qkv = torch.randn(3, 12, width, dtype=torch.float64, requires_grad=True).clone()

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attention.attend(qkv)
    tables = 2 * 12 * 4 if positions == "rope" else 0
    assert sum(size for size, _ in kept.values()) == 8 * (3 * 12 * (4 * 16 + 4) + tables)


def test_training_begins_at_the_loss_of_a_guess() -> None:
    model, x = built(width=64, vocabulary=31, tied=True), tokens(64)
    loss = nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(31), rel=0.02)
    stds = {name: value.std().item() for name, value in model.named_parameters() if name.endswith("weight")}
    assert stds["block1.fc1.weight"] == pytest.approx(0.02, rel=0.05)
    assert stds["block1.fc2.weight"] == pytest.approx(0.02 / math.sqrt(4), rel=0.05)
    assert stds["block2.attention.out.weight"] == pytest.approx(0.02 / math.sqrt(4), rel=0.05)


def shipped_model(name: str) -> Gpt:
    model = build(shipped("model", name), "model")
    assert isinstance(model, Gpt)
    assert model.name == name
    return model


def parameters_of(model: Gpt) -> int:
    """Of one block and the ends, times the blocks: 65 billion parameters are not built."""
    sizes = []
    for layers in (1, 2):
        few = msgspec.structs.replace(model, layers=layers)
        with torch.device("meta"):
            built = few.build(in_channels=1, image_size=1, num_classes=1)
        sizes.append(sum(each.numel() for each in built.parameters()))
    return sizes[0] + (model.layers - 1) * (sizes[1] - sizes[0])


@pytest.mark.parametrize("name", ["gpt", "gpt2_small"])
def test_gpt_2s_smallest_model_has_its_published_number_of_parameters(name: str) -> None:
    assert parameters_of(shipped_model(name)) == shipped_model(name).parameters == 124_439_808


@pytest.mark.parametrize("others", [{}, {"mlp": "swiglu"}, {"positions": "rope", "mlp": "swiglu", "kv_heads": 2}])
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_the_formula(tied: bool, others: dict[str, Any]) -> None:
    model = msgspec.structs.replace(shipped_model("gpt_tiny"), tied=tied, **others)
    assert model.parameters == parameters_of(model)


PUBLISHED = list(
    {
        (row["Model"], int(row["SeqLen (T)"]), int(row["NumParams"]))
        for row in csv.DictReader((DATA / "llm_foundry_a100_40gb.csv").read_text().splitlines())
    }
)


@pytest.mark.parametrize(("size", "length", "parameters"), sorted(PUBLISHED))
def test_the_published_models_have_their_published_numbers_of_parameters(
    size: str, length: int, parameters: int
) -> None:
    model = shipped_model(f"mpt_{size}")
    assert (model.layers, model.width, model.heads) == SHAPES[size]
    assert model.sequence == 2048
    assert parameters_of(msgspec.structs.replace(model, sequence=length)) == parameters


@pytest.mark.slow
def test_models_for_clusters_are_planned_without_torch() -> None:
    code = (
        "import sys; from launch.sweep import one_run; from parallelbench.config.run_rules import check_run\n"
        "data = ['data=tokens', 'data.vocabulary=50257', 'data.sequence=2048']\n"
        "for name, strategy in (('mpt_70b', 'fsdp'), ('mpt_30b', 'tensor_parallel')):\n"
        "    run = one_run([*data, f'model={name}', f'strategy={strategy}', 'devices=8', 'batch_size=64']).run\n"
        "    check_run(run, 'cuda')\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def evaluated_losses(run: RunConfig) -> list[float]:
    """Test losses after each epoch, on one device."""
    replica = prepared(run)
    loader, losses = loader_of(replica, run), []
    for epoch in range(1, run.epochs + 1):
        for batch in loader.train(epoch):
            replica.step(batch)
        evaluated = replica.evaluate(loader.test())
        assert evaluated is not None
        losses.append(evaluated[0].item() / run.data.test_samples)
    return losses


@pytest.mark.exhaustive
def test_training_comes_down_to_the_entropy_of_the_tokens_and_no_further() -> None:
    data = ("data=tokens", "data.vocabulary=12", "data.branches=3", "data.sequence=16", "data.train_samples=1024")
    model = ("model=gpt_tiny", "model.layers=1", "model.width=32", "model.heads=2", "model.sequence=16")
    steps = ("model.vocabulary=12", "data.test_samples=256", "batch_size=32", "epochs=6", "lr_schedule=cosine")
    losses = evaluated_losses(run := configure(*data, *model, *steps, "optimizer=adamw", "optimizer.lr=0.01"))
    assert isinstance(run.data, Tokens)
    # What the chain itself loses on these very windows: each successor by its true probability.
    arrays = run.data.load(Path("nowhere"))
    pairs, probability = np.zeros((12, 12)), np.zeros((12, 12))
    np.add.at(pairs, (arrays.train_images.ravel(), arrays.train_labels.ravel()), 1)
    np.put_along_axis(probability, pairs.argsort(1)[:, ::-1][:, :1], 0.5, 1)
    np.put_along_axis(probability, pairs.argsort(1)[:, ::-1][:, 1:3], 0.25, 1)
    least = -np.log(probability[arrays.test_images.ravel(), arrays.test_labels.ravel()]).mean()
    assert least == pytest.approx(1.5 * math.log(2), rel=0.03)
    assert losses[0] > 1.06 * least
    assert least < losses[-1] < 1.02 * least


def flop_per_sample(model: Gpt, length: int) -> float:
    """Six per parameter of a matrix and token, and attention in full: appendix B of PaLM (Chowdhery et al. 2022)."""
    attention = 2 * (1 + model.key_heads / model.heads) * model.width**2
    products = 2 * (attention + model.token_weights) + 4 * length * model.width
    return 3.0 * length * (model.layers * products + 2 * model.width * model.vocabulary)


@pytest.mark.parametrize("options", [[], ["model.kv_heads=2", "model.positions=rope", "model.mlp=swiglu"], TIED])
@pytest.mark.parametrize("length", [64, 40])
def test_what_a_step_does_is_the_formulas(options: list[str], length: int) -> None:
    run = configure("data=tokens", f"data.sequence={length}", "model=gpt_tiny", *options)
    assert isinstance(run.model, Gpt)
    counts, built = model_counts(run).layers, build_model(run)
    counted = 3 * sum(each.product_flop for each in counts)
    assert counted == flop_per_sample(run.model, length)
    assert sum(each.parameters for each in counts) == sum(each.numel() for each in built.parameters())
    known = [name for name in GptShape.__struct_fields__ if name in Gpt.__struct_fields__]
    shape = gpt_shape({name: getattr(run.model, name) for name in known} | {"sequence": length})
    assert model_flops(layouts_of(shape.columns() | ONE))[0] == counted
