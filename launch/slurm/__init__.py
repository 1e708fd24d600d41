"""Slurm: the resources of a job, submission, the program on each node, and the scheduler's answers."""
