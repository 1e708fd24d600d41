"""Slurm: the resources of a job, submission, the supervisor, the steps that it starts, and the scheduler's answers."""
