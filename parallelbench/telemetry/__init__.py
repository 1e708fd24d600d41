"""Energy, power and load of a run's devices and hosts: sampled by one process per node, attributed to epochs later."""
