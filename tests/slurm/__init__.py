"""Tests on a real Slurm that is started for them on this machine."""
