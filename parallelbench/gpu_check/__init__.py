"""Checks of what only a GPU can show: `make gpu-check`, or `python -m parallelbench.gpu_check`."""
