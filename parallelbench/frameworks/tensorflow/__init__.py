"""Training with TensorFlow. Only `tf_options` can be imported without it."""
