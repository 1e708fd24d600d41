"""The models, each a sequence of named layers that knows nothing of parallelism."""
