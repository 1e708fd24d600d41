"""Slurm: what a job asks for, submission, the program on each node, and what the scheduler says of it all."""
