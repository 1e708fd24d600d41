"""What is derived from the raw rows of a run, and how. Nothing else in the suite aggregates over ranks or
epochs.

A metric that was not measured, or that needs more epochs than there are, is null.
"""
