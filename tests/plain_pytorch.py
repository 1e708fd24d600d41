"""The losses again, in plain PyTorch: `python -m tests.plain_pytorch results/demo`.

It trains a run anew from docs/what-was-trained.md alone and takes nothing of the suite but its results. The run is one
of `strategy=single model=cnn_small data=digits optimizer=adam precision=fp32` on a CPU. In fp32 sums in another order
may round differently, and training carries that on; a wrong batch or a wrong update shows in the second digit.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import nn
from torch.nn import functional as F

from analysis import load

NAMES = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")
Digits = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Images [n, 1, size, size] and labels [n] for training, then those of the test set."""


def digits(size: int) -> Digits:
    """scikit-learn's file: of each digit every fifth image is of the test set."""
    spec = importlib.util.find_spec("sklearn")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    with gzip.open(Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.int64)
    levels, labels = torch.tensor(table[:, :-1]).view(-1, 1, 8, 8), torch.tensor(table[:, -1])
    large = F.interpolate(levels.double(), size=(size, size), mode="bilinear", align_corners=False)
    images = (((255 * large / 16 + 0.5).floor() / 255 - 0.3051) / 0.3248).float()
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(10):
        is_test[(labels == digit).nonzero().flatten()[4::5]] = True
    return images[~is_test], labels[~is_test], images[is_test], labels[is_test]


def batches(seed: int, epoch: int, *, samples: int, size: int) -> tuple[torch.Tensor, ...]:
    """The numbers of each batch's samples; the rest that fills no batch is dropped."""
    digest = hashlib.sha256(f"order/{seed}/{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randperm(samples, generator=generator)[: samples // size * size].split(size)


def trained(run: dict[str, Any]) -> pl.DataFrame:
    """Loss and accuracy of every epoch: means over its training samples, each at the parameters of its step, and over
    the test set after it.
    """
    size, seed, options = run["data"]["image_size"], run["seed"] + run["repeat"], run["optimizer"]
    train_images, train_labels, test_images, test_labels = digits(size)
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (size // 2) ** 2, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    betas, decay = (options["beta1"], options["beta2"]), options["weight_decay"]
    adam = torch.optim.Adam(model.parameters(), lr=options["lr"], betas=betas, eps=options["eps"], weight_decay=decay)
    rows = []
    for epoch in range(1, run["epochs"] + 1):
        loss_sum, correct, seen = 0.0, 0, 0
        for batch in batches(seed, epoch, samples=len(train_labels), size=run["batch_size"]):
            adam.zero_grad()
            logits = model(train_images[batch])
            loss = F.cross_entropy(logits, train_labels[batch])
            loss.backward()
            adam.step()
            loss_sum += loss.item() * len(batch)
            correct += int((logits.argmax(1) == train_labels[batch]).sum())
            seen += len(batch)
        with torch.no_grad():
            logits = model(test_images)
            right = (logits.argmax(1) == test_labels).double().mean().item()
            test = F.cross_entropy(logits, test_labels).item(), right
        rows.append((loss_sum / seen, correct / seen, *test))
    return pl.DataFrame(rows, schema=NAMES, orient="row")


def largest_difference(results: Path) -> float:
    """Of any loss of any epoch of the first repeat."""
    runs = load(results)
    single = runs.run.filter(strategy="single", data="digits", model="cnn_small", optimizer="adam", precision="fp32")
    run_id, config_json = single.sort("repeat").select("run_id", "config_json").row(0)
    plain = trained(json.loads(config_json))
    suite = runs.epochs.filter(run_id=run_id).sort("epoch").select(NAMES)
    losses = ("train_loss", "test_loss")
    return max(abs(a - b) for name in losses for a, b in zip(plain[name], suite[name], strict=True))


if __name__ == "__main__":
    print(f"largest difference of a loss: {largest_difference(Path(sys.argv[1])):.1e}")
