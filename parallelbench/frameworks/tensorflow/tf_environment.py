"""TensorFlow's part of a run's environment."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def entries() -> dict[str, Any]:
    """Its packages, threads, GPUs and precision."""
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    devices = max(1, len(tf.config.list_logical_devices("CPU")))
    build = tf.sysconfig.get_build_info()
    return {
        "packages": {"tensorflow": tf.__version__},
        "threads": threads // devices,
        "tensorflow": {"intra_op_threads": threads, "logical_cpus": devices},
        "cuda": {"version": build["cuda_version"], "cudnn": build["cudnn_version"]} if build["is_cuda_build"] else None,
        "tensor_float_32": tf.config.experimental.tensor_float_32_execution_enabled(),
    }
