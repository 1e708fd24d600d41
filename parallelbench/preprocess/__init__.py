"""Preprocessing of the training set by an engine in a process of its own, measured and compared with NumPy."""
