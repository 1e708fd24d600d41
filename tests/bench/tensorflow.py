"""TensorFlow's part: the suite's loop against `keras.Model.fit`, and its feed against the tutorials' `tf.data`.

Everything is measured in one process of TensorFlow's environment (`tests/bench/tensorflow_side.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from launch.sweep import one_run
from parallelbench.environments import python_of, why_not
from parallelbench.results.attempt import Attempt
from parallelbench.training.reference import make
from tests.bench.measure import Figure, ratios

OVERRIDES = [
    "strategy=tf_single",
    "model=cnn_small",
    "optimizer=adam_keras",
    "data=synthetic",
    "data.channels=1",
    "data.image_size=28",
    "data.train_samples=12800",
    "data.test_samples=128",
    "batch_size=128",
    "epochs=14",
    "measure.parity=false",
]
"""As many epochs as are measured, and more: each has its order of samples."""


def figures() -> list[Figure]:
    """Speed-ups over Keras and over the tutorials' pipeline; the same losses are asserted."""
    python = python_of("tensorflow")
    if problem := why_not("tensorflow", "cpu"):
        print(f"left out: {problem}", end=" ")
        return []
    with tempfile.TemporaryDirectory() as folder:
        attempt = Attempt(Path(folder) / "attempts" / "1")
        attempt.path.mkdir(parents=True)
        run = one_run(OVERRIDES).run
        attempt.write_config(run)
        make(run, attempt)
        command = [str(python), "-m", "tests.bench.tensorflow_side", str(attempt.path)]
        command.append(str(run.cores_per_device))
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=sys.stderr, text=True, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    fit, feed = said["fit"], said["feed"]
    per_s = {name: f"{12_800 / sorted(feed[name])[len(feed[name]) // 2] / 1000:,.0f}k images/s" for name in feed}
    release = f"TensorFlow {said['version']}"
    work = f"{release}; cnn_small, batch 128, 100 steps, 5 rounds; first losses differ by {said['loss']:.1g}"
    return [
        Figure(
            "TensorFlow: the suite's loop ÷ keras.Model.fit, speed", ratios(fit, "keras", "suite"), "", 1, True, work
        ),
        Figure(
            "TensorFlow: feeding from memory ÷ tf.data as in tutorials, speed",
            ratios(feed, "tutorial", "suite"),
            "×",
            5,
            True,
            f"{release}, 5 rounds; from_tensor_slices, map, cache, shuffle, batch, prefetch; {per_s['suite']} against "
            f"{per_s['tutorial']}",
        ),
    ]
