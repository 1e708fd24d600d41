"""What is derived from the raw rows of a run, and how: the metrics of runs and epochs are aggregated here only.

A metric that was not measured, or that needs more epochs than there are, is null.
"""
