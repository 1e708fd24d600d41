"""One run of the benchmark: from a resolved configuration to Parquet rows."""
