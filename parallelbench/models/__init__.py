"""The models of the seeds, each a sequence of named layers that knows nothing of parallelism."""
