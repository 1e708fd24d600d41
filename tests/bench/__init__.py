"""Benchmarks of the suite itself: `make bench` runs them and writes docs/benchmarks.md. Not a part of `make test`."""
